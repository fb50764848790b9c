"""One finding, and how figures are put in a sentence."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from string import Formatter
from typing import Any

from trainstep.records import Scalar
from trainstep.report.numbers import number, numeric

TOPICS: Mapping[str, str] = {
    "gain": "Gain proven",
    "loss": "Loss",
    "phases": "What dominates",
    "utilisation": "Utilisation",
    "launches": "Launches",
    "formulas": "Formulas",
    "kernels": "Kernels",
    "data parallel": "Data parallel",
    "sweep": "Sweep",
    "memory": "Memory",
    "warm-up": "Warm-up",
    "ladder": "Not used",
    "kept for backward": "Kept for backward",
    "checkpointing": "Checkpointing",
    "precision": "Precision",
    "plan": "Plan",
    "noise": "Noise",
}
"""What findings are about, in their order, and in the page's words."""
_TOPIC_OF = {"parallel": "data parallel", "residuals": "kept for backward"}  # where an id begins with another word


@dataclass(frozen=True)
class Finding:
    """What one rule found: figures, and the sentence that says them."""

    topic: str  # a name in `TOPICS`
    sentence: str
    id: str  # which rule found what, as `gain.faster`
    figures: Mapping[str, Scalar]  # what the sentence is made from, units in the names


def found(id: str, template: str, **figures: Scalar) -> Finding:
    """A finding that says its figures: `{step_ms:ms}`, `{peak_gib:gib}`, `{names:list}`, `{rate:n}`, `{share:.0%}`."""
    topic = id.partition(".")[0]
    return Finding(_TOPIC_OF.get(topic, topic), _Figures().vformat(template, (), figures), id, figures)


def literal(text: str) -> str:
    """Text that is no template, for use in one."""
    return text.replace("{", "{{").replace("}", "}}")


def in_ms(value: object) -> str:
    """`12.3 ms`."""
    return f"{number(numeric(value))} ms"


def in_gib(value: float) -> str:
    """`1.23 GiB`, or MiB where that reads better."""
    return f"{value:,.2f} GiB" if value >= 1 else f"{number(value * 1024)} MiB"


def listed(names: Sequence[str], joined: str = "and") -> str:
    """`a, b and c`."""
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} {joined} {names[-1]}"


def percent(share: float) -> str:
    """`12%`, or `1.2%` below ten."""
    return f"{abs(share):.0%}" if abs(share) >= 0.1 else f"{abs(share):.1%}"


_WRITTEN: Mapping[str, Callable[[Any], str]] = {
    "ms": in_ms, "gib": in_gib, "n": number, "list": listed, "share": percent
}  # fmt: skip


class _Figures(Formatter):
    def format_field(self, value: Any, format_spec: str) -> str:
        return _WRITTEN[format_spec](value) if format_spec in _WRITTEN else str(format(value, format_spec))
