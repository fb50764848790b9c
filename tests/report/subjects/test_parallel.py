"""Collectives and schemes of data parallel training on the page."""

import io

import rich.console

from tests.report.page import Page
from trainstep.report.page import render
from trainstep.report.subjects.parallel import (
    SCHEMES,
    computation_findings,
    data_findings,
    exposed_findings,
    host_findings,
    label_among,
    overlap_findings,
)
from trainstep.report.tables import make_table
from trainstep.report.terminal import to_terminal
from trainstep.rows import CollectiveFitRow, CollectiveRow, ParallelFamilyRow, ParallelRow, ParallelTraceRow
from trainstep.rows.records import Times


def row(collective, size, time=1.0, status="ok", reason="", ranks=2):
    found = {}
    if status == "ok":
        found = {
            "n": 20, "payload_bytes": int(size * 1e6), "times": {"time": Times(time, time, time)},
            "fastest_rank_ms": time, "slowest_rank_ms": time, "algorithm_gb_s": 200.0, "bus_gb_s": 200.5,
        }  # fmt: skip
    return CollectiveRow(
        collective=collective, world_size=ranks, dtype="fp32", size_mb=size, backend="nccl",
        status=status, reason=reason, **found,
    )  # fmt: skip


def fit(collective):
    return CollectiveFitRow(
        collective=collective, world_size=2, dtype="fp32", backend="nccl",
        overhead_us=31.25, bus_gb_s=323.5, sizes=2, worst_error=0.0123,
    )  # fmt: skip


def test_every_case_and_fit_is_a_row_with_its_raw_value():
    page = render([row("all-reduce", 1.0, 0.04875), row("all-reduce", 100.0), fit("all-reduce"),
                   row("all-gather", 1.0, status="out of memory", reason="needed 9 GiB")])  # fmt: skip
    tables = Page(page).values
    first = {"collective": "all-reduce", "size_mb": "1.0", "time_ms": "0.04875", "bus_gb_s": "200.5"}
    assert first.items() <= tables["collectives"]["0"].items()
    assert tables["collectives"]["2"].keys() == {"collective", "size_mb"}, "no time for what did not run"
    fitted = {"overhead_us": "31.25", "bus_gb_s": "323.5", "worst_error": "0.0123"}
    assert fitted.items() <= tables["collective-fit"]["0"].items()
    assert "needed 9 GiB" in page


def scheme(name, step=None, peak=None, **more):
    times = {} if step is None else {"step": Times(step, step - 1, step + 1)}
    return ParallelRow(workload="2.7B", scheme=name, world_size=2, times=times, peak_gib=peak, **more)


def test_bars_say_how_a_scheme_is_compiled_where_that_differs():
    eager, compiled = (scheme("fsdp", ms, 1.0, compile=mode) for ms, mode in ((9.0, "off"), (7.0, "blocks")))
    assert [label_among(each, [eager, compiled]) for each in (eager, compiled)] == ["fsdp", "fsdp, compile blocks"]
    assert label_among(compiled, [compiled, scheme("ddp", 8.0, compile="blocks")]) == "fsdp"
    assert "fsdp, compile blocks" in render([eager, compiled])
    assert "fsdp, compile" not in render([compiled, scheme("ddp", 8.0, compile="blocks")])


def with_parts(name, step, exposed, **more):
    """A scheme whose step of these milliseconds waits for so many."""
    parts = {"forward": step / 4, "loss": 1.0, "backward": step / 2, "optimizer": 2.0}
    times = {f"{phase}_computing": Times(ms) for phase, ms in parts.items()}
    times |= {"step": Times(step, step - 1, step + 1), "exposed_communication": Times(exposed)}
    return ParallelRow(workload="2.7B", scheme=name, world_size=2, times=times, exposed_share=exposed / step, **more)


