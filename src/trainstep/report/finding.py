"""One finding, and how a figure is put in a sentence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """One sentence, and what it is about."""

    topic: str
    sentence: str


def numeric(value: object) -> float:
    """A record's value that is known to be a number."""
    assert isinstance(value, (int, float)), f"expected a number, got {value!r}"
    return float(value)


def in_ms(value: object) -> str:
    """`12.3 ms`."""
    return f"{numeric(value):.3g} ms" if numeric(value) < 1000 else f"{numeric(value):.0f} ms"


def in_gib(value: float) -> str:
    """`1.23 GiB`, or MiB where that reads better."""
    return f"{value:.2f} GiB" if value >= 0.1 else f"{value * 1024:.1f} MiB"


def listed(names: Sequence[str]) -> str:
    """`a, b and c`."""
    return names[0] if len(names) == 1 else ", ".join(names[:-1]) + " and " + names[-1]
