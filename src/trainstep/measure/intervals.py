"""Sets of points in time, as intervals: their union, what two of them share, what one has alone, how long they are."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

Interval = tuple[float, float]
"""(start, end)"""


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same points as sorted intervals that neither overlap nor touch; empty ones are gone."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if end <= start:
            continue
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def intersection(first: Sequence[Interval], second: Sequence[Interval]) -> list[Interval]:
    """The points that both have. Both are unions."""
    shared: list[Interval] = []
    i = j = 0
    while i < len(first) and j < len(second):
        start, end = max(first[i][0], second[j][0]), min(first[i][1], second[j][1])
        if start < end:
            shared.append((start, end))
        if first[i][1] <= second[j][1]:
            i += 1
        else:
            j += 1
    return shared


def difference(first: Sequence[Interval], second: Sequence[Interval]) -> list[Interval]:
    """The points that the first has and the second has not. Both are unions."""
    left: list[Interval] = []
    j = 0
    for start, end in first:
        while j < len(second) and second[j][1] <= start:
            j += 1
        at = j
        while at < len(second) and second[at][0] < end:
            if second[at][0] > start:
                left.append((start, second[at][0]))
            start = second[at][1]
            at += 1
        if start < end:
            left.append((start, end))
    return left


def length(intervals: Sequence[Interval]) -> float:
    """How long the intervals of a union are together."""
    return sum(end - start for start, end in intervals)
