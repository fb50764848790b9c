import dataclasses
import itertools
import math
import random
import statistics
from pathlib import Path

import pytest

from trainstep.base import stats
from trainstep.base.stats import (
    Interval,
    Ratio,
    in_rounds,
    median_interval,
    product,
    ratio_of_medians,
    ratio_of_pairs,
    ratio_of_rounds,
    ratio_of_runs,
    rising,
    run_deviation,
    smallest_found,
    student_quantile,
    summarize,
    verdict,
)
from trainstep.rows import StepRow
from trainstep.rows.records import by_case, of_kind, read_records


def test_below_six_samples_there_is_no_interval():
    assert median_interval([1, 2, 3, 4, 5]) is None
    assert median_interval([1, 2, 3, 4, 5, 6]) == Interval(1, 6)


NOISE = [random.Random(at).gauss(0, 1) for at in range(300)]


@pytest.mark.parametrize(
    ("samples", "slope"),
    [
        ([10 + at + each for at, each in enumerate(NOISE)], 1.0),
        ([10 + 0.3 * at + each for at, each in enumerate(NOISE[:40])], 0.3),
        ([10 + at for at in range(23)], None),  # too few
        (NOISE, None),
        ([-at for at in range(60)], None),
        ([10 + 5 * (at > 150) + each for at, each in enumerate(NOISE)], None),  # another process starts
        ([10 + 5 * (at > 80) + 5 * (at > 140) + each for at, each in enumerate(NOISE)], None),
        ([min(at, 40) + each / 10 for at, each in enumerate(NOISE[:120])], None),  # a cache that fills
    ],
)
def test_a_trend_goes_on_from_first_to_last(samples, slope):
    found = rising(samples)
    assert (found and found.slope) == (slope and pytest.approx(slope, rel=0.3))


@pytest.mark.parametrize(("n", "k"), [(6, 1), (8, 1), (9, 2), (10, 2), (20, 6), (50, 18), (100, 40)])
def test_ranks_agree_with_published_tables(n, k):
    """Order-statistics ranks of the 95 % interval of a median, as in Conover, Practical Nonparametric Statistics."""
    samples = list(range(1, n + 1))
    assert median_interval(samples) == Interval(k, n + 1 - k)


def test_other_confidences_take_other_ranks():
    """Two samples enclose the median half the time; the middle two of four 6 times of 16."""
    assert median_interval([1, 2], 0.5) == Interval(1, 2)
    assert median_interval([1, 2], 0.51) is None
    assert median_interval([1, 2, 3, 4], 0.375) == Interval(2, 3)
    assert median_interval([1, 2, 3, 4], 0.38) == Interval(1, 4)


def test_an_interval_has_its_ends():
    assert 1.0 in Interval(1.0, 2.0)
    assert 2.0 in Interval(1.0, 2.0)
    assert 0.99 not in Interval(1.0, 2.0)
    assert 2.01 not in Interval(1.0, 2.0)
    assert verdict(Ratio(1.1, Interval(1.0, 1.2))) == verdict(Ratio(0.9, Interval(0.8, 1.0))) == "inconclusive"


@pytest.mark.parametrize("n", [6, 10, 25])
def test_coverage_on_skewed_samples(n):
    rng = random.Random(0)
    true_median = 0.6931471805599453  # of the exponential distribution
    trials = 4000
    hits = sum(true_median in median_interval([rng.expovariate(1) for _ in range(n)]) for _ in range(trials))
    assert hits / trials >= 0.95 - 0.01  # three standard errors of 4000 trials


def test_summary_of_known_samples():
    summary = summarize([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 100.0])
    assert (summary.n, summary.median, summary.min, summary.max) == (7, 4.0, 1.0, 100.0)
    assert summary.mean == pytest.approx(121 / 7)
    assert summary.std == pytest.approx(statistics.stdev([1, 2, 3, 4, 5, 6, 100]))
    assert summary.outliers == 1
    assert summary.interval == Interval(1.0, 100.0)


def test_outliers_are_counted_not_dropped():
    steady = [10.0] * 20
    assert summarize(steady).outliers == 0
    assert summarize([*steady, 50.0]).max == 50.0
    assert summarize([*steady, 50.0]).outliers == 1


def test_few_samples_have_no_quartiles_and_one_no_deviation():
    assert summarize([10.0, 10.0, 1000.0]).outliers == 0
    assert summarize([10.0, 10.0, 10.0, 50.0]).outliers == 1
    assert math.isnan(summarize([3.0]).std)
    assert summarize([3.0, 5.0]).std == pytest.approx(math.sqrt(2))


def test_ratio_needs_seven_samples_a_side():
    assert ratio_of_medians([2.0] * 7, [1.0] * 7, spread=0) == Ratio(2.0, Interval(2.0, 2.0))
    assert ratio_of_medians([2.0] * 6, [1.0] * 7).interval is None


