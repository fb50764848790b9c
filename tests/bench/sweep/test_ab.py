"""`bench ab`: arms in random order, stopping at a width, rows on disk, and coverage in spite of stopping."""

import random
from collections import Counter
from pathlib import Path

import pytest

from trainstep.base.errors import UsageError
from trainstep.base.stats import Interval, ratio_of_runs
from trainstep.bench.sweep.ab import FEWEST, LOOKING, Arm, arms_of, run_arms
from trainstep.commands.cli import main
from trainstep.report.compare import compare, repeatability
from trainstep.report.subjects.ratios import between_runs
from trainstep.rows import RatioRow, StepRow, row_of
from trainstep.rows.records import of_kind, read_records

REPOSITORY = Path(__file__).parents[3]
ARMS = [Arm("fp32", {"precision": "fp32"}), Arm("bf16", {"precision": "bf16"})]


def measured(rng, speeds, deviation):
    """What stands in for a process: its row has the arm's time, off by what this run got."""

    def run_alone(arm, number):
        ms = speeds[arm.name] * rng.lognormvariate(0, deviation)
        return row_of(
            "step", {"workload": "w", **arm.settings}, {}, samples={"step": [ms] * 3}, environment={"device": "x"}
        )

    return run_alone


def test_rounds_in_random_order_until_the_interval_is_narrow():
    rng = random.Random(0)
    found = list(run_arms("precision", ARMS, measured(rng, {"fp32": 3.0, "bf16": 2.0}, 0.01), width=0.02, max_runs=40))
    steps, (ratio,) = of_kind(found, StepRow), of_kind(found, RatioRow)
    rounds = [tuple(row.precision for row in steps[at : at + 2]) for at in range(0, len(steps), 2)]
    assert set(rounds) == {("fp32", "bf16"), ("bf16", "fp32")}
    assert [row.run for row in steps] == list(range(len(steps)))
    assert FEWEST <= ratio.runs == len(rounds) < 40
    assert (ratio.speedup_high - ratio.speedup_low) / ratio.speedup < 0.02
    assert ratio.speedup_low < 1.5 < ratio.speedup_high
    assert (ratio.flag, ratio.old, ratio.new, ratio.workload, ratio.precision) == (
        "precision", "fp32", "bf16", "w", None,
    )  # fmt: skip
    assert ratio.verdict == "faster"
    (said,) = between_runs(found)
    assert (said.id, said.figures["runs"]) == ("ratio.faster", ratio.runs)


def test_rounds_end_at_the_most_and_every_pair_has_a_row():
    arms = [*ARMS, Arm("tf32", {"precision": "tf32"})]
    speeds = {arm.name: 1.0 for arm in arms}
    found = list(run_arms("precision", arms, measured(random.Random(1), speeds, 0.3), width=0.001, max_runs=6))
    assert Counter(row.precision for row in of_kind(found, StepRow)) == {"fp32": 6, "bf16": 6, "tf32": 6}
    pairs = of_kind(found, RatioRow)
    assert [(row.old, row.new) for row in pairs] == [("fp32", "bf16"), ("fp32", "tf32"), ("bf16", "tf32")]
    assert {row.verdict for row in pairs} == {"inconclusive"}
    assert {finding.id for finding in between_runs(found)} == {"ratio.inconclusive"}


def test_a_run_that_fails_ends_the_rounds_and_has_no_ratio():
    def run_alone(arm, number):
        if number == 3:
            return row_of("step", {}, status="out of memory", reason="too large")
        return measured(random.Random(0), {"fp32": 1.0, "bf16": 1.0}, 0.01)(arm, number)

    found = list(run_arms("precision", ARMS, run_alone, width=0.02, max_runs=9))
    assert len(of_kind(found, StepRow)) == 4
    (ratio,) = of_kind(found, RatioRow)
    assert (ratio.status, ratio.reason, ratio.speedup) == ("out of memory", "too large", None)
    assert between_runs(found) == []