def test_how_much_of_a_step_is_communication_is_in_one_table_that_fits_a_terminal():
    """The phases were in results.jsonl alone; what communication costs was a difference of two runs."""
    traffic = {"collectives": 291, "sent_gib": 12.69, "all_communication_ms": 50.0}
    rows = [
        with_parts("single", 137.0, 0.0, samples_per_s=58.4),
        with_parts("naive", 189.0, 52.2, samples_per_s=42.3, speedup=1.45, speedup_low=1.4, speedup_high=1.5,
                   **traffic),
        with_parts("fsdp", 129.0, 9.5, samples_per_s=62.0, speedup=2.12, **traffic),
    ]  # fmt: skip
    page = Page(render(rows)).values["parallel"]
    assert page["1"].items() >= {
        "step_ms": "189.0", "forward_computing_ms": "47.25", "loss_computing_ms": "1.0",
        "backward_computing_ms": "94.5", "optimizer_computing_ms": "2.0", "exposed_communication_ms": "52.2",
        "exposed_share": str(52.2 / 189), "all_communication_ms": "50.0", "collectives": "291", "sent_gib": "12.69",
        "samples_per_s": "42.3", "speedup": "1.45", "speedup_low": "1.4",
    }.items()  # fmt: skip
    table = make_table(SCHEMES, rows, "terminal")
    texts = dict(zip(table.columns, table.texts()[1], strict=True))
    assert {"exposed (ms)": "52.2", "of the step (%)": "27.6", "communication in all (ms)": "50.0", "calls": "291",
            "sent (MB)": "13,626", "samples/s": "42.3", "speed-up": "1.45×"}.items() <= texts.items()  # fmt: skip
    lines = drawn(table, 120)
    assert max(map(len, lines)) <= 120
    first = next(line for line in lines if line.startswith(" naive "))
    assert all(f" {each} " in first for each in ("47.2", "94.5", "2.00", "52.2", "27.6", "1.45×", "42.3")), first


def test_the_schemes_that_wait_most_and_least_are_told():
    rows = [with_parts("fsdp", 100.0, 5.0), with_parts("naive", 200.0, 50.0), with_parts("single", 90.0, 0.0)]
    (found,) = exposed_findings([*rows, scheme("flat", 130.0)])
    assert found.figures == {
        "most": "naive", "most_share": 0.25, "most_exposed_ms": 50.0, "most_step_ms": 200.0,
        "least": "fsdp", "least_share": 0.05, "least_exposed_ms": 5.0, "least_step_ms": 100.0,
    }  # fmt: skip
    assert "25% of the step with naive (50.0 of 200 ms), and 5.0%" in found.sentence
    (one,) = exposed_findings(rows[:1])
    assert (one.figures["most"], "least" in one.figures) == ("fsdp", False)
    assert exposed_findings(rows[2:]) == []


def drawn(table, width):
    console = rich.console.Console(width=width, file=io.StringIO())
    console.print(to_terminal(table, width))
    return console.file.getvalue().splitlines()


def test_schemes_are_rows_with_raw_values():
    rows = [
        scheme("single", 100.5, 40.0, before_step_weights_gib=10.0),
        with_parts("flat", 130.25, 29.75, peak_gib=40.0, before_step_weights_gib=10.0),
        scheme("fsdp", status="out of memory", reason="needed 300 GiB"),
    ]
    page = Page(render(rows))
    assert [cells["scheme"] for cells in page.values["parallel"].values()] == ["single", "flat", "fsdp"]
    second = {"step_ms": "130.25", "step_low_ms": "129.25", "exposed_communication_ms": "29.75", "peak_gib": "40.0"}
    assert second.items() <= page.values["parallel"]["1"].items()
    assert page.values["parallel"]["2"] == {"scheme": "fsdp"}
    assert "needed 300 GiB" in render(rows)


def test_a_scheme_with_several_numbers_of_replicas_is_told_apart_by_them():
    rows = [scheme("single", 100.5, 40.0), scheme("fsdp", 90.0, 20.0)]
    rows += [scheme("hsdp", step, 30.0, replicas=each) for each, step in ((1, 80.0), (2, 85.0))]
    page = render(rows)
    table = Page(page).values["parallel"].values()
    assert [(cells["scheme"], cells.get("replicas")) for cells in table] == [
        ("single", None), ("fsdp", None), ("hsdp", "1"), ("hsdp", "2")
    ]  # fmt: skip
    assert "hsdp-2" in page, "in the charts"
    assert "hsdp-1" in page


def traced(name, share, exposed):
    return ParallelTraceRow(
        scheme=name, world_size=2, hidden_share=share, exposed_communication_ms=exposed, communication_ms=12.5
    )


def test_the_schemes_that_hide_most_and_least_of_their_communication_are_told():
    rows = [traced("fsdp", 0.6, 5.0), traced("flat", 0.0, 12.5), traced("bucketed-25", 0.9, 1.25),
            traced("torch-ddp", None, None)]  # fmt: skip
    (found,) = overlap_findings(rows)
    assert found.figures == {
        "most": "bucketed-25", "most_hidden_share": 0.9, "most_exposed_ms": 1.25, "most_communication_ms": 12.5,
        "least": "flat", "least_hidden_share": 0.0, "least_exposed_ms": 12.5, "least_communication_ms": 12.5,
    }  # fmt: skip
    assert found.sentence.endswith("(1.25 of 12.5 ms are exposed), and 0% with flat (12.5 of 12.5 ms).")
    (alone,) = overlap_findings(rows[2:])
    assert (alone.figures["most"], "least" in alone.figures) == ("bucketed-25", False)
    (two,) = overlap_findings(rows[:2])
    assert (two.figures["most"], two.figures["least"]) == ("fsdp", "flat")
    assert overlap_findings(rows[3:]) == []


