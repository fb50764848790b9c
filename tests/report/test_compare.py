import itertools
import math
import random
import re
from dataclasses import replace

import pytest

from tests.report.page import HOSTILE, Page
from tests.report.subjects.test_run import row as scripted
from trainstep.base.errors import UsageError
from trainstep.commands.compare import Compare
from trainstep.commands.output import CASE_FAILED
from trainstep.report.compare import compare, comparison_table, other_conditions, repeatability, unmatched
from trainstep.rows import ScriptRow, row_of
from trainstep.rows.records import write_whole

LOSSES = [4.0, 3.0, 2.0]


def step(median, *, precision="fp32", repeat=0, n=10, seed=0, spread=0.002, run=None, **changes):
    rng = random.Random(seed)
    samples = [median * (1 + rng.uniform(-spread, spread)) for _ in range(n)]
    case = {"workload": "small", "precision": precision, "mode": "step", "warmup": 5, "repeat": repeat, "steps": n}
    case |= {} if run is None else {"run": run}
    return row_of("step", case, {"step_ms": median}, samples={"step": samples, "training_loss": LOSSES}, **changes)


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


def test_every_pass_counts_alike():
    """The medians are of all samples of a side, and no pass may have other losses than the first."""

    def pass_of(samples, losses, repeat):
        return replace(step(1.0, repeat=repeat), samples={"step": samples, "training_loss": losses})

    old = [pass_of([1.0, 2.0], [4.0, 4.0], 0), pass_of([3.0, 10.0], [8.0, 8.0], 1)]
    new = [pass_of([5.0, 5.0], [5.0, 4.0], 0), pass_of([5.0, 5.0], [16.0, 4.0], 1)]
    (only,) = compare(old, new)
    assert (only.old_ms, only.new_ms, only.speedup.value) == (2.5, 5.0, 0.5)
    assert only.losses.difference == 3.0, "the second pass after, held against the first before"
    assert only.speedup.interval is None


@pytest.mark.parametrize(
    ("old", "new", "has_interval"),
    [((7, 7), (7, 7), True), ((7, 6), (7, 7), False), ((6, 7), (7, 7), False), ((7, 7), (7, 6), False)],
)
def test_one_pass_of_too_few_samples_leaves_all_of_them_without_an_interval(old, new, has_interval):
    def passes(ms, counts):
        return [step(ms, n=count, repeat=at, spread=0.0) for at, count in enumerate(counts)]

    (only,) = compare(passes(100.0, old), passes(50.0, new))
    assert only.speedup.value == 2.0
    assert (only.speedup.interval is not None) is has_interval
    assert only.verdict == ("faster" if has_interval else "inconclusive")


def test_repeatability_is_of_every_later_pass_with_the_first_alone():
    passes = [step(ms, repeat=at, seed=at) for at, ms in enumerate((100.0, 150.0, 50.0))]
    later, last = repeatability(passes)
    assert (later.verdict, last.verdict) == ("slower", "faster")
    assert later.old_ms == last.old_ms == pytest.approx(100, rel=0.01)
    assert (later.new_ms, last.new_ms) == pytest.approx((150, 50), rel=0.01)
    assert repeatability(passes[:1]) == []


def runs(median, numbers):
    """Rows as `bench ab` writes them: each of a process of its own."""
    return [step(median * (1 + number / 1000), run=number, seed=number) for number in numbers]


@pytest.mark.parametrize(
    ("old", "new", "between"),
    [
        (runs(100.0, (0, 1)), runs(50.0, (0, 1)), True),
        (runs(100.0, (0, 1, 2)), runs(50.0, (0, 1, 2, 3)), True),
        (runs(100.0, (0,)), runs(50.0, (0,)), False),
        (runs(100.0, (0, 1, 2)), runs(50.0, (0,)), False),
        (runs(100.0, (0, 1, 2)), [step(50.0)], False),
        (runs(100.0, (0, 1, 2)), runs(50.0, (0, 0, 1)), False),
        ([step(100.0), step(100.0, repeat=1)], [step(50.0), step(50.0, repeat=1)], False),
    ],
    ids=["two", "several", "one", "one of them", "none of them", "one run twice", "passes of one process"],
)
def test_several_processes_a_side_are_compared_between_runs(old, new, between):
    (only,) = compare(old, new)
    assert only.speedup.between_runs is between
    assert only.verdict == "faster"
    (row,) = comparison_table([only], "").texts()
    assert row[-1] == ("faster" if between else "faster within this run")
    assert row[-4].endswith("] between runs" if between else "] within this run")


