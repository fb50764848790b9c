"""The time that a ladder may take: what fits is tried, and what does not fit is listed with its expected gain."""

from __future__ import annotations

import math
import re
import time
from dataclasses import dataclass, field

from trainstep.base.errors import UsageError

_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0}


class OutOfTime(Exception):
    """The budget ended while something ran, which was stopped."""


@dataclass(frozen=True)
class Budget:
    """Seconds from now on; without a number, for ever."""

    seconds: float = math.inf
    _start: float = field(default_factory=time.monotonic)

    @staticmethod
    def of(text: str) -> Budget:
        """The budget that a flag has: 90s, 3m or 1h.

        Raises:
            UsageError: no such time.
        """
        found = re.fullmatch(r"(\d+(?:\.\d+)?)([smh])", text)
        if found is None or not float(found[1]):
            raise UsageError(f"budget is {text}; expected a time such as 90s, 3m or 1h")
        return Budget(float(found[1]) * _UNITS[found[2]])

    @property
    def left_s(self) -> float:
        """Seconds that are left."""
        return self.seconds - (time.monotonic() - self._start)

    def __str__(self) -> str:
        return f"{self.seconds:.0f} s" if self.seconds < 120 else f"{self.seconds / 60:.2g} min"


UNLIMITED = Budget()
