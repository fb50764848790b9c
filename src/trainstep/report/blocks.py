"""Parts of a section of the page, which `page.html.jinja` writes; findings; and rows in words, with units."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from string import Formatter
from typing import TYPE_CHECKING, Any, Literal

from trainstep.base import advice
from trainstep.base.errors import printable
from trainstep.report.columns import Cell, median_cell
from trainstep.report.numbers import as_float, gib, number, numeric, unit_of
from trainstep.report.tables import Table
from trainstep.rows.records import Row, Scalar

if TYPE_CHECKING:
    from bokeh.plotting import figure


@dataclass(frozen=True)
class Chart:
    """A figure with its caption and, above it, its key."""

    name: str
    title: str
    caption: str
    plot: Callable[[], figure]  # Draws it; called when the page is written
    legend: Sequence[tuple[str, str]] = ()
    """(swatch, meaning); a swatch is a role of `charts.COLOURS`, or a class of the style sheet."""
    allocations: Mapping[str, Any] | None = None
    """Data that the page's script stacks in it, with a slider for the detail; see `charts.allocations`."""


@dataclass(frozen=True)
class Charts:
    """Figures side by side where the screen is wide enough."""

    charts: Sequence[Chart]


@dataclass(frozen=True)
class Facts:
    """Names and values."""

    items: Sequence[tuple[str, Cell]]
    name: str = ""


@dataclass(frozen=True)
class Headline:
    """The first thing to read."""

    figure: Cell
    says: str
    detail: str
    stats: Sequence[tuple[str, str, str]]  # (name, value, note)
    confidence: str = ""  # how far the figure can be believed, in one line


@dataclass(frozen=True)
class Flags:
    """Settings to paste."""

    flags: Sequence[str]
    says: str
    name: str = "flags"  # its id on the page


@dataclass(frozen=True)
class Line:
    """A line of code for the user's script, and what it was measured to bring."""

    change: str
    code: str
    where: str
    gain: Cell


@dataclass(frozen=True)
class Advice:
    """Lines for the user's script."""

    says: str
    note: str
    lines: Sequence[Line]
    name: str = "lines"  # its id on the page

    @property
    def to_copy(self) -> str:
        """The lines, each below a comment that says what it is."""
        heads = [", ".join(filter(None, (each.gain.plain, each.where))) for each in self.lines]
        pairs = zip(self.lines, heads, strict=True)
        return "\n".join(f"# {each.change}: {head}\n{each.code}" for each, head in pairs)


@dataclass(frozen=True)
class Part:
    """A part of a bar: what a module took in one phase."""

    name: str
    ms: float
    role: str  # of `charts.COLOURS`, or "idle"


@dataclass(frozen=True)
class Stack:
    """A bar: a step's phases one after the other, each divided among modules where that was measured."""

    name: str
    time: str  # what it is drawn for, in words: the median of the step, or the kernels' sum
    phases: Mapping[str, Sequence[Part]]

    @property
    def total(self) -> float:
        """All parts together, in ms."""
        return sum(part.ms for parts in self.phases.values() for part in parts)


@dataclass(frozen=True)
class Breakdown:
    """Breakdown of a step's time: bars to one scale, the key to their colours, and the three largest parts in words."""

    title: str
    caption: str
    stacks: Sequence[Stack]
    legend: Sequence[tuple[str, str, str]]  # (role, name, time)
    costs: Sequence[tuple[str, str, str]]  # (time, what, share)


@dataclass(frozen=True)
class Card:
    """A card for one thing that matters: the claim, what is at stake, where that is seen, and what to do."""

    claim: str
    figure: str
    share: str
    sentence: str
    evidence: tuple[str, str]  # (anchor, its words)
    action: str = ""


@dataclass(frozen=True)
class Cards:
    """The largest first."""

    cards: Sequence[Card]
    is_alarm: bool = False  # told before all else


@dataclass(frozen=True)
class Sentences:
    """Findings as sentences, by topic; folded away below a line that says how many where cards stand above it."""

    topics: Mapping[str, Sequence[str]]
    is_folded: bool = False

    @property
    def count(self) -> int:
        """Number of sentences."""
        return sum(map(len, self.topics.values()))


