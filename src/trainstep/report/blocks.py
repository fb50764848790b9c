"""What a section of the page is made of; `page.html.jinja` writes each kind of block."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from trainstep.report.columns import Cell
from trainstep.report.tables import Table, TableRow

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
    """What the page's script stacks in it, with a slider for the detail; see `charts.allocations`."""


@dataclass(frozen=True)
class Charts:
    """Figures side by side where the screen is wide enough."""

    charts: Sequence[Chart]
    kind: str = field(default="charts", init=False)


@dataclass(frozen=True)
class Facts:
    """Names and values."""

    items: Sequence[tuple[str, Cell]]
    name: str = ""
    kind: str = field(default="facts", init=False)


@dataclass(frozen=True)
class Headline:
    """The first thing to read."""

    figure: Cell
    says: str
    detail: str
    stats: Sequence[tuple[str, str, str]]  # (name, value, note)
    kind: str = field(default="headline", init=False)


@dataclass(frozen=True)
class Flags:
    """Settings to paste."""

    flags: Sequence[str]
    says: str
    kind: str = field(default="flags", init=False)


@dataclass(frozen=True)
class Sentences:
    """What was found, by topic."""

    topics: Mapping[str, Sequence[str]]
    kind: str = field(default="sentences", init=False)


Block = Table | Charts | Facts | Headline | Flags | Sentences


@dataclass(frozen=True)
class Section:
    """A part of the page with its own heading."""

    name: str  # The anchor
    short: str  # In the navigation
    title: str
    lead: str
    blocks: Sequence[Block]


__all__ = [
    "Block",
    "Cell",
    "Chart",
    "Charts",
    "Facts",
    "Flags",
    "Headline",
    "Section",
    "Sentences",
    "Table",
    "TableRow",
]