def test_runs_of_their_own_are_no_passes_over_one_case():
    assert repeatability(runs(100.0, (0, 1, 2))) == []


def test_what_is_not_called_is_not_qualified():
    (alike,) = compare([step(100.0)], [step(100.5)])
    (few,) = compare([step(100.0, n=5)], [step(50.0, n=5)])
    table = comparison_table([alike, few], "").texts()
    assert [row[-1] for row in table] == ["inconclusive", "inconclusive"]
    assert table[1][-4] == "needs 7 samples a side"


def test_a_loss_that_was_infinite_on_both_sides_is_no_agreement():
    for old, new in itertools.product([training([math.inf]), training([-math.inf])], repeat=2):
        (only,) = compare([old], [new])
        assert only.losses.difference == math.inf
        assert only.verdict == "losses differ"


def test_rows_that_failed_or_stand_alone_are_left_out():
    old = [step(100.0), step(10.0, precision="bf16", status="failed")]
    new = [step(100.0), step(10.0, precision="bf16"), step(5.0, precision="tf32")]
    assert len(compare(old, new)) == 1


def test_a_case_that_went_wrong_is_named_where_nothing_is_left_to_compare():
    wrong = replace(step(1.0), status="wrong", reason="gradients off by 5", samples={})
    said = "workload small.*measured in the first file, wrong \\(gradients off by 5\\) in the second"
    with pytest.raises(UsageError, match=f"no timed step in the second file.*{said}"):
        compare([step(1.0)], [wrong])
    with pytest.raises(UsageError, match=f"no measured case in common.*{said}"):
        compare([step(1.0)], [wrong, step(1.0, precision="tf32"), step(1.0, precision="bf16")])


def test_nothing_in_common():
    with pytest.raises(UsageError, match="no measured case in common"):
        compare([step(1.0)], [step(1.0, precision="bf16")])
    grid = [step(1.0, precision="bf16"), step(1.0, precision="tf32")]
    with pytest.raises(UsageError, match=r"the first has 1 cases, the second 2\)$"):
        compare([replace(step(1.0), workload="large")], grid)


@pytest.mark.parametrize(
    ("old", "new", "which"),
    [([], [step(1.0)], "the first file"), ([step(1.0)], [], "the second file"), ([], [], "either file")],
)
def test_files_without_timed_steps(old, new, which):
    profile = row_of("profile", {"workload": "toy"}, {"kernels": 3.0})
    with pytest.raises(UsageError, match=f"no timed step in {which}.*of the kinds step, change, sweep"):
        compare([profile, *old], [profile, *new])


def test_the_table_has_the_settings_that_differ():
    pairs = compare([step(100.0), step(50.0, precision="bf16")], [step(80.0), step(60.0, precision="bf16")])
    table = comparison_table(pairs, "a → b")
    assert table.columns[:2] == ("kind", "precision")
    (alike,) = compare([step(123.456, spread=0)], [step(61.7284, spread=0)])
    assert " | ".join(comparison_table([alike], "").texts()[0]) == (
        "step | small | 123.5 | 61.73 | 2.000× | [1.961, 2.040] within this run | 0 | 1.5e-05 | faster within this run"
    )
    other = replace(alike, key=(("kind", "change"), ("step", "x")))
    assert comparison_table([other], "").columns[:2] == ("kind", "old (ms)")
    assert [row[-1] for row in table.texts()] == ["faster within this run", "slower within this run"]
    assert all(row[-4].endswith("] within this run") for row in table.texts())


def test_files_that_differ_in_one_column_are_told_which_and_may():
    grid = [step(100.0), step(50.0, precision="bf16", seed=1)]
    other = [replace(row, workload="other") for row in grid]
    for column, old, new, words in (
        ("workload", grid, other, ["inconclusive"] * 2),
        ("precision", grid[:1], grid[1:], ["faster"]),
    ):
        with pytest.raises(UsageError, match=f"they differ in {column}: --across {column} compares them"):
            compare(old, new)
        found = compare(old, new, across=[column])
        assert [each.verdict for each in found] == words
        assert column not in found[0].case
        assert comparison_table(found, "").rows


