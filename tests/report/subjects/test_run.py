"""Steps whose batches come in bursts: the median step is one that waits for nothing, and nothing is told by it."""

import dataclasses

import pytest

from tests.report.test_charts import drawn, ends, tips
from trainstep.base.stats import summarize
from trainstep.report.blocks import Charts
from trainstep.report.breakdown import breakdown
from trainstep.report.charts.steps import MOST
from trainstep.report.headlines import headlines
from trainstep.report.subjects import run
from trainstep.report.subjects.run import as_told, comes_in_bursts, is_uneven, share_of
from trainstep.report.summary import cards
from trainstep.report.tables import make_table
from trainstep.rows import LineRow, ScriptRow
from trainstep.rows.records import Times


def row(**phases):
    """A script's steps, by the milliseconds of their phases."""
    whole = [sum(each) for each in zip(*phases.values(), strict=True)]
    times = {name: Times.of(summarize(ms)) for name, ms in {**phases, "step": whole}.items()}
    samples = {**phases, "step": whole}
    return ScriptRow(workload="train.py", times=times, n=len(whole), samples=samples, left_out=3, on_gpu=False)


BURSTS = row(data=[0.5, 0.5, 0.5, 62.5] * 6, forward=[1.0] * 24)
SLOW_ONCE = row(data=[0.5] * 24, forward=[1.0] * 23 + [25.0])
RANKS = [dataclasses.replace(row(forward=[1.0, 2.0], own=[1.0, 5.0 + 4 * rank]), rank=rank) for rank in range(3)]
EVEN = row(data=[4.0] * 24, forward=[6.0] * 24)


def said(rule, *rows):
    return [finding.sentence for finding in rule(rows)]


def test_what_a_step_takes_and_waits_for_is_told_by_sums():
    (phases,) = said(run.longest_phases, BURSTS)
    assert phases == (
        "A step takes 17.0 ms (mean of 24; the median is 1.50 ms): data wait 94%, forward 5.9%. Some steps wait "
        "far longer for their batch than most, as where workers bring batches in bursts."
    )
    (bound,) = said(run.data_bound, BURSTS)
    assert bound.startswith("A step waits 16.0 ms on average for its batch, 94% of it. Try more workers")


def test_even_steps_are_told_by_their_median():
    assert said(run.longest_phases, EVEN) == ["A step takes 10.0 ms (median of 24): forward 60%, data wait 40%."]


@pytest.mark.parametrize(
    ("cores", "loader", "stake_ms"),
    [(None, "no workers", 16.0), (2, "no workers", 9.0), (64, "no workers", 13.0), (2, "1 workers", 16.0)],
)
def test_workers_take_as_long_for_a_batch_together_as_there_are_of_them(cores, loader, stake_ms):
    step = dataclasses.replace(row(data=[16.0] * 9, forward=[1.0] * 9), loader=f"t.py:3, {loader}, memory not pinned")
    (bound,) = run.data_bound([dataclasses.replace(step, environment={"cores": cores})])
    assert (bound.claim.ms, bound.claim.action is None) == (stake_ms, loader == "1 workers")


def test_one_slow_step_is_no_burst_of_batches():
    (phases,) = said(run.longest_phases, SLOW_ONCE)
    assert phases.startswith("A step takes 2.50 ms (mean of 24; the median is 1.50 ms): forward 80%")
    assert "bursts" not in phases
    (bound,) = said(run.data_bound, SLOW_ONCE)
    assert bound.startswith("A step waits 0.500 ms on average for its batch, 20% of it. Try more workers")


@pytest.mark.parametrize(("last", "expected"), [(2.4, False), (2.6, True)])
def test_from_a_quarter_on_the_mean_is_much_above_the_median(last, expected):
    found = row(data=[0.5, 0.5, 0.5, last], forward=[1.5] * 4)
    assert (is_uneven(found), comes_in_bursts(found)) == (expected, expected)


def test_means_take_the_place_of_medians_together_with_their_intervals():
    told = as_told(BURSTS)
    assert (told.step_ms, told.times["step"].low, told.times["data"].median) == (17.0, None, 16.0)
    assert as_told(EVEN) is EVEN
    assert share_of(row(data=[0.0], forward=[0.0]), "data") == 0.0
    assert share_of(EVEN, "copies") == 0.0


