"""Cores that this process may use, and how busy they are. Importing this imports no torch."""

from __future__ import annotations

import os
from pathlib import Path


def cores() -> int:
    """Cores that this process may run on, as under taskset; all there are if the system does not say."""
    allowed = getattr(os, "sched_getaffinity", None)
    return (os.cpu_count() or 1) if allowed is None else len(allowed(0))


def load() -> float | None:
    """The system's load average of the last minute: threads that run or want to; None if the system does not say."""
    try:
        return os.getloadavg()[0]
    except OSError:
        return None


def cpu_share() -> float | None:
    """Share of the time in which this process's first thread could run that it did; None if the system does not say."""
    try:
        ran, waited, *_ = map(int, Path("/proc/self/schedstat").read_text().split())
    except (OSError, ValueError):
        return None
    return ran / (ran + waited) if ran else None


def busy(load: float | None, among: object, share: float | None = None) -> str:
    """Describe how busy a machine is: ` (load 17.2 on 2 cores, the process had 12% of the CPU that it asked for)`.

    Args:
        among: the number of cores.
    """
    told = [] if load is None else [f"load {load:.1f} on {among} cores"]
    told += [] if share is None else [f"the process had {share:.0%} of the CPU that it asked for"]
    return f" ({', '.join(told)})" if told else ""