def test_across_must_not_join_cases_of_one_file():
    both = [step(100.0), step(50.0, precision="bf16", seed=1)]
    with pytest.raises(UsageError, match="several cases of one file for the same"):
        compare(both, [step(50.0, seed=2)], across=["precision"])
    with pytest.raises(UsageError, match="cannot compare across 'colour'"):
        compare(both, both, across=["colour"])


def training(losses, median=90.0, **changes):
    row = step(median, **changes)
    return replace(row, samples={**row.samples, "training_loss": losses})


def shown(compared):
    table = comparison_table([compared], "")
    return dict(zip(table.columns, table.texts()[0], strict=True))


def test_steps_of_a_script_are_compared_where_each_takes_as_many_samples():
    before, after, larger = (
        row_of("script", {"workload": "train.py"}, {"samples_per_step": count}, samples=step(ms).samples)
        for ms, count in ((100.0, 8), (80.0, 8), (150.0, 16))
    )
    assert [compare([before], [row])[0].verdict for row in (after, larger)] == ["faster", "work differs"]
    assert shown(compare([before], [larger])[0])["tokens or samples per step"] == "8 → 16"


def test_steps_of_a_script_that_wait_in_bursts_are_compared_with_their_waits():
    """A median step of a loader with two workers waits for nothing, and made it 16× as fast."""
    old, new = (row_of("script", {"workload": "a"}, {}, samples={"step": ms * 24}) for ms in ([34, 35], [2, 32]))
    (compared,) = compare([old], [new])
    assert (compared.verdict, compared.new_ms, round(compared.speedup.value, 2)) == ("faster", 17, 2.03)


def test_losses_that_differ_leave_no_verdict_on_times():
    (only,) = compare([training([4.0, 2.0, 1.0], 100.0)], [training([4.0, 2.1])])
    assert only.losses.difference == pytest.approx(0.05)
    cells = shown(only)
    assert (cells["losses differ by"], cells["allowed"], cells["verdict"]) == ("0.050", "1.5e-05", "losses differ")
    for broken in (None, math.nan, math.inf):  # None: as it is read
        (only,) = compare([training([4.0, 2.0, 1.0], 100.0)], [training([4.0, broken, 1.0])])
        assert shown(only)["losses differ by"] == "inf"
        assert only.verdict == "losses differ"


def test_losses_that_tell_nothing_are_said_beside_the_verdict():
    seeds = replace(training([4.0, 2.1]), seed=7)
    unchecked = replace(training([4.0, 2.0]), not_checked="not asked for")
    without = replace(step(90.0), samples={"step": step(90.0).samples["step"]})
    for row, apart, reason in (
        (seeds, "–", "seeds – and 7"),
        (unchecked, "0", "new row: not asked for"),
        (without, "–", "no losses in the new row"),
    ):
        (only,) = compare([training([4.0, 2.0], 200.0)], [row])
        cells = shown(only)
        assert (cells["losses differ by"], cells["allowed"]) == (apart, f"not checked: {reason}")
        assert cells["verdict"] == "faster within this run, not checked"


def test_steps_of_other_numbers_of_tokens_get_no_verdict_on_times():
    whole, half = (replace(step(ms), tokens_per_s=96_000.0 / ms * 100) for ms in (200.0, 100.0))
    rows = [replace(whole, tokens_per_s=tokens / 0.2) for tokens in (96_000, 48_000, 96_001)]
    (other,) = compare([rows[0]], [replace(half, tokens_per_s=48_000 / 0.1)])
    assert other.verdict == "work differs"
    assert shown(other)["tokens or samples per step"] == "96,000 → 48,000"
    (alike,) = compare([rows[0]], [replace(half, tokens_per_s=96_001 / 0.1)])
    assert alike.verdict == "faster", "six digits are written"
    assert "tokens or samples per step" not in shown(alike)
    (apart,) = compare([rows[0]], [replace(half, tokens_per_s=96_002.4 / 0.1)])
    assert apart.verdict == "work differs"
    table = comparison_table([other, alike], "")
    column = table.columns.index("tokens or samples per step")
    assert [texts[column] for texts in table.texts()] == ["96,000 → 48,000", ""]
    later = [rows[0], replace(rows[1], repeat=1)]
    assert [compare(*pair)[0].verdict for pair in ((later, rows[:1]), (rows[:1], later))] == ["work differs"] * 2