@pytest.mark.parametrize(
    ("phases", "step_ms"),
    [
        ({"data": [30.0, 1.0, 1.0], "forward": [1.0, 30.0, 1.0], "optimizer": [1.0, 1.0, 30.0]}, 32.0),
        ({"forward": [10.0, 10.0, 1.0], "backward": [1.0, 10.0, 10.0], "other": [10.0, 1.0, 10.0]}, 21.0),
        ({"forward": [5.0, 5.0, 5.0], "other": [6.0, 0.0, 0.0]}, 7.0),
    ],
)
def test_phases_add_up_to_the_step_where_their_medians_do_not(phases, step_ms):
    found = row(**{name: ms * 8 for name, ms in phases.items()})
    (stack,) = breakdown([found]).stacks
    table = make_table(run.SCRIPT, [found], "terminal")
    cells = {title: cell.value for title, cell in zip(table.columns, table.rows[0].cells, strict=True)}
    assert stack.total == pytest.approx(as_told(found).step_ms) == pytest.approx(step_ms)
    assert sum(cells[run.PHASES[name]] for name in phases) == pytest.approx(cells["step, mean, as of phases"])
    assert "step, mean, as of phases" not in make_table(run.SCRIPT, [EVEN], "terminal").columns


def test_the_page_s_top_and_its_bars_are_of_means():
    (made,) = headlines([BURSTS], [])
    assert (made.figure.value, made.figure.name) == (17.0, "step_mean_ms")
    assert made.detail.startswith("mean of 24 steps; median of 24 steps: 1.50 ms")
    assert made.stats[0] == ("Data wait", "16.0 ms", "94% of the step")
    (stack,) = breakdown([BURSTS]).stacks
    assert stack.total == pytest.approx(17.0)
    assert breakdown([BURSTS]).caption.startswith("Means of")
    assert breakdown([EVEN]).caption.startswith("Medians of")
    section = run.script([BURSTS])
    assert section.lead.startswith("Means of 24 steps")
    findings = [finding for rule in run.RULES for finding in rule([BURSTS])]
    assert "94%" in str(cards([BURSTS], findings, [section]).cards), "of a step of 17 ms, not of 1.5 ms"


@pytest.mark.parametrize(("grows_ms", "expected"), [(92.0, True), (5.2, True), (3.5, False), (-20.0, False)])
def test_steps_that_slow_down_are_told_with_phase_and_line(grows_ms, expected):
    slow = row(forward=[12.0] * 60, other=[8.0 + grows_ms * at / 59 for at in range(60)])
    line = LineRow(workload="train.py", line="train.py:9", phase="other", function="f", seen=20, share=0.9)
    told = list(run.slows_down([slow, line]))
    assert [each.figures["phase"] for each in told] == ["other"] * expected
    for each in told:
        assert each.figures["per_100_ms"] == pytest.approx(100 * grows_ms / 59)
        assert each.figures["to_ms"] - each.figures["from_ms"] == pytest.approx(grows_ms * 54 / 59)
        assert "everything else that grows, which runs train.py:9 in f (90%)" in each.sentence
    assert ("→" in headlines([slow], [])[0].detail, "slow down" in headlines([slow], [])[0].confidence) == (
        expected,
    ) * 2


@pytest.mark.parametrize(("mib", "name", "expected"), [(4.0, "process_mib", True), (0.2, "process_mib", False),
                                                       (4.0, "allocated_mib", True)])  # fmt: skip
def test_memory_that_grows_is_told_with_its_rate_and_lines(mib, name, expected):
    memory = {"process_mib": [500.0] * 60} | {name: [300 + mib * at for at in range(60)]}
    steps = dataclasses.replace(EVEN, series=memory, keeps=("train.py:7",))
    told = list(run.memory_grows([steps]))
    assert [(each.figures["mib"], each.claim.gib) for each in told] == [(mib, mib * 54 / 1024)] * expected
    whose = "of the process" if name == "process_mib" else "on the GPU"
    assert all(f"Memory {whose} grows" in each.sentence and "train.py:7" in each.sentence for each in told)


