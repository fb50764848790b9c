"""What a call of a collective costs: an overhead, and bytes at a bandwidth, fitted to measured times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from trainstep.plan.communication import CollectiveName, Link, bus_factor


@dataclass(frozen=True)
class Fit:
    """A latency–bandwidth line through measured times."""

    link: Link
    worst_error: float
    """The largest relative difference between the line and a measured time."""


def fit_link(collective: CollectiveName, world_size: int, points: Sequence[tuple[int, float]]) -> Fit | None:
    """Least squares of relative errors: t = overhead + bytes on a link / bus bandwidth.

    Relative, so that a microsecond counts as much at a megabyte as a millisecond at a gigabyte. An overhead below zero
    is no overhead: then the line goes through zero.

    Args:
        collective: which.
        world_size: ranks, at least 2.
        points: (payload bytes, seconds).

    Returns:
        None for fewer than two sizes, or where larger payloads are not slower, so that there is no bandwidth.
    """
    if len({size for size, _ in points}) < 2 or world_size < 2:
        return None
    on_link = np.array([size * bus_factor(collective, world_size) for size, _ in points])
    seconds = np.array([time for _, time in points])
    columns = np.stack([np.ones_like(on_link), on_link], axis=1) / seconds[:, None]
    overhead, per_byte = np.linalg.lstsq(columns, np.ones_like(seconds), rcond=None)[0]
    if overhead < 0:
        overhead = 0.0
        per_byte = np.linalg.lstsq(columns[:, 1:], np.ones_like(seconds), rcond=None)[0][0]
    if per_byte <= 0:
        return None
    errors = np.abs((overhead + per_byte * on_link) / seconds - 1)
    return Fit(Link(float(overhead), float(1 / per_byte)), float(errors.max()))