def test_no_pass_may_have_other_losses_than_the_first():
    passes = [training(losses, repeat=at) for at, losses in enumerate(([4.0, 2.0], [4.0, 2.1], [4.0, 2.0]))]
    assert [compare(*pair)[0].verdict for pair in ((passes, passes[:1]), (passes[:1], passes))] == ["losses differ"] * 2


def preparing(median, batch_ms, n=10, **changes):
    row = step(median, n=n, **changes)
    return replace(row, samples={**row.samples, "batch": [batch_ms * (1 + at / 1000) for at in range(n)]})


@pytest.mark.parametrize(
    ("old", "new", "verdict"),
    [
        ((100.0, 1.0), (50.0, 1.0), "faster"),
        ((100.0, 1.0), (50.0, 51.0), "moved to batch"),
        ((100.0, 1.0), (50.0, 60.0), "moved to batch"),
        ((100.0, 20.0), (50.0, 65.0), "faster"),  # 5 % are left, and 2 % may be of the run
        ((100.0, 1.0), (50.0, 50.0), "moved to batch"),  # 1 % is left
        ((100.0, 500.0), (50.0, 505.0), "faster"),  # within what runs differ by
        ((50.0, 1.0), (100.0, 51.0), "slower"),
        ((100.0, 51.0), (100.0, 1.0), "inconclusive"),
    ],
)
def test_what_the_batch_takes_longer_is_not_gained(old, new, verdict):
    (only,) = compare([preparing(*old)], [preparing(*new, seed=1)])
    assert only.verdict == verdict
    assert only.batch == pytest.approx((old[1], new[1]), rel=0.01)


def test_a_step_that_only_breaks_even_with_its_batch_is_not_faster():
    old, new = step(100.0, spread=0.0), step(50.0, spread=0.0)
    old, new = (replace(each, samples={**each.samples, "batch": [ms] * 10}) for each, ms in ((old, 1.0), (new, 51.0)))
    (only,) = compare([old], [new], spread=0.0)
    assert only.verdict == "moved to batch"


def test_batches_are_shown_where_both_rows_have_their_times():
    (both,) = compare([preparing(100.0, 1.0)], [preparing(50.0, 60.0)])
    cells = shown(both)
    assert (cells["batch (ms)"], cells["verdict"]) == ("1.00 → 60.3", "moved to batch")
    (one,) = compare([step(100.0)], [preparing(50.0, 60.0)])
    assert "batch (ms)" in comparison_table([both, one], "").columns
    assert (one.batch, one.verdict) == (None, "faster")
    assert "batch (ms)" not in shown(one)
    several = [preparing(50.0, 60.0, run=number) for number in (0, 1)]
    (runs,) = compare([preparing(100.0, 1.0, run=number) for number in (0, 1)], several)
    assert (runs.speedup.between_runs, runs.verdict) == (True, "moved to batch")
    with pytest.raises(UsageError, match="samples that are no times: 0"):
        compare([step(1.0)], [preparing(1.0, 0.0)])


@pytest.mark.parametrize("bad", [None, math.nan, math.inf, 0.0, -1.0])
def test_samples_that_are_no_times_get_no_verdict(bad):
    row = step(100.0)
    with pytest.raises(UsageError, match=r"small.* samples.* expected milliseconds above 0"):
        compare([step(100.0)], [replace(row, samples={"step": [*row.samples["step"], bad]})])


# ---- cases that are left out of a comparison, and conditions that differ between the files


def bare(precision="fp32", workload="small", status="ok", reason="", **environment):
    samples = {"step": [1.0] * 7} if status == "ok" else {}
    case = {"workload": workload, "precision": precision}
    return row_of("step", case, {}, samples=samples, status=status, reason=reason, environment=environment)


WRONG = bare("bf16", status="wrong", reason="off by 5")


def said(old, new, **options):
    return [(str(each), each.is_lost) for each in unmatched(old, new, **options)]


def test_cases_that_both_files_have_times_of_are_not_mentioned():
    assert said([bare(), row_of("profile", {"workload": "small"}, {})], [bare()]) == []