@pytest.mark.parametrize(("peak_gib", "found"), [(2.5, [("script.peak", {"peak_gib": 2.5})]), (None, [])])
def test_the_most_memory_is_said_where_it_is_known(peak_gib, found):
    told = run.how_it_went([dataclasses.replace(EVEN, peak_gib=peak_gib)])
    assert [(each.id, each.figures) for each in told] == found


@pytest.mark.parametrize(
    ("phases", "phase", "line", "seen", "expected"),
    [
        ({"other": 3.0, "forward": 7.0}, "other", "train.py:9", 10, "script.lines"),
        ({"other": 2.0, "forward": 8.0}, "other", "train.py:9", 10, None),  # less than a quarter of the step
        ({"other": 3.0, "forward": 7.0}, "other", "train.py:9", 9, None),  # too few samples
        ({"loss": 5.0, "forward": 5.0}, "loss", "code at or before train.py:9", 10, "script.lines"),
        ({"loss": 4.0, "forward": 6.0}, "loss", "train.py:9", 10, None),  # as of a large vocabulary
        ({"data": 2.0, "forward": 8.0}, "workers", "data.py:5", 10, "data.lines"),
        ({"data": 2.0, "forward": 8.0}, "data", "train.py:7", 10, None),  # the line that waits for workers
        ({"data": 0.5, "forward": 9.5}, "workers", "data.py:5", 10, None),  # nothing waits for them
    ],
)
def test_lines_are_named_where_their_phase_is_much_of_the_step(phases, phase, line, seen, expected):
    step = dataclasses.replace(row(**{name: [ms] * 9 for name, ms in phases.items()}), loader="train.py:7, 2 workers")
    own = LineRow(workload="train.py", line=line, phase=phase, function="work", seen=seen, share=1.0)
    found = list(run.slow_lines([step, own]))
    assert [each.id for each in found] == [expected] * bool(expected)
    assert all(f"{line} in work (100%)" in each.sentence for each in found)


@pytest.mark.parametrize(("start", "is_said"), [("spawn", True), (None, False)])
def test_workers_that_were_not_looked_into_are_said(start, is_said):
    step = dataclasses.replace(EVEN, loader="train.py:7, 2 workers, memory pinned", worker_start=start)
    assert ("not looked into" in said(run.data_bound, step)[0]) == is_said


def charts_of(*rows):
    return {
        chart.name: chart for block in run.script(rows).blocks if isinstance(block, Charts) for chart in block.charts
    }


def test_every_step_is_drawn_by_its_phases_and_what_is_not_timed_by_its_reason():
    apart = {"apart": [1, 2, 28], "apart_ms": [900.0, 5.0, 70.0], "apart_why": ["left out", "left out", "evaluated"]}
    chart = charts_of(dataclasses.replace(BURSTS, series={"number": [*range(3, 27)], **apart}, ended="to its end"))[
        "steps"
    ]
    assert [role for role, _ in chart.legend] == ["kind-1", "kind-3", "rule", "muted"]
    told = [tip.split("\n") for tip in tips(chart.plot())]
    assert [told[0], told[5], told[-1]] == [
        ["step 1: 900 ms", "the first steps 900 ms"],
        ["step 6: 63.5 ms", "data wait 62.5 ms", "forward 1.00 ms"],
        ["step 28: 70.0 ms", "with an evaluation 70.0 ms"],
    ]
    assert ends(chart.plot()) == [1, 29, 0, pytest.approx(1.05 * 63.5)], "no step that is not timed flattens the others"
    many = charts_of(row(forward=[1.0] * (2 * MOST) + [9.0]))["steps"].plot()
    assert len(tips(many)) <= MOST
    assert tips(many)[-1] == f"step {2 * MOST + 1}: 9.00 ms\nforward 9.00 ms", "of neighbours the longest"


def test_ranks_have_a_map_whose_darkest_cell_is_the_latest():
    cells = drawn(charts_of(*RANKS)["ranks"].plot(), "rect", "accent")
    shades = {cell["data-tip"]: float(cell.get("fill-opacity", 1)) for cell in cells}
    assert max(shades, key=shades.get) == "rank 2, step 2\n13.0 ms"
    assert len(shades) == 6
    assert "ranks" not in charts_of(RANKS[0])
