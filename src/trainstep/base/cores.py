"""How many cores there are for this process. Importing this imports no torch."""

from __future__ import annotations

import os


def cores() -> int:
    """That this process may run on, as under taskset; where the system does not say, all there are."""
    allowed = getattr(os, "sched_getaffinity", None)
    return (os.cpu_count() or 1) if allowed is None else len(allowed(0))
