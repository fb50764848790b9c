"""Findings: a result of a rule, with its id, its figures, the sentence made of them, and what a card tells of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from string import Formatter
from typing import Any, Literal

from trainstep.base import advice
from trainstep.base.errors import printable
from trainstep.report.numbers import in_gib, in_ms, number, percent
from trainstep.rows.records import Scalar

TOPICS: Mapping[str, str] = {
    "gain": "Gain proven",
    "ratio": "Between runs",
    "loss": "Loss",
    "training": "Training",
    "script": "The script",
    "data": "Data wait",
    "waits": "Host waits",
    "ranks": "Ranks",
    "compiled": "Compiled again",
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
"""Topics of findings, in their order, and in the page's words."""
_TOPIC_OF = {
    "parallel": "data parallel",
    "residuals": "kept for backward",
    "fit": "checkpointing",
}  # where an id begins with another word


@dataclass(frozen=True)
class Claim:
    """A finding as a card tells it: in few words, with its stake, its evidence and its action.

    The stake is the time (`ms`) or the memory (`gib`) that the finding is about. No mend saves more. A finding whose
    stake is unknown has no card, unless it is an alarm.
    """

    said: str = ""  # a template over the finding's figures
    seen: tuple[str, ...] = ()  # tables or sections that show it; a card links to the first that the page has
    ms: float | None = None
    gib: float | None = None
    is_part: bool = True  # whether the stake is part of the step, or of its peak, so that a card gives its share
    severity: Literal["alarm", "cost", "aside"] = "cost"
    """An alarm comes before all else and makes it worthless. An aside has a card where few costs have."""
    action: advice.Line | Literal[""] | None = None
    """The line to write where no ladder tried a change that answers the finding; empty where the step has it."""

    @property
    def stake(self) -> float | None:
        """In ms, or of memory in GiB."""
        return self.ms if self.gib is None else self.gib


@dataclass(frozen=True)
class Finding:
    """A result of a rule. The terminal, the page and its cards tell it from here."""

    topic: str  # a name in `TOPICS`
    sentence: str
    id: str  # which rule found what, as `gain.faster`
    figures: Mapping[str, Scalar]  # what the sentence is made from, units in the names
    claim: Claim = Claim()


def found(id: str, template: str, claim: Claim | None = None, /, **figures: Scalar) -> Finding:
    """A finding that says its figures: `{step_ms:ms}`, `{peak_gib:gib}`, `{names:list}`, `{rate:n}`, `{share:.0%}`."""
    topic, claim = id.partition(".")[0], claim or Claim()
    if claim.stake is not None or claim.severity == "alarm":  # of an unknown stake the figures may be unknown, too
        claim = replace(claim, said=_say(claim.said, figures))
    return Finding(_TOPIC_OF.get(topic, topic), _say(template, figures), id, figures, claim)


def _say(template: str, figures: Mapping[str, Scalar]) -> str:
    return printable(_Figures().vformat(template, (), figures)).replace("\n", " ")


def literal(text: str) -> str:
    """Text that is no template, for use in one."""
    return text.replace("{", "{{").replace("}", "}}")


def listed(names: Sequence[str], joined: str = "and") -> str:
    """`a, b and c`."""
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} {joined} {names[-1]}"


_WRITTEN: Mapping[str, Callable[[Any], str]] = {
    "ms": in_ms, "gib": in_gib, "n": number, "list": listed, "share": percent
}  # fmt: skip


class _Figures(Formatter):
    def get_field(self, field_name: str, args: Any, kwargs: Any) -> Any:
        return kwargs[field_name], field_name  # a figure itself, never an attribute of one

    def format_field(self, value: Any, format_spec: str) -> str:
        if isinstance(value, tuple):
            format_spec = format_spec or "list"
        return _WRITTEN[format_spec](value) if format_spec in _WRITTEN else str(format(value, format_spec))