def test_ratio_is_widened_by_the_spread_between_runs():
    assert ratio_of_medians([2.0] * 7, [1.0] * 7, spread=0.25) == Ratio(2.0, Interval(1.6, 2.5))


def test_within_a_run_two_percent_are_not_remarked_on():
    assert verdict(ratio_of_medians([1.015] * 7, [1.0] * 7)) == "inconclusive"
    assert verdict(ratio_of_medians([1.025] * 7, [1.0] * 7)) == "faster"
    assert verdict(ratio_of_medians([1.0] * 7, [1.025] * 7)) == "slower"


def test_ratio_coverage_of_equal_and_of_unequal_cases():
    rng = random.Random(1)
    trials = 2000
    for factor in (1.0, 1.3):
        hits = 0
        for _ in range(trials):
            a = [factor * rng.lognormvariate(0, 0.1) for _ in range(10)]
            b = [rng.lognormvariate(0, 0.3) for _ in range(10)]
            hits += factor in ratio_of_medians(a, b, spread=0).interval
        assert hits / trials >= 0.95


def test_verdict_is_only_given_when_the_interval_leaves_1_out():
    assert verdict(Ratio(1.5, Interval(1.3, 1.7))) == "faster"
    assert verdict(Ratio(0.6, Interval(0.5, 0.7))) == "slower"
    assert verdict(Ratio(1.2, Interval(0.99, 1.4))) == "inconclusive"
    assert verdict(Ratio(1.5, None)) == "inconclusive"


def test_two_runs_of_the_same_case_are_seldom_told_apart():
    rng = random.Random(2)
    wrong = sum(
        verdict(ratio_of_medians([rng.gauss(10, 1) for _ in range(10)], [rng.gauss(10, 1) for _ in range(10)]))
        != "inconclusive"
        for _ in range(1000)
    )
    assert wrong <= 50


def test_columns_of_a_row():
    assert summarize([3.0, 1.0, 2.0]).columns("step") == {"step_ms": 2.0, "step_low_ms": None, "step_high_ms": None}
    assert summarize([float(each) for each in range(1, 8)]).columns("a") == {
        "a_ms": 4.0,
        "a_low_ms": 1.0,
        "a_high_ms": 7.0,
    }


def test_a_median_of_an_even_number_lies_between_the_middle_two():
    assert summarize([1.0, 2.0, 3.0, 10.0]).median == 2.5
    assert ratio_of_medians([1.0, 2.0, 3.0, 10.0], [1.0]).value == 2.5
    assert ratio_of_medians([10.0], [1.0, 2.0, 3.0, 10.0]).value == 4.0
    assert ratio_of_runs([[1.0, 2.0, 3.0, 10.0]], [[0.5, 1.5]]).value == pytest.approx(2.5)


@pytest.mark.parametrize(("far", "outliers"), [(1.4, 0), (1.6, 1), (2.9, 1), (-1.4, 0), (-1.6, 1)])
def test_outliers_lie_beyond_one_and_a_half_quartile_ranges(far, outliers):
    """Thirteen samples whose quartiles are the 4th and the 10th, 6 apart, whatever the extreme one is."""
    first, third = (4.0, 10.0) if far > 0 else (3.0, 9.0)
    inner = [float(each) for each in range(1, 13)]
    sample = third + far * 6 if far > 0 else first + far * 6
    found = summarize([*inner, sample])
    assert statistics.quantiles([*inner, sample], n=4, method="inclusive")[::2] == [first, third]
    assert found.outliers == outliers


def test_student_quantiles_agree_with_published_tables():
    """Two-sided 95 % and 80 %, as in Abramowitz & Stegun, table 26.10."""
    table = {1: (12.706, 3.078), 2: (4.303, 1.886), 3: (3.182, 1.638), 4: (2.776, 1.533), 9: (2.262, 1.383)}
    for degrees, (wide, narrow) in table.items():
        assert student_quantile(degrees, 0.95) == pytest.approx(wide, abs=5e-4)
        assert student_quantile(degrees, 0.80) == pytest.approx(narrow, abs=5e-4)
    assert student_quantile(1e9, 0.95) == student_quantile(1e9 + 0.5, 0.95) == pytest.approx(1.96, abs=0.013)
    assert 3.495 < student_quantile(2.5, 0.95) < 3.495 * 1.05, "3.495 by quadrature; above it, by the chord"


def simulated_run(rng, deviation, n=10):
    """Step times as runs have them: a factor of the run's own, and skewed samples."""
    factor = rng.lognormvariate(0, deviation)
    return [factor * (1 + 0.02 * rng.expovariate(1)) for _ in range(n)]