def launched(scheme, step, issue, wait, optimizer=(7.0, 4.0), **settings):
    """A row of a scheme; `optimizer`: the update's time, and that of its launches."""
    times = {"step": step, "issue": issue, "wait": wait, "optimizer": optimizer[0], "optimizer_issue": optimizer[1]}
    times = {name: Times(each) for name, each in times.items()}
    return ParallelRow(workload="2.7B", scheme=scheme, world_size=4, times=times, **settings)


def test_schemes_that_wait_for_their_host_are_told():
    busy = launched("single", 138.0, 78.0, 60.0, (28.0, 5.0))
    assert host_findings([busy, launched("fsdp", 150.0, 139.0, 10.6), ParallelRow(scheme="hsdp", world_size=4)]) == []
    late = launched("fsdp", 150.0, 139.5, 10.4, compile="off")
    compiled = launched("torch-fsdp2", 230.0, 218.0, 12.0, (10.0, 9.0), compile="blocks")
    (found,) = host_findings([busy, late, compiled])
    assert found.id == "parallel.host"
    assert found.figures == {
        "schemes": "fsdp, torch-fsdp2, compile blocks", "latest": "torch-fsdp2, compile blocks", "issue_ms": 218.0,
        "step_ms": 230.0,
    }  # fmt: skip
    (alone,) = host_findings([compiled])
    assert ["Compiled blocks, more tokens" in each.sentence for each in (found, alone)] == [True, False]
    cells = Page(render([busy, late])).values["parallel"].values()
    assert [each["issue_ms"] for each in cells] == ["78.0", "139.5"]


def test_a_host_that_runs_ahead_in_a_window_does_not_set_the_pace():
    """Where it cannot run ahead the GPU waits for it too, but launches take it less than a step."""
    settings = {"timing": "sustained"}
    assert host_findings([launched("single", 139.0, 125.0, 31.0, (27.7, 4.0), **settings)]) == []
    assert len(host_findings([launched("fsdp", 139.0, 125.2, 9.0, **settings)])) == 1
    assert host_findings([launched("fsdp", 139.0, 125.2, 10.0, **settings)]) == [], "7 ms before the update"


def test_odd_batches_and_losses_are_said_once_per_workload():
    def row(scheme="flat", **values):
        return ParallelRow(workload="theirs", scheme=scheme, world_size=2, **values)

    assert data_findings([row(share_difference=0.001), row()]) == []
    assert len(data_findings([row(share_difference=0.00101)])) == 1
    rows = [row(scheme, share_difference=0.17, batches="rank 0's") for scheme in ("flat", "fsdp")]
    batches, shares = data_findings(rows)
    assert (batches.id, shares.id) == ("parallel.batches", "parallel.shares")
    assert shares.figures == {"workload": "theirs", "share": 0.17}


def families(scheme, **ms):
    return [
        ParallelFamilyRow(scheme=scheme, world_size=2, phase=phase, family=family, ms=each)
        for family, both in ms.items()
        for phase, each in zip(("forward", "backward"), both, strict=True)
    ]


def computing(scheme, ms):
    return ParallelTraceRow(scheme=scheme, world_size=2, computation_ms=ms)


def test_what_the_fastest_traced_scheme_computes_is_told_by_family_the_most_first():
    traces = [computing("flat", 31.0), computing("fsdp", 30.0), computing("torch-ddp", None)]
    own = families("fsdp", copy=(0.5, 0.25), reduction=(1.0, 0.5), attention=(3.0, 5.0), matmul=(7.0, 12.0))
    others = families("flat", matmul=(8.0, 12.0), copy=(11.0, 0.0))
    (found,) = computation_findings([*traces, *own, *others])
    assert found.figures == {
        "scheme": "fsdp", "computation_ms": 29.25, "family_0": "matmul", "family_0_ms": 19.0,
        "family_1": "attention", "family_1_ms": 8.0, "family_2": "reduction", "family_2_ms": 1.5, "rest_ms": 0.75,
    }  # fmt: skip
    assert found.sentence.endswith(": matmul 19.0, attention 8.00, reduction 1.50, everything else 0.750 ms.")
    (few,) = computation_findings([traces[1], *families("fsdp", matmul=(7.0, 12.0))])
    assert "rest_ms" not in few.figures
    assert computation_findings([traces[1], *others]) == computation_findings(own) == []
