"""Steps in the order they ran: what each consists of, and of several ranks which took long when."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from statistics import fmean

from trainstep.report.charts import Plot, Scale
from trainstep.report.numbers import in_ms

MOST = 240  # Steps drawn one by one; of more, the longest of neighbours
MOST_CELLS = 800
_ALIKE = 1.2  # By how much the longest cell must exceed the shortest to have the full colour
Layer = tuple[str, str, Sequence[float]]  # Role, name, and milliseconds in each step


def neighbours(count: int) -> int:
    """Number of steps that a bar stands for."""
    return -(-count // MOST)


def steps_in_order(numbers: Sequence[int], layers: Sequence[Layer], top: float) -> str:
    """A stacked bar for each step, or for the longest of neighbours; drag to zoom.

    Args:
        numbers: of the steps, at least one.
        top: milliseconds at which the frame ends. Bars go on beyond it.
    """
    each, totals = neighbours(len(numbers)), [sum(parts) for parts in zip(*(ms for *_, ms in layers), strict=True)]
    starts = range(0, len(numbers), each)
    shown = [max(range(at, min(at + each, len(numbers))), key=totals.__getitem__) for at in starts]
    edges = [*(float(numbers[at]) for at in starts), numbers[-1] + 1.0]
    plot = Plot(Scale(edges[0], edges[-1]), Scale(0, top), 180)
    plot.x_axis("step", plot.x.ticks(least=1.0))
    plot.y_axis("ms", plot.y.ticks())
    plot.stack(edges, [(role, [ms[at] for at in shown]) for role, _, ms in layers])
    for at, ends in zip(shown, itertools.pairwise(edges), strict=True):
        parts = [f"{name} {in_ms(ms[at])}" for _, name, ms in layers if ms[at]]
        plot.bar(ends, (0, top), "cover", "\n".join([f"step {numbers[at]}: {in_ms(totals[at])}", *parts]))
    return plot.svg("x")


def rank_map(ranks: Mapping[str, Sequence[float]]) -> str:
    """A row for each rank, a cell for each step or the mean of neighbours: the darker, the longer it took."""
    count = min(map(len, ranks.values()))
    each = -(-count * len(ranks) // MOST_CELLS)
    cells = [[fmean(times[at : at + each]) for at in range(0, count, each)] for times in ranks.values()]
    low, high = min(map(min, cells)), max(map(max, cells))
    plot = Plot(Scale(1, count + 1), Scale(0.5 - len(ranks), 0.5), 22 * len(ranks))
    plot.x_axis("timed step", plot.x.ticks(least=1.0))
    plot.y_axis("", dict(zip(range(0, -len(ranks), -1), ranks, strict=True)), "ink")
    for y, name, times in zip(itertools.count(0, -1), ranks, cells, strict=False):
        for at, ms in enumerate(times):
            ends = (at * each + 1, min((at + 1) * each, count) + 1)
            share = (ms - low) / (max(high, _ALIKE * low) - low or 1.0)
            plot.bar(ends, (y - 0.45, y + 0.45), "accent", f"{name}, step {ends[0]}\n{in_ms(ms)}", 0.06 + 0.94 * share)
    return plot.svg()