@pytest.mark.parametrize(
    ("old", "new", "state", "is_lost"),
    [
        ([bare("bf16")], [WRONG], "measured in the first file, wrong (off by 5) in the second", True),
        ([bare("bf16")], [], "measured in the first file, no row in the second", False),
        ([], [bare("bf16")], "no row in the first file, measured in the second", False),
        ([WRONG], [bare("bf16")], "wrong (off by 5) in the first file, measured in the second", False),
        ([WRONG], [WRONG], "wrong (off by 5) in the first file, wrong (off by 5) in the second", False),
        ([], [bare("bf16", status="failed")], "no row in the first file, failed in the second", False),
        ([bare("bf16")], [replace(WRONG, status="out of memory")],
         "measured in the first file, out of memory (off by 5) in the second", True),
        ([bare("bf16")], [replace(bare("bf16"), samples={})],
         "measured in the first file, no times in the second", True),
        ([bare("bf16")], [bare("bf16"), WRONG], "measured in the first file, wrong (off by 5) in the second", True),
        ([bare("bf16")], [WRONG, bare("bf16")], "measured in the first file, wrong (off by 5) in the second", True),
    ],
)  # fmt: skip
def test_what_is_left_out_is_named_with_its_reason(old, new, state, is_lost):
    expected = [(f"kind step, workload small, precision bf16: {state}", is_lost)]
    assert said([bare(), *old], [bare(), *new]) == expected


def test_columns_that_may_differ_are_no_part_of_a_case():
    other = replace(WRONG, workload="other")
    lost = "kind step, precision bf16: measured in the first file, wrong (off by 5) in the second", True
    assert said([bare("bf16")], [other], across=["workload"]) == [lost]
    assert len(said([bare("bf16")], [other])) == 2


def test_conditions_that_differ_between_files_are_told():
    old = bare(device="A", torch="2.11", threads=1, cores=2)
    assert other_conditions([old], [old]) == []
    every = other_conditions([old], [bare(device="B", torch="2.13", threads=4, cores=9)])
    assert every == ["device A → B", "torch 2.11 → 2.13", "threads 1 → 4"]
    assert other_conditions([old], [bare(torch="2.11", threads=1)]) == ["device A → –"]
    failed = bare(status="failed", device="B")
    assert other_conditions([old], [old, failed]) == [], "nothing was measured there"
    more = replace(old, environment={**old.environment, "threads": 2})
    assert other_conditions([old, more], [old]) == ["threads 1 and 2 → 1"]


def ranks(count):
    """Rows of a script under so many ranks."""
    row = ScriptRow(workload="t.py", world_size=count, samples={"step": [10.0] * 9})
    return [replace(row, rank=at if count > 1 else None) for at in range(count)]


def test_other_numbers_of_ranks_are_told():
    assert other_conditions(ranks(2), ranks(4)) == ["ranks 2 → 4"]
    assert other_conditions(ranks(2), ranks(2)) == []
    with pytest.raises(UsageError, match=r"\(the first has 1 cases, the second 2\); ranks 1 → 2: "):
        compare(ranks(1), ranks(2))


def test_the_command_names_them_and_ends_with_an_error_where_a_case_was_lost(tmp_path, capsys):
    def printed(code, *rows):
        write_whole(tmp_path / "new.jsonl", rows)
        assert Compare(old=tmp_path / "old.jsonl", new=tmp_path / "new.jsonl", out=tmp_path).run() == code
        return " ".join(capsys.readouterr().out.split())

    write_whole(tmp_path / "old.jsonl", [bare(device="A"), bare("bf16")])
    lost = printed(CASE_FAILED, bare(device="B"), WRONG)
    assert "Not measured under the same conditions: device A" in lost
    assert "precision bf16: measured in the first file, wrong (off by 5) in the second" in lost
    more = printed(0, bare(), bare("bf16"), bare("tf32"))
    assert "precision tf32: no row in the first file, measured in the second" in more


# ---- the gate of --fail-if-slower


def timed(samples, run=None, losses=LOSSES):
    case = {"workload": "small", "precision": "fp32", "mode": "step"} | ({} if run is None else {"run": run})
    return row_of("step", case, {}, samples={"step": samples, "training_loss": losses})


def failed_share(loss, runs, trials=200, between=0.01, within=0.03):
    """Share of simulated comparisons that a gate of 5% fails, where steps take so much longer.

    A run has a level of its own, and its steps scatter around that.
    """
    draw, failed = random.Random(7), 0

    def side(slower):
        levels = [slower * draw.lognormvariate(0, between) for _ in range(runs)]
        return [
            timed([level * draw.lognormvariate(0, within) for _ in range(30)], run=at)
            for at, level in enumerate(levels)
        ]

    for _ in range(trials):
        (compared,) = compare(side(1.0), side(1.0 + loss))
        failed += compared.is_slower_by(0.05) is True
    return failed / trials