@pytest.mark.parametrize("deviation", [0.003, 0.007, 0.01])
def test_coverage_in_spite_of_stopping_when_narrow(deviation):
    """600 trials of 95 % have a standard error of 0.9 %: 92.5 % is 2.8 of them below. With CONFIDENCE in the place of
    LOOKING the share is 93 to 94 %, by 8,000 trials."""
    rng, hits, trials = random.Random(4), 0, 600
    for _ in range(trials):
        runs = [[], []]
        for done in range(1, 26):
            for arm in runs:
                arm.append([rng.lognormvariate(0, deviation)])
            ratio = ratio_of_runs(runs[0], runs[1], LOOKING) if done >= FEWEST else None
            if ratio and ratio.interval.high - ratio.interval.low < 0.02 * ratio.value:
                break
        hits += 1 in ratio.interval
    assert hits / trials >= 0.94


def test_one_flag_has_several_values():
    axes = {"size": ("tiny",), "precision": ("fp32", "bf16"), "steps": (10,)}
    flag, arms = arms_of(axes, aa=False)
    assert (flag, [arm.name for arm in arms]) == ("precision", ["fp32", "bf16"])
    assert arms[1].settings == {"size": "tiny", "precision": "bf16", "steps": 10}
    with pytest.raises(UsageError, match="several values for --precision; expected none with --aa"):
        arms_of(axes, aa=True)
    with pytest.raises(UsageError, match="several values for no flag; expected one flag"):
        arms_of({"size": ("tiny",)}, aa=False)
    with pytest.raises(UsageError, match="--batch, --seed"):
        arms_of({"batch": (1, 2), "seed": (1, 2)}, aa=False)
    with pytest.raises(UsageError, match="a value twice"):
        arms_of({"batch": (1, 1)}, aa=False)
    flag, (one, again) = arms_of({"size": (), "batch": (1,)}, aa=True)
    assert (flag, one.settings) == ("nothing", again.settings)


def test_two_files_of_runs_are_compared_between_runs():
    def rows(ms, seed):
        rng = random.Random(seed)
        arms = [Arm("A", {}), Arm("A again", {})]
        return of_kind(
            run_arms("nothing", arms, measured(rng, dict.fromkeys(("A", "A again"), ms), 0.05), width=1e-9, max_runs=4),
            StepRow,
        )

    old, new = rows(2.0, 1), rows(1.0, 2)
    (only,) = compare(old, new)
    assert only.speedup == ratio_of_runs([row.samples["step"] for row in old], [row.samples["step"] for row in new])
    assert only.speedup.between_runs
    assert only.verdict == "faster"
    (one,) = compare(old[:1], new[:1], spread=0.0)
    assert not one.speedup.between_runs
    assert one.speedup.interval is None or isinstance(one.speedup.interval, Interval)
    assert repeatability(old) == [], "runs of an arm are replicates, not passes"


@pytest.mark.thorough
def test_the_command_starts_a_process_per_run_and_keeps_rows(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(REPOSITORY)
    words = "bench ab --workload tests.bench.sweep.workloads:trains --device cpu --aa --max-runs 2 --steps 7 --warmup 1"
    with pytest.raises(SystemExit) as stop:
        main([*words.split(), "--out", str(tmp_path)])
    assert stop.value.code == 0
    rows = read_records(tmp_path / "results.jsonl")
    steps, (ratio,) = of_kind(rows, StepRow), of_kind(rows, RatioRow)
    assert [(row.run, row.status, row.n) for row in steps] == [(run, "ok", 7) for run in range(4)]
    assert (ratio.flag, ratio.runs) == ("nothing", 2)
    assert ratio.speedup_low < ratio.speedup < ratio.speedup_high
    assert "between runs" in capsys.readouterr().out
    with pytest.raises(SystemExit) as stop:
        main(["bench", "ab", "--max-runs", "1"])
    assert stop.value.code == 2
