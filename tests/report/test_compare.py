import random

import pytest

from trainstep.errors import UsageError
from trainstep.report.compare import compare, comparison_table, repeatability
from trainstep.report.records import Record


def step(median, *, precision="fp32", repeat=0, n=10, seed=0, spread=0.002, **changes):
    rng = random.Random(seed)
    samples = [median * (1 + rng.uniform(-spread, spread)) for _ in range(n)]
    case = {"workload": "small", "precision": precision, "mode": "step", "warmup": 5, "repeat": repeat, "steps": n}
    return Record("step", case, {"step_ms": median}, {"step": samples}, **changes)


def test_clear_differences_are_called():
    old = [step(100.0), step(50.0, precision="bf16")]
    new = [step(80.0, seed=1), step(60.0, precision="bf16", seed=1)]
    faster, slower = compare(old, new)
    assert (faster.verdict, slower.verdict) == ("faster", "slower")
    assert faster.speedup.value == pytest.approx(1.25, rel=0.01)
    assert 1.25 in faster.speedup.interval


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (step(100.0), step(101.0, seed=1)),  # inside the noise between runs
        (step(100.0, spread=0.5), step(90.0, seed=1, spread=0.5)),  # wide intervals
        (step(100.0, n=5), step(50.0, n=5, seed=1)),  # too few samples for an interval
    ],
)
def test_noise_gets_no_verdict(old, new):
    (only,) = compare([old], [new])
    assert only.verdict == "inconclusive"


def test_passes_widen_the_interval_by_what_differs_between_them():
    old = [step(100.0), step(110.0, repeat=1, seed=1)]
    new = [step(95.0, seed=2), step(104.0, repeat=1, seed=3)]
    (only,) = compare(old, new)
    assert only.verdict == "inconclusive"
    assert only.speedup.interval.low < 100 / 104
    assert only.speedup.interval.high > 110 / 95


def test_rows_that_failed_or_stand_alone_are_left_out():
    old = [step(100.0), step(10.0, precision="bf16", status="failed")]
    new = [step(100.0), step(10.0, precision="bf16"), step(5.0, precision="tf32")]
    assert len(compare(old, new)) == 1


def test_nothing_in_common():
    with pytest.raises(UsageError, match="no measured case in common"):
        compare([step(1.0)], [step(1.0, precision="bf16")])


def test_repeatability_holds_later_passes_against_the_first():
    first, second = step(100.0), step(100.1, repeat=1, seed=4)
    (only,) = repeatability([first, second])
    assert 1 in only.speedup.interval
    assert repeatability([first]) == []


def test_the_table_has_the_settings_that_differ():
    pairs = compare([step(100.0), step(50.0, precision="bf16")], [step(80.0), step(60.0, precision="bf16")])
    table = comparison_table(pairs, "a → b")
    assert table.columns[:2] == ("kind", "precision")
    assert [row[-1] for row in table.rows] == ["faster", "slower"]
