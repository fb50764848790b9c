"""One step of a profile as bars on a timeline: one for every kernel, or for several neighbours where they are many."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

from trainstep.measure.profile.families import short_name
from trainstep.measure.profile.kernels import Kernel, KernelProfile
from trainstep.measure.profile.trace import Stream
from trainstep.records import Scalar

UNKNOWN = "(unknown)"
LONGEST = 12_000
"""Bars of a timeline on a page of its own."""


def timeline_values(
    profile: KernelProfile, step: str | None, longest: int = LONGEST
) -> tuple[dict[str, Scalar], dict[str, Sequence[Scalar]]]:
    """One step, bar by bar: nanoseconds from its first kernel, and indices into the series of names.

    Args:
        profile: whose kernels are drawn.
        step: which of its steps.
        longest: bars at most; where there are more, short neighbours are drawn as one, and the values say so.
    """
    kernels = profile.of_step(step)
    bars, shortest_us = _fitted([_Bar(each) for each in kernels], longest)
    start = min((bar.start for bar in bars), default=0.0)
    tables: dict[str, dict[str, int]] = {name: {} for name in ("kernel", "family", "phase", "module", "lane")}

    def indices(table: str, text: Callable[[Kernel], str]) -> list[Scalar]:
        known = tables[table]
        return [known.setdefault(text(bar.kernel), len(known)) for bar in bars]

    series: dict[str, Sequence[Scalar]] = {
        "start_ns": [round((bar.start - start) * 1e3) for bar in bars],
        "duration_ns": [round((bar.end - bar.start) * 1e3) for bar in bars],
        "count": [bar.count for bar in bars],
        "kernel": indices("kernel", lambda each: short_name(each.name)),
        "family": indices("family", lambda each: each.family),
        "phase": indices("phase", lambda each: each.phase or UNKNOWN),
        "module": indices("module", lambda each: each.module or UNKNOWN),
        "lane": indices("lane", lambda each: _lane(each, profile)),
    }
    values: dict[str, Scalar] = {"kernels": len(kernels), "bars": len(bars), "joined_below_us": shortest_us}
    return values, series | {f"{name}_names": list(table) for name, table in tables.items()}


class _Bar:
    """One kernel, or several neighbours, of which the longest gives its name."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel, self.start, self.end, self.count = kernel, kernel.start_us, kernel.end_us, 1

    def join(self, other: _Bar) -> None:
        if other.kernel.duration_us > self.kernel.duration_us:
            self.kernel = other.kernel
        self.end, self.count = max(self.end, other.end), self.count + other.count


_ALIKE: tuple[Callable[[Kernel], Hashable], ...] = (
    lambda each: (each.lane, each.family, each.phase),
    lambda each: (each.lane, each.phase),
    lambda each: each.lane,
)
"""What neighbours must have in common to be drawn as one, the strictest first."""
_VISIBLE = 1 / 100
"""Share of the timeline from which bars of different phases are rather joined than alike ones that far apart."""


def _fitted(bars: list[_Bar], most: int) -> tuple[list[_Bar], float | None]:
    """No more bars than may be drawn, and up to which length neighbours were joined for that; None where none were."""
    longest = max((bar.end for bar in bars), default=0.0) - min((bar.start for bar in bars), default=0.0)
    used: list[float] = []
    for levels, limit in ((_ALIKE[:2], _VISIBLE * longest), (_ALIKE, 2 * longest)):
        length = 1.0
        while len(bars) > most and length < limit:
            for alike in levels:
                if len(bars) > most:
                    bars = _joined(bars, alike, length)
            used.append(length)
            length *= 2
    return bars, max(used, default=None)


def _joined(bars: Sequence[_Bar], alike: Callable[[Kernel], Hashable], below_us: float) -> list[_Bar]:
    """The bars, neighbours of one stream that are alike and together shorter than `below_us` joined."""
    kept: list[_Bar] = []
    latest: dict[Stream, _Bar] = {}
    for bar in bars:
        last = latest.get(bar.kernel.stream)
        if last is not None and bar.end - last.start < below_us and alike(last.kernel) == alike(bar.kernel):
            last.join(bar)
            continue
        kept.append(bar)
        latest[bar.kernel.stream] = bar
    return kept


def _lane(kernel: Kernel, profile: KernelProfile) -> str:
    """What a lane of the timeline is called: a stream or a thread, or what copies and communication are."""
    if profile.is_cpu and kernel.kind != "collective":
        return f"thread {kernel.stream.number}"
    if kernel.lane != "compute":
        return kernel.lane
    return f"compute, stream {kernel.stream.number}"
