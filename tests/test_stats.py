import random
import statistics

import pytest

from trainstep.stats import Interval, Ratio, median_interval, ratio_of_medians, summarize, verdict


def test_below_six_samples_there_is_no_interval():
    assert median_interval([1, 2, 3, 4, 5]) is None
    assert median_interval([1, 2, 3, 4, 5, 6]) == Interval(1, 6)


@pytest.mark.parametrize(("n", "k"), [(6, 1), (8, 1), (9, 2), (10, 2), (20, 6), (50, 18), (100, 40)])
def test_ranks_agree_with_published_tables(n, k):
    """Order-statistics ranks of the 95 % interval of a median, as in Conover, Practical Nonparametric Statistics."""
    samples = list(range(1, n + 1))
    assert median_interval(samples) == Interval(k, n + 1 - k)


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


def test_ratio_needs_seven_samples_a_side():
    assert ratio_of_medians([2.0] * 7, [1.0] * 7, spread=0) == Ratio(2.0, Interval(2.0, 2.0))
    assert ratio_of_medians([2.0] * 6, [1.0] * 7).interval is None


def test_ratio_is_widened_by_the_spread_between_runs():
    assert ratio_of_medians([2.0] * 7, [1.0] * 7, spread=0.25) == Ratio(2.0, Interval(1.6, 2.5))


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
