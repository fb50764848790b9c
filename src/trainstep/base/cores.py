"""Number of cores that this process may use. Importing this imports no torch."""

from __future__ import annotations

import os


def cores() -> int:
    """Cores that this process may run on, as under taskset; all there are if the system does not say."""
    allowed = getattr(os, "sched_getaffinity", None)
    return (os.cpu_count() or 1) if allowed is None else len(allowed(0))
