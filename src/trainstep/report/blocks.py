"""Parts of a section of the page, which `page.html.jinja` writes; findings; and rows in words, with units."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trainstep.report.columns import Cell, median_cell
from trainstep.report.numbers import as_float, gib, number
from trainstep.report.tables import Table
from trainstep.rows.records import Row, Scalar


@dataclass(frozen=True)
class Chart:
    """A figure with its caption and, above it, its key."""

    name: str
    title: str
    caption: str
    plot: Callable[[], str]  # Draws it; called when the page is written
    legend: Sequence[tuple[str, str]] = ()
    """(swatch, meaning); a swatch is a role of `charts.ROLES`, or a class of the style sheet."""
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
    role: str  # of `charts.ROLES`, or "idle"


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
    """Breakdown of a step's time: bars to one scale, and the key to their colours."""

    title: str
    caption: str
    stacks: Sequence[Stack]
    legend: Sequence[tuple[str, str, str]]  # (role, name, time)


@dataclass(frozen=True)
class Card:
    """A card for one thing that matters: the claim, what is at stake, where that is seen, and what to do."""

    claim: str
    figure: str
    share: str
    sentence: str
    evidence: tuple[str, str]  # (anchor, its words)
    action: str = ""
    gain: float | None = None  # most that the step can become faster by it; None where the stake is no part of it


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


def section(name: str, short: str, title: str, lead: str, *blocks: Block | None) -> Section | None:
    """Make a section of the blocks that are there and, of charts, not empty; None where there are none."""
    there = [each for each in blocks if each is not None and (not isinstance(each, Charts) or each.charts)]
    return Section(name, short, title, lead, there) if there else None


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
