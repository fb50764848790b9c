"""Samples → median with an exact confidence interval, and ratios that are only called when the interval allows.

Step times are skewed and have outliers, so nothing here assumes a normal distribution. The interval of a median comes
from order statistics: the number of samples below the true median is binomial(n, 1/2), so the k-th smallest and k-th
largest samples enclose it with probability 1 − 2·P(B < k), whatever the distribution (David & Nagaraja, Order
Statistics, section 7.1).

The steps of one run share what the run happened to get (memory layout, clocks, the host's mood), and no statistic of
one run can see that. So the interval of a ratio is widened by the spread that medians of one case have between runs.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

CONFIDENCE = 0.95

RUN_SPREAD = 0.02
"""Relative difference between medians of one case from run to run. On an H200, passes over one case in one process
differed by up to 0.4 % where the GPU set the pace; separate runs differ by about 2 %. Where the host sets the pace they
differ by more, but there the samples themselves scatter, and their interval shows it."""

WILD_INTERVAL = 0.50
"""A median whose interval is wider than this share of it is not to be believed: something else must have run."""


@dataclass(frozen=True)
class Interval:
    """A closed interval; `low <= high`."""

    low: float
    high: float

    def __contains__(self, value: float) -> bool:
        return self.low <= value <= self.high


@dataclass(frozen=True)
class Summary:
    """What is reported of a list of samples, all in the samples' unit."""

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
    below = 0.0  # P(B < k) for the k under trial
    best = None
    for k in range(1, n // 2 + 1):
        below += math.comb(n, k - 1) / 2**n
        if 1 - 2 * below < confidence:
            break
        best = Interval(ordered[k - 1], ordered[n - k])
    return best


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
    """Encloses the true ratio with at least 95 %; None where either side has under 7 samples."""


def ratio_of_medians(a: Sequence[float], b: Sequence[float], spread: float = RUN_SPREAD) -> Ratio:
    """median(a) / median(b) with a distribution-free interval.

    Each median is enclosed at 97.5 %; by the union bound both hold at once with at least 95 %, and then the ratio lies
    between low(a)/high(b) and high(a)/low(b). Both ends are moved outwards by `spread`, the relative difference
    between runs of one case.
    """
    value = statistics.median(a) / statistics.median(b)
    each = 1 - (1 - CONFIDENCE) / 2
    over, under = median_interval(a, each), median_interval(b, each)
    if over is None or under is None:
        return Ratio(value, None)
    return Ratio(value, Interval(over.low / under.high / (1 + spread), over.high / under.low * (1 + spread)))


def verdict(speedup: Ratio) -> Literal["faster", "slower", "inconclusive"]:
    """Judge a speed-up (old time / new time): a call is made only when the whole interval lies on one side of 1."""
    if speedup.interval is None or 1 in speedup.interval:
        return "inconclusive"
    return "faster" if speedup.interval.low > 1 else "slower"