@pytest.mark.parametrize("runs", [3, 5, 10])
@pytest.mark.parametrize("deviation", [0.0, 0.01, 0.02, 0.05])
def test_coverage_between_runs(deviation, runs):
    """False calls of equal arms; 1500 trials of 95 % have a standard error of 0.6 %."""
    rng, trials = random.Random(runs), 1500
    hits = 0
    for _ in range(trials):
        a, b = ([simulated_run(rng, deviation) for _ in range(runs)] for _ in range(2))
        hits += 1 in ratio_of_runs(a, b).interval
    assert hits / trials >= 0.94


def test_coverage_where_one_side_scatters_more():
    rng, trials = random.Random(0), 3000
    hits = 0
    for _ in range(trials):
        a = [[1.3 * rng.lognormvariate(0, 0.05)] for _ in range(6)]
        b = [[rng.lognormvariate(0, 0.01)] for _ in range(4)]
        ratio = ratio_of_runs(a, b)
        hits += 1.3 in ratio.interval
        assert ratio.interval.low < ratio.value < ratio.interval.high
    assert hits / trials >= 0.94


def test_more_steps_do_not_stand_in_for_runs():
    """The interval of one run a side misses what runs differ by, and the more steps, the surer it is of that."""
    rng, trials = random.Random(0), 200
    hits = {10: 0, 200: 0}
    for n in hits:
        for _ in range(trials):
            a, b = (simulated_run(rng, 0.02, n) for _ in range(2))
            hits[n] += 1 in ratio_of_medians(a, b).interval
    assert hits[200] / trials < 0.75
    assert hits[200] < hits[10] < 0.95 * trials


def test_a_ratio_says_whether_it_holds_between_runs():
    one, many = [2.0] * 7, [[2.0, 2.1], [2.2, 2.0], [2.05, 2.15]]
    assert not ratio_of_medians(one, one).between_runs
    assert ratio_of_runs(many, many).between_runs
    assert ratio_of_runs([one], many).interval is None, "one run has no spread between runs"
    assert ratio_of_runs([one], many).between_runs
    assert ratio_of_runs([one, one], [one, one]).interval == Interval(1.0, 1.0)


def test_the_difference_that_is_said_to_be_found_is_found_9_times_of_10():
    rng, trials, deviation = random.Random(2), 1500, 0.02
    for runs in (3, 5, 10):
        factor = 1 + smallest_found(deviation, runs)
        called = 0
        for _ in range(trials):
            a, b = ([[rng.lognormvariate(0, deviation)] for _ in range(runs)] for _ in range(2))
            called += verdict(ratio_of_runs([[factor * x for x in run] for run in a], b)) == "faster"
        assert called / trials == pytest.approx(0.9, abs=0.03)


def test_the_deviation_of_runs_is_pooled_over_arms():
    rng = random.Random(3)
    arms = [[[scale * rng.lognormvariate(0, 0.03)] * 3 for _ in range(5)] for scale in (1, 7) for _ in range(200)]
    assert run_deviation(*arms) == pytest.approx(0.03, rel=0.06)
    assert math.isnan(run_deviation([[1.0, 2.0]]))
    assert run_deviation([[1.0], [math.e]], [[5.0]]) == pytest.approx(math.sqrt(0.5)), "two runs are enough"
    assert run_deviation([[1.0, 2.0, 9.0], [2.0, 2.0]]) == 0, "their medians are equal, their means are not"


CORPUS = sorted((Path(__file__).parents[2] / "docs" / "results").glob("aa-*.jsonl"))


@pytest.mark.parametrize("runs", [3, 5])
def test_false_calls_on_the_corpus_are_at_most_5_percent(runs):
    """Disjoint groups of runs that followed one another; in each, every way to make two arms of it counts alike."""
    called = ways = groups = 0
    for path in CORPUS:
        for case in by_case(of_kind(read_records(path), StepRow), "run"):
            samples = [row.samples["step"] for row in case]
            assert len({row.run for row in case}) == len(case), "each run a process of its own"
            for group in _groups(samples, 2 * runs):
                groups += 1
                for chosen in itertools.combinations(range(1, 2 * runs), runs - 1):  # the first run is in one of them
                    arm = [group[0], *(group[index] for index in chosen)]
                    rest = [group[index] for index in range(1, 2 * runs) if index not in chosen]
                    called += verdict(ratio_of_runs(arm, rest)) != "inconclusive"
                    ways += 1
    assert groups >= {3: 70, 5: 40}[runs], "the corpus is there"
    assert called / ways <= 0.05


def _groups(runs, size):
    return [runs[start : start + size] for start in range(0, len(runs) - size + 1, size)]