def test_a_gate_between_runs_is_seldom_wrong_and_sees_ten_percent():
    """A loss of exactly what is allowed fails one in 40 times at most; a binomial of 200 then has 11 or fewer."""
    assert failed_share(0.0, runs=5) == 0
    assert failed_share(0.05, runs=5) <= 11 / 200
    assert failed_share(0.10, runs=5) >= 0.9


def test_a_gate_of_one_run_a_side_holds_for_steps_alone():
    assert failed_share(0.0, runs=1) == 0
    assert failed_share(0.05, runs=1, between=0.0) <= 11 / 200
    assert failed_share(0.20, runs=1, between=0.0) >= 0.9, "its interval is wider, by what runs may differ by"


def test_only_the_same_work_is_slower():
    before = timed([10.0] * 9)
    assert compare([before], [timed([12.0] * 9)])[0].is_slower_by(0.05)
    assert not compare([before], [timed([12.0] * 9, losses=[9.0, 9.0, 9.0])])[0].is_slower_by(0.05)


@pytest.mark.parametrize(
    ("share", "gate"), [(None, ""), ("5%", "Failed"), ("0.05", "Failed"), ("20%", "Not failed"), ("30%", "")]
)
def test_a_slower_run_fails_the_gate_and_is_said_first(share, gate, tmp_path, capsys):
    """Folders of several launches are compared between runs."""
    for side, ms in (("old", 10.0), ("new", 12.0)):
        for at in range(3):
            write_whole(tmp_path / side / str(at) / "results.jsonl", [timed([ms + 0.01 * at] * 9)])
    code = Compare(old=tmp_path / "old", new=tmp_path / "new", fail_if_slower=share, out=tmp_path).run()
    assert code == CASE_FAILED * (gate == "Failed")
    said = capsys.readouterr().out.splitlines()
    verdict = next(at for at, line in enumerate(said) if "SLOWER" in line)
    assert "between runs   1 of 1 cases" in said[verdict]
    assert said[verdict - 1] == ""
    assert len(said) <= 25
    assert [line.split(":")[0] for line in said if "•" in line] == [f"• {gate}"] * bool(gate)


def test_a_failed_run_of_several_is_named_with_its_folder(tmp_path, capsys):
    for side, at in itertools.product(("old", "new"), range(3)):
        row = replace(timed([10.0 + at / 100] * 9), status="failed" if (side, at) == ("new", 1) else "ok", reason="why")
        write_whole(tmp_path / side / str(at) / "results.jsonl", [row])
    assert Compare(old=tmp_path / "old", new=tmp_path / "new", fail_if_slower="5%", out=tmp_path).run() == CASE_FAILED
    _, line = " ".join(capsys.readouterr().out.split()).split("• ")
    assert (line[:7], f"failed (in {tmp_path / 'new/1'}: why) in the second" in line) == ("Failed:", True)


@pytest.mark.parametrize("share", ["-5%", "five", "5 %", "%", "nan", "5"])
def test_a_gate_needs_a_share(share, tmp_path):
    write_whole(tmp_path / "results.jsonl", [step(100.0)])
    with pytest.raises(UsageError, match=r"expected a share of 0 or more, as 5% or 0\.05"):
        Compare(old=tmp_path, new=tmp_path, fail_if_slower=share).run()


@pytest.mark.parametrize(("topic", "bars"), [("Gone", ["9.00", "6.01"]), ("New", ["6.01", "9.00"])])
def test_the_page_has_a_step_before_and_after_and_the_findings_that_differ(topic, bars, tmp_path):
    pair = scripted(data=[5.0] * 9, forward=[4.0] * 9), scripted(data=[0.01] * 9, forward=[6.0] * 9)
    for name, row in zip(("old", "new"), pair if topic == "Gone" else pair[::-1], strict=True):
        write_whole(tmp_path / name, [replace(row, workload=HOSTILE)])
    Compare(old=tmp_path / "old", new=tmp_path / "new", out=tmp_path).run()
    html = (tmp_path / "report.html").read_text()
    assert Page(html).anchors == ["#summary", "#cases"]
    assert re.findall(r'class="stack-name">\w+ <b>([\d.]+) ms', html) == bars
    assert re.findall("<dt>(.*?)</dt><dd>A step waits 5.00 ms", html) == [topic]
    assert HOSTILE not in html
