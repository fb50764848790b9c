"""One finding, and how a figure is put in a sentence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from trainstep.records import Scalar
from trainstep.report.numbers import number, numeric


@dataclass(frozen=True)
class Finding:
    """What one rule found: figures, and the sentence that says them."""

    topic: str  # A name in `findings.TOPICS`
    sentence: str
    id: str = ""  # Which rule found what, as `gain.faster`
    figures: Mapping[str, Scalar] = field(default_factory=dict)  # What the sentence is made from, units in the names


def in_ms(value: object) -> str:
    """`12.3 ms`."""
    return f"{number(numeric(value))} ms"


def in_gib(value: float) -> str:
    """`1.23 GiB`, or MiB where that reads better."""
    return f"{value:,.2f} GiB" if value >= 1 else f"{number(value * 1024)} MiB"


def listed(names: Sequence[str], joined: str = "and") -> str:
    """`a, b and c`."""
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} {joined} {names[-1]}"
