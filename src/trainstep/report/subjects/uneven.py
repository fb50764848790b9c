"""Steps of a script that differ: of batches that come in bursts the median step says little, and the mean is told."""

from __future__ import annotations

from dataclasses import replace

from trainstep.rows import ScriptRow
from trainstep.rows.records import Times

UNEVEN = 0.25
"""By how much the mean step must exceed the median one for means to be told in place of medians."""


def mean_of(times: Times) -> float:
    """Milliseconds; of a row that has no mean, the median."""
    return times.median if times.mean is None else times.mean


def is_uneven(row: ScriptRow) -> bool:
    """True if the mean of its steps is much above their median."""
    step = row.times["step"]
    return mean_of(step) > (1 + UNEVEN) * step.median


def comes_in_bursts(row: ScriptRow) -> bool:
    """True if that is for the most part because some steps wait for data and others do not."""
    step, data = row.times["step"], row.times.get("data")
    if data is None or not is_uneven(row):
        return False
    return mean_of(data) - data.median > (mean_of(step) - step.median) / 2


def as_told(row: ScriptRow) -> ScriptRow:
    """The row, with means in the place of medians, and no intervals, where its steps are uneven."""
    if not is_uneven(row):
        return row
    return replace(row, times={phase: Times(mean_of(times)) for phase, times in row.times.items()})


def share_of(row: ScriptRow, phase: str) -> float:
    """The phase's part of the step, by the sums of both over all steps."""
    whole = mean_of(row.times["step"])
    return mean_of(row.times[phase]) / whole if phase in row.times and whole else 0.0