Block = Table | Charts | Facts | Headline | Flags | Advice | Breakdown | Cards | Sentences


@dataclass(frozen=True)
class Section:
    """A part of the page with its own heading."""

    name: str  # The anchor
    short: str  # In the navigation
    title: str
    lead: str
    blocks: Sequence[Block]


TOPICS: Mapping[str, str] = {
    "gain": "Gain proven",
    "ratio": "Between runs",
    "loss": "Loss",
    "training": "Training",
    "script": "The script",
    "data": "Waiting for data",
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
    verdict: str = ""  # the one word for a step that this finding explains, as `DATA-BOUND`
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


def in_ms(value: object) -> str:
    """`12.3 ms`."""
    return f"{number(numeric(value))} ms"


def in_gib(value: float) -> str:
    """`1.23 GiB`, or MiB where that reads better."""
    return f"{value:,.2f} GiB" if unit_of(value)[0] == "GiB" else gib(value)


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
        if isinstance(value, tuple):
            format_spec = format_spec or "list"
        return _WRITTEN[format_spec](value) if format_spec in _WRITTEN else str(format(value, format_spec))


_UNITS = {"ms": "ms", "gib": "GiB", "tflops": "TFLOP/s", "tflop": "TFLOP", "mhz": "MHz", "w": "W", "c": "°C"}
_WORDS = {
    "parameters_gib": "Weights",
    "optimizer_state_gib": "Optimizer state",
    "peak_gib": "Peak",
    "tokens": "Tokens per step",
    "tokens_per_s": "Throughput",
    "forward_tflop": "Forward pass",
    "model_tflop": "Arithmetic per step",
    "achieved_tflops": "Achieved",
    "utilisation": "Of the device’s peak",
    "wait_ms": "Host waits",
    "batch_ms": "Next batch",
    "torch": "PyTorch",
    "trainstep": "trainstep",
    "cuda": "CUDA",
    "cudnn": "cuDNN",
    "capability": "Compute capability",
    "threads": "Host threads",
    "cores": "Host cores",
    "cpu": "CPU",
    "gpu_uuid": "GPU",
    "max_sm_clock_mhz": "Highest SM clock",
    "sm_clock_mhz": "SM clock",
}


def label(name: str) -> tuple[str, str]:
    """A column's name as words and unit: `device_memory_gib` → ("Device memory", "GiB")."""
    # The last word of a column's name is its unit, if it is one of the known and not the whole name.
    stem, _, suffix = name.rpartition("_")
    unit = _UNITS.get(suffix, "") if stem else ""
    words = (stem if unit else name).replace("_", " ")
    return _WORDS.get(name, words[:1].upper() + words[1:]), unit


def fact(name: str, value: Scalar) -> tuple[str, Cell]:
    """A column's name in words, and its value with the unit."""
    words, unit = label(name)
    if name == "utilisation":
        text = f"{(as_float(value) or 0) * 100:.3g}%"
    elif name == "tokens_per_s":
        text = f"{number(value)} tokens/s"
    else:
        text = gib(value) if unit == "GiB" else f"{number(value)} {unit}".rstrip()
    return words, Cell(text, value, name)


def facts_of(row: Row, names: Iterable[str]) -> list[tuple[str, Cell]]:
    """The values that the row has of these names."""
    return [fact(name, row.values[name]) for name in names if row.values.get(name) is not None]


def span(row: Row, phase: str) -> str:
    """A phase's median with its interval: `146 ms [138–152]`."""
    cell = median_cell(row, phase)
    return f"{cell.text} ms [{cell.low.text}–{cell.high.text}]" if cell.low and cell.high else f"{cell.text} ms"


def told_apart(row: Row, rows: Sequence[Row]) -> str:
    """The settings that tell a row from the others; of a row alone, its workload."""
    # Settings that all rows share would only make names longer.
    different = [name for name in row.case if len({each.case.get(name) for each in rows}) > 1]
    told = ", ".join(f"{name} {number(row.case[name])}" for name in different)
    return told or str(row.case.get("workload", "the step"))