@pytest.mark.parametrize(
    ("samples", "rounds", "sizes"), [(6, 3, [2, 2, 2]), (7, 3, [2, 2, 3]), (5, 1, [5]), (2, 2, [1, 1])]
)
def test_samples_are_split_into_their_rounds(samples, rounds, sizes):
    parts = in_rounds(range(samples), rounds)
    assert [len(part) for part in parts] == sizes
    assert [each for part in parts for each in part] == list(range(samples))


def test_rounds_count_once_each_within_a_run():
    a, b = [[10.0, 10.1], [10.4, 10.5], [10.2, 10.3]], [[20.0, 20.1]] * 3
    found = ratio_of_rounds(a, b)
    assert found == dataclasses.replace(ratio_of_runs(a, b), between_runs=False)
    assert (found.between_runs, found.interval.low < found.value < found.interval.high) == (False, True)


def test_of_few_rounds_all_samples_are_one():
    a, b = [[10.0] * 4, [10.2] * 4], [[20.0] * 4, [20.4] * 4]
    assert ratio_of_rounds(a, b) == ratio_of_medians([*a[0], *a[1]], [*b[0], *b[1]])
    assert ratio_of_rounds([*a, a[0]], b) == ratio_of_medians([*a[0], *a[1], *a[0]], [*b[0], *b[1]])


def test_drift_over_the_rounds_of_a_run_is_in_the_interval():
    """In a run that slows down by 10 %, two equal cases in turns are not told apart; nor are their rounds narrow."""
    drift = [[1 + 0.05 * number + 0.001 * step for step in range(10)] for number in range(3)]
    found = ratio_of_rounds(drift, [[each * 1.01 for each in part] for part in drift])
    assert 1 in found.interval
    assert found.interval.high - found.interval.low > 0.1


def test_the_ratio_of_pairs_takes_what_both_share_out():
    drift = [1.0, 3.0, 1.5, 9.0, 2.0, 1.1, 4.0]
    found = ratio_of_pairs([2 * each for each in drift], drift, spread=0.0)
    assert (found.value, found.interval, found.between_runs) == (2.0, Interval(2.0, 2.0), False)
    widened = ratio_of_pairs([2 * each for each in drift], drift, spread=0.25)
    assert widened.interval == Interval(1.6, 2.5)


def test_the_ratio_of_pairs_has_the_interval_of_a_median():
    over = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]
    assert ratio_of_pairs(over, [1.0] * 7, spread=0.0) == Ratio(4.0, Interval(1.0, 7.0))
    assert ratio_of_pairs(over[:5], [1.0] * 5) == Ratio(3.0, None)
    assert ratio_of_pairs(over[:4], [1.0] * 4).value == 2.5, "between the middle two"
    with pytest.raises(ValueError, match="argument 2"):
        ratio_of_pairs(over, [1.0] * 6)


def test_ratios_of_pairs_cover_the_truth_where_those_of_medians_do_too_but_are_narrower():
    """Load that comes and goes makes times scatter by half; the ratio is 1.1."""
    draw, covered, widths = random.Random(5), 0, []
    for _ in range(400):
        load = [draw.choice((1.0, 1.0, 1.6)) for _ in range(10)]
        over = [1.1 * each * draw.gauss(1, 0.01) for each in load]
        under = [each * draw.gauss(1, 0.01) for each in load]
        paired, apart = (
            ratio_of_pairs(over, under, spread=0.0).interval,
            ratio_of_medians(over, under, spread=0.0).interval,
        )
        covered += 1.1 in paired
        widths.append((paired.high - paired.low) / (apart.high - apart.low))
    assert covered >= 0.93 * 400
    assert statistics.median(widths) < 0.2


def test_errors_of_a_product_of_ratios_add_as_squares():
    one, two = Ratio(2.0, Interval(2.0 / 1.03, 2.0 * 1.06)), Ratio(1.5, Interval(1.5 / 1.04, 1.5 * 1.08))
    found = product([one, two])
    assert found.value == 3.0
    assert math.log(3.0 / found.interval.low) == pytest.approx(math.hypot(math.log(1.03), math.log(1.04)))
    assert math.log(found.interval.high / 3.0) == pytest.approx(math.hypot(math.log(1.06), math.log(1.08)))
    assert product([one]).interval.low == pytest.approx(one.interval.low)
    assert product([one, Ratio(1.5, None)]) == Ratio(3.0, None)
    assert product([]) == Ratio(1.0, Interval(1.0, 1.0))


@pytest.mark.parametrize("n", [1001, 2000, 4999])
@pytest.mark.parametrize("confidence", [0.95, 0.975])
def test_the_interval_of_many_samples_is_that_of_whole_binomials(monkeypatch, n, confidence):
    found = stats._order_statistic(n, confidence)
    stats._order_statistic.cache_clear()
    monkeypatch.setattr(stats, "_EXACT", n)
    assert stats._order_statistic(n, confidence) == found > 400
    stats._order_statistic.cache_clear()
