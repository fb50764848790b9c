"""What a plan looks like: sentences, charts, and strategies that do not fit."""

from dataclasses import replace

from trainstep.report.page import render
from trainstep.report.subjects import findings
from trainstep.report.subjects.plan import plan, scaling_table
from trainstep.rows import PlanScalingRow, row_of

CASE = {
    "workload": "big", "device": "NVIDIA H200", "batch": 4, "context": 512, "precision": "bf16", "compile": "off",
    "attention": "sdpa", "optimizer": "adamw-fused",
}  # fmt: skip


def strategy(name, *, fits, tokens_per_s=1e6, peak_gib=150.0, smallest_gpus=None, room=139.0):
    values = {
        "fits": fits, "tokens_per_s": tokens_per_s, "utilisation": 0.4, "step_ms": 51.3, "limit": "communication",
        "peak_gib": peak_gib, "smallest_gpus": smallest_gpus, "tensors_gib": room,
    }  # fmt: skip
    case = {**CASE, "checkpointing": "none", "strategy": name, "gpus": 8, "tensor_parallel": 1}
    return row_of("plan", case, values)


def scaling(gpus, **fits):
    return [
        PlanScalingRow(**CASE, gpus=gpus, strategy=name, tokens_per_s=1000.0 * gpus, fits=fit)
        for name, fit in fits.items()
    ]


MACHINE = row_of("plan machine", {"workload": "big", "device": "NVIDIA H200"}, {"basis": "a datasheet"})


def found_in(*records):
    return {found.id: found for found in findings(records) if found.topic == "plan"}


def test_the_fastest_that_fits_is_named():
    found = found_in(MACHINE, strategy("ddp", fits=False, tokens_per_s=9e6), strategy("fsdp", fits=True))
    assert list(found) == ["plan.fastest", "plan.basis"]
    assert found["plan.fastest"].figures == {
        "strategy": "fsdp", "gpus": 8, "tokens_per_s": 1e6, "utilisation": 0.4, "step_ms": 51.3,
        "limit": "communication",
    }  # fmt: skip
    assert "at 40% of the peak and 51.3 ms a step" in found["plan.fastest"].sentence
    assert found["plan.basis"].figures == {"basis": "a datasheet"}


def test_launches_that_are_known_of_some_strategies_alone_are_told():
    rows = [replace(strategy(name, fits=True), launch_ms=known) for name, known in (("ddp", 40.0), ("fsdp", None))]
    told = found_in(*rows)["plan.launches"]
    assert told.figures == {"strategies": "fsdp"}
    for known in (40.0, None):
        assert "plan.launches" not in found_in(*(replace(row, launch_ms=known) for row in rows))


def test_where_nothing_fits():
    fsdp = strategy("fsdp", fits=False, peak_gib=12.34, smallest_gpus=64, room=10.0)
    (found,) = found_in(strategy("ddp", fits=False), fsdp).values()
    assert (found.id, found.figures) == (
        "plan.nothing-fits",
        {
            "strategy": "fsdp", "peak_gib": 12.34, "tensors_gib": 10.0, "fewest_gpus": 64,
            "fewest_gpus_strategy": "fsdp",
        },
    )  # fmt: skip
    (found,) = found_in(strategy("ddp", fits=False)).values()
    assert found.figures["fewest_gpus"] is None
    assert "No number of GPUs helps" in found.sentence
    assert found_in(MACHINE) == {}


def test_of_several_the_fastest_the_least_and_the_fewest_are_named():
    fits = [strategy(name, fits=True, tokens_per_s=speed) for name, speed in (("a", 5.0), ("b", 7.0), ("c", 6.0))]
    assert found_in(*fits)["plan.fastest"].figures["strategy"] == "b"
    one = replace(strategy("single", fits=True), gpus=1)
    assert "single is fastest on one GPU, with" in found_in(one)["plan.fastest"].sentence
    none = [
        strategy(name, fits=False, peak_gib=peak, smallest_gpus=gpus)
        for name, peak, gpus in (("a", 30.0, 64), ("b", 20.0, None), ("c", 25.0, 1024), ("d", 40.0, 2048))
    ]
    found = found_in(*none)["plan.nothing-fits"]
    assert (found.figures["strategy"], found.figures["fewest_gpus_strategy"]) == ("b", "a")
    assert found.sentence.endswith("With a it takes 64 GPUs.")
    assert found_in(*none[1:])["plan.nothing-fits"].figures["fewest_gpus"] == 1024


def test_of_several_numbers_of_gpus_the_most_steps_of_a_gpus_batch_count():
    """Two GPUs at 100 ms a step do less than one at 40 ms, whatever tokens are said of each."""
    slow = replace(strategy("two", fits=True, tokens_per_s=9e6), gpus=2, step_ms=100.0)
    fast = replace(strategy("one", fits=True, tokens_per_s=1e6), gpus=1, step_ms=40.0)
    assert found_in(slow, fast)["plan.fastest"].figures["strategy"] == "one"
    unknown = replace(fast, tokens_per_s=None)
    assert (
        found_in(unknown)["plan.fastest"].sentence.partition(" Limit")[0].endswith("on one GPU, with 40.0 ms a step.")
    )


def test_throughput_by_gpus_leaves_out_what_does_not_fit():
    rows = [MACHINE, *(row for gpus in (2, 4, 8) for row in scaling(gpus, ddp=gpus > 2, fsdp=False))]
    assert "a datasheet" in plan(rows).lead
    (table,) = scaling_table(rows)
    column = table.columns.index("ddp")
    assert [row.cells[column].plain for row in table.rows] == ["does not fit", "4,000", "8,000"]
    assert [row.cells[column].value for row in table.rows] == [None, 4000.0, 8000.0]
    assert "predicted, not measured" in render(rows)
    assert plan([]) is None
