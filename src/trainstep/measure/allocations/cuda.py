"""The log of a step's allocations on a GPU: the caching allocator's own history.

Positions in it are counted, not timed: the allocator's statistics say how many allocations and releases there have
been, and the history holds one entry for each.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from trainstep.measure.allocations.attribution import StepWatch
from trainstep.measure.allocations.snapshot import blocks_of, with_owners
from trainstep.measure.allocations.timeline import Timeline


@dataclass(frozen=True)
class CudaRecording:
    """A step's timeline, and what the allocator itself says."""

    timeline: Timeline
    snapshot: dict[str, Any]
    """As `torch.cuda.memory._snapshot` gives it, each allocation's owner as its category."""
    allocator_peak: int
    """The most bytes asked for at once, by the allocator's own count: `timeline.peak` must equal it."""


def record_on_cuda(step: Callable[[], object], watch: StepWatch, batch: Any, device: torch.device) -> CudaRecording:
    """Run `step` once and return its timeline.

    Args:
        step: takes one step on `batch`, announcing itself to `watch`; on `device`, eager or compiled.
    """
    index = device.index if device.index is not None else torch.cuda.current_device()
    torch.cuda.synchronize(index)

    def count() -> int:
        counts = torch.cuda.memory_stats_as_nested_dict(index)["allocation"]["all"]
        return int(counts["allocated"] + counts["freed"])

    torch.cuda.reset_peak_memory_stats(index)
    torch.cuda.memory._record_memory_history("all", context="all", stacks="python", clear_history=True)
    before = count()
    watch.position = lambda: count() - before
    try:
        with watch.watching(batch):
            step()
        torch.cuda.synchronize(index)
        snapshot = torch.cuda.memory._snapshot()
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)
    peak = torch.cuda.memory_stats(index)["requested_bytes.all.peak"]
    blocks, events = blocks_of(snapshot, index)
    timeline = watch.attribute(blocks, events)
    return CudaRecording(timeline, with_owners(snapshot, timeline, index), int(peak))
