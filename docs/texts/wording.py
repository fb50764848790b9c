"""How a figure is put in a sentence, beyond what the reports have."""

from __future__ import annotations

from collections.abc import Iterable

from trainstep.report.numbers import number


def percent(share: float) -> str:
    """`38%`, below 10 % with a decimal."""
    return f"{100 * share:.0f}%" if share >= 0.1 else f"{100 * share:.1f}%"


def times(ratio: float) -> str:
    """`2.05 times`."""
    return f"{number(ratio)} times"


def span(values: Iterable[float]) -> str:
    """`1.6 to 2.2`, smallest to largest."""
    ordered = sorted(values)
    return f"{number(ordered[0])} to {number(ordered[-1])}"
