"""Samples → median with an exact confidence interval, and ratios that are only called when the interval allows.

Step times are skewed and have outliers, so nothing here assumes a normal distribution. The interval of a median comes
from order statistics: the number of samples below the true median is binomial(n, 1/2), so the k-th smallest and k-th
largest samples enclose it with probability 1 − 2·P(B < k), whatever the distribution (David & Nagaraja, Order
Statistics, section 7.1).

The steps of one run share what the run happened to get (memory layout, clocks, the host's mood), and no statistic of
one run can see that. So a ratio has two forms: `ratio_of_runs`, whose interval holds between runs, from several runs a
side, each a process of its own; and `ratio_of_medians` of one run a side, which is true `WITHIN_RUN` alone.
"""

from __future__ import annotations

import functools
import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

CONFIDENCE = 0.95

RUN_SPREAD = 0.02
"""Differences smaller than this share are not remarked on where there was one run a side: ratios within a run are
widened by it, so that drift and order inside a process are not called a difference. It is no bound on what separate
runs differ by, which depends on the case: notebook/trust.md measures it, and `ratio_of_runs` takes it from the runs."""

_EXACT = 1000  # samples up to which binomials are whole numbers; above, their logarithms are exact to 11 digits

WITHIN_RUN = "within this run"
"""Note beside the interval of a ratio that one run a side gave."""


@dataclass(frozen=True)
class Interval:
    """A closed interval; `low <= high`."""

    low: float
    high: float

    def __contains__(self, value: float) -> bool:
        return self.low <= value <= self.high


@dataclass(frozen=True)
class Summary:
    """Statistics of a list of samples, all in the samples' unit."""

    n: int
    median: float
    interval: Interval | None
    """95 % interval of the median; None below 6 samples, where order statistics have none."""
    mean: float
    std: float
    """Sample standard deviation (n − 1); NaN for one sample."""
    min: float
    max: float
    outliers: int
    """Samples beyond 1.5 interquartile ranges from the quartiles (Tukey); counted, never dropped."""

    def columns(self, name: str) -> dict[str, float | None]:
        """Median and interval of milliseconds as a row's NAME_ms, NAME_low_ms, NAME_high_ms (None: no interval)."""
        low, high = (self.interval.low, self.interval.high) if self.interval else (None, None)
        return {f"{name}_ms": self.median, f"{name}_low_ms": low, f"{name}_high_ms": high}


def median_interval(samples: Sequence[float], confidence: float = CONFIDENCE) -> Interval | None:
    """The narrowest symmetric order-statistics interval of the median with at least this coverage, or None."""
    ordered = sorted(samples)
    n = len(ordered)
    k = _order_statistic(n, confidence)
    return Interval(ordered[k - 1], ordered[n - k]) if k else None


@functools.lru_cache(1024)
def _order_statistic(n: int, confidence: float) -> int:
    """The largest k whose k-th smallest and k-th largest of n samples enclose the median so often; 0 if none does."""
    below = 0.0  # P(B < k) for the k under trial
    for k in range(1, n // 2 + 1):
        if n <= _EXACT:
            below += math.comb(n, k - 1) / 2**n
        else:
            below += math.exp(math.lgamma(n + 1) - math.lgamma(k) - math.lgamma(n - k + 2) - n * math.log(2))
        if 1 - 2 * below < confidence:
            return k - 1
    return n // 2


def summarize(samples: Sequence[float]) -> Summary:
    """Summarise at least one sample."""
    assert samples, "a summary needs at least one sample"
    n, outliers = len(samples), 0
    if n >= 4:
        first, _, third = statistics.quantiles(samples, n=4, method="inclusive")
        reach = 1.5 * (third - first)
        outliers = sum(not first - reach <= sample <= third + reach for sample in samples)
    median, mean = statistics.median(samples), statistics.fmean(samples)
    std = statistics.stdev(samples) if n > 1 else math.nan
    return Summary(n, median, median_interval(samples), mean, std, min(samples), max(samples), outliers)


@dataclass(frozen=True)
class Ratio:
    """A ratio of two medians, a / b."""

    value: float
    interval: Interval | None
    """Encloses the true ratio with at least 95 %; None where either side has too few runs, or samples of one run."""
    between_runs: bool = False
    """True if the interval holds between runs; otherwise it holds `WITHIN_RUN` alone."""


def ratio_of_medians(a: Sequence[float], b: Sequence[float], spread: float = RUN_SPREAD) -> Ratio:
    """median(a) / median(b) of one run a side, with a distribution-free interval from 7 samples a side up.

    Each median is enclosed at 97.5 %; by the union bound both hold at once with at least 95 %, and then the ratio lies
    between low(a)/high(b) and high(a)/low(b). Both ends are moved outwards by `spread`.
    """
    value = statistics.median(a) / statistics.median(b)
    return ratio_of_passes(value, [a], [b], spread)


def ratio_of_passes(value: float, a: Sequence[Sequence[float]], b: Sequence[Sequence[float]], spread: float) -> Ratio:
    """This ratio of all samples, with an interval that covers those of each pass against each, from the passes' own."""
    over, under = ([each for each in map(ratio_interval_of, side) if each is not None] for side in (a, b))
    # One pass without an interval leaves the ratio without one: nobody knows how far that pass reaches.
    if len(over) < len(a) or len(under) < len(b):
        return Ratio(value, None)
    low = min([each.low for each in over]) / max([each.high for each in under]) / (1 + spread)
    high = max([each.high for each in over]) / min([each.low for each in under]) * (1 + spread)
    return Ratio(value, Interval(low, high))


def ratio_of_pairs(a: Sequence[float], b: Sequence[float], spread: float = RUN_SPREAD) -> Ratio:
    """The median of a[i] / b[i], of samples that were taken in turns, so that a pair had the same moment.

    What makes the machine slow for a while is in both of a pair and drops out; `ratio_of_medians` would have it in its
    interval, or, where it fell on one side, in its value. The interval is the median's, from 6 pairs up, with both ends
    moved outwards by `spread`.
    """
    ratios = [over / under for over, under in zip(a, b, strict=True)]
    value, found = statistics.median(ratios), median_interval(ratios)
    return Ratio(value, found and Interval(found.low / (1 + spread), found.high * (1 + spread)))


def product(ratios: Sequence[Ratio]) -> Ratio:
    """a / c of a / b and b / c, and so on, from independent measurements; without an interval if one has none.

    On the scale of logarithms independent errors add as squares, above and below apart.
    """
    value = math.prod(each.value for each in ratios)
    intervals = [(each.value, each.interval) for each in ratios if each.interval is not None]
    if len(intervals) < len(ratios):
        return Ratio(value, None)
    below = math.hypot(*(math.log(middle / found.low) for middle, found in intervals))
    above = math.hypot(*(math.log(found.high / middle) for middle, found in intervals))
    return Ratio(value, Interval(value * math.exp(-below), value * math.exp(above)))


def ratio_interval_of(samples: Sequence[float]) -> Interval | None:
    """The interval of a median that is one side of a ratio: 97.5 %; None below 7 samples."""
    return median_interval(samples, 1 - (1 - CONFIDENCE) / 2)


def ratio_of_runs(a: Sequence[Sequence[float]], b: Sequence[Sequence[float]], confidence: float = CONFIDENCE) -> Ratio:
    """The ratio of two cases from several runs of each, with an interval that holds between runs, from 2 a side up.

    A run counts once, by the logarithm of its median: samples of one run are no replicates, however many there are,
    and how they scatter is in what the medians scatter by. The interval is Welch's for the difference of two means,
    which lets the sides scatter differently. Resampling runs and then samples (the hierarchical bootstrap) gives
    intervals that are too narrow below ten runs a side; notebook/lab-log.md has the coverage of both.
    """
    sides = [[math.log(statistics.median(run)) for run in side] for side in (a, b)]
    over, under = map(statistics.fmean, sides)
    value = math.exp(over - under)
    if min(map(len, sides)) < 2:
        return Ratio(value, None, between_runs=True)
    variances = [statistics.variance(side) / len(side) for side in sides]  # of the sides' means
    half = 0.0
    if total := sum(variances):
        degrees = total**2 / sum(each**2 / (len(side) - 1) for each, side in zip(variances, sides, strict=True))
        half = student_quantile(degrees, confidence) * math.sqrt(total)
    return Ratio(value, Interval(value * math.exp(-half), value * math.exp(half)), between_runs=True)


FEWEST_ROUNDS = 3
"""Rounds a side from which `ratio_of_rounds` takes a round as one sample."""


def in_rounds(samples: Sequence[float], rounds: int) -> list[Sequence[float]]:
    """Samples of one case that was taken in turns with others, by round: all have as many, or differ by one."""
    ends = [len(samples) * number // rounds for number in range(rounds + 1)]
    return [samples[start:end] for start, end in itertools.pairwise(ends)]


def ratio_of_rounds(a: Sequence[Sequence[float]], b: Sequence[Sequence[float]]) -> Ratio:
    """The ratio of two cases that were taken in turns in one run, round after round in an order drawn anew.

    What drifts in a run, and what a case leaves to the next, is then in how a case's rounds differ. So a round counts
    once, as a run does in `ratio_of_runs`, and the interval is that one's. With fewer than `FEWEST_ROUNDS` a side it is
    `ratio_of_medians` of all samples. Either way it is true `WITHIN_RUN` alone: both have one process.
    """
    if min(len(a), len(b)) < FEWEST_ROUNDS:
        return ratio_of_medians([each for part in a for each in part], [each for part in b for each in part])
    return replace(ratio_of_runs(a, b), between_runs=False)


def run_deviation(*arms: Sequence[Sequence[float]]) -> float:
    """The relative standard deviation of run medians, pooled over arms; NaN where no arm has two runs."""
    logs = [[math.log(statistics.median(run)) for run in arm] for arm in arms if len(arm) > 1]
    degrees = sum(len(each) - 1 for each in logs)
    squares = sum(statistics.variance(each) * (len(each) - 1) for each in logs)
    return math.sqrt(squares / degrees) if degrees else math.nan


def smallest_found(deviation: float, runs: int, power: float = 0.9) -> float:
    """The relative difference that `ratio_of_runs` tells from none with this probability.

    Welch's degrees of freedom vary from sample to sample between runs − 1 and 2·(runs − 1); with the number between
    them, simulated power is 0.88 to 0.91 where 0.9 was asked for.

    Args:
        deviation: `run_deviation` of one side.
        runs: on each side, 3 or more.
        power: 0.9 is 9 times of 10.
    """
    assert runs >= 3, f"of {runs} runs a side no power is known"
    degrees = 1.5 * (runs - 1)
    quantiles = student_quantile(degrees, CONFIDENCE) + student_quantile(degrees, 2 * power - 1)
    return math.expm1(quantiles * deviation * math.sqrt(2 / runs))


def student_quantile(degrees: float, confidence: float) -> float:
    """Standard errors either way that enclose this share of Student's t distribution.

    For whole degrees of freedom by the finite sums of Abramowitz & Stegun, 26.7.3 and 26.7.4; between two of them
    linear in 1/degrees: the quantile is convex there, so that the line lies above it.
    """
    assert degrees >= 1, f"degrees of freedom are {degrees}"
    whole = math.floor(degrees)
    if whole == degrees or whole >= 200:  # beyond, the next one is the same to four digits
        return _whole_student_quantile(min(whole, 200), confidence)
    below, above = (_whole_student_quantile(each, confidence) for each in (whole, whole + 1))
    return above + (below - above) * (1 / degrees - 1 / (whole + 1)) * whole * (whole + 1)


@functools.cache
def _whole_student_quantile(degrees: int, confidence: float) -> float:
    low, high = 0.0, math.pi / 2  # of the angle whose tangent is t / √degrees
    while (angle := (low + high) / 2) not in (low, high):
        low, high = (angle, high) if _student_share(angle, degrees) < confidence else (low, angle)
    return math.sqrt(degrees) * math.tan(angle)


def _student_share(angle: float, degrees: int) -> float:
    """P(|t| < √degrees · tan(angle))."""
    sine, cosine = math.sin(angle), math.cos(angle)
    is_odd = degrees % 2
    term = sine * cosine if is_odd else sine
    total = 0.0
    for index in range(2 + is_odd, degrees + 1, 2):
        total += term
        term *= cosine**2 * (index - 1) / index
    return 2 / math.pi * (angle + total) if is_odd else total


def verdict(speedup: Ratio) -> Literal["faster", "slower", "inconclusive"]:
    """Judge a speed-up (old time / new time): a call is made only when the whole interval lies on one side of 1."""
    if speedup.interval is None or 1 in speedup.interval:
        return "inconclusive"
    return "faster" if speedup.interval.low > 1 else "slower"


FEWEST_IN_TREND, MOST_IN_TREND = 24, 120
"""Samples from which a trend is looked for, and medians of neighbours that stand for more samples than that."""
RISES, RISES_IN_THIRD = 3.09, 1.28
"""Scores of Mann and Kendall that a trend exceeds, of all samples and of each third. Samples in a random order do so
once in 1,000 times, and once in ten."""


@dataclass(frozen=True)
class Trend:
    """Samples that rise from the first to the last."""

    slope: float
    """Theil and Sen's, per sample: the median slope of all pairs."""
    first: float
    """Median of the first tenth."""
    last: float
    """Median of the last tenth."""


def rising(samples: Sequence[float]) -> Trend | None:
    """Describe how samples rise; None where they do not, by Mann and Kendall's test.

    Each third has to rise too. A level that changes once or twice, as where another process starts, is no trend.
    """
    size = -(-len(samples) // MOST_IN_TREND)
    taken = [statistics.median(samples[at : at + size]) for at in range(0, len(samples), size or 1)]
    third, tenth = len(taken) // 3, -(-len(samples) // 10)
    parts = (taken[:third], taken[third:-third], taken[-third:])
    if len(taken) < FEWEST_IN_TREND or _score(taken) < RISES or min(map(_score, parts)) < RISES_IN_THIRD:
        return None
    pairs = itertools.combinations(enumerate(taken), 2)
    slope = statistics.median((after - before) / (later - early) for (early, before), (later, after) in pairs) / size
    return Trend(slope, statistics.median(samples[:tenth]), statistics.median(samples[-tenth:]))


def _score(samples: Sequence[float]) -> float:
    """Mann and Kendall's score, in its standard deviations where the order is random."""
    n, pairs = len(samples), itertools.combinations(samples, 2)
    rises = sum((later > early) - (later < early) for early, later in pairs)
    return rises / math.sqrt(n * (n - 1) * (2 * n + 5) / 18)
