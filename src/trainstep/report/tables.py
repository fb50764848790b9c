"""Tables: rows under the columns of a definition, ready to be written to files, the terminal or the page."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any, Literal

from trainstep.base.config import SHAPE_TITLE, shape_of
from trainstep.base.errors import printable
from trainstep.report.columns import Cell, Column, outcome_cell
from trainstep.rows.records import Row, of_kind

if TYPE_CHECKING:
    import pandas

Place = Literal["files", "terminal", "page"]

LONGEST = 1000
"""Rows of a table on the page."""
_NUMBER = re.compile(r"[-−]?[\d,.]+(e-?\d+)?|–|")
_SHORT = 12  # Words up to this long are set like numbers, in a narrow column


@dataclass(frozen=True)
class TableRow:
    """A row of a table."""

    cells: Sequence[Cell]  # The first is the row's header
    key: str = ""  # Tells rows apart for a program that reads the page, in `data-row`
    is_strong: bool = False


@dataclass(frozen=True)
class Table:
    """A titled table. Programs should read the rows' values: cells carry them, rounded only in their text."""

    caption: str
    columns: Sequence[str]
    rows: Sequence[TableRow]
    name: str = ""  # File name without ending, and the page's `data-table`

    def texts(self) -> list[tuple[str, ...]]:
        """The cells' texts, row by row, safe to print."""
        return [tuple(printable(cell.plain) for cell in row.cells) for row in self.rows]

    def frame(self) -> pandas.DataFrame:
        """A pandas frame of strings."""
        import pandas

        return pandas.DataFrame(self.texts(), columns=[printable(title) for title in self.columns])


@dataclass(frozen=True)
class Definition:
    """Contents of a table of one kind of row, wherever it is shown."""

    kind: type[Row]
    caption: str | Callable[[Sequence[Row]], str]
    """The caption, or what makes it of the rows."""
    columns: Sequence[Column] | Callable[[Sequence[Row]], Sequence[Column]]
    """The columns, or what makes them of the rows."""
    key: Callable[[Row], str] | None = None  # A row's `data-row` on the page; by default its place
    is_strong: Callable[[Row], bool] | None = None  # Whether the page sets a row in bold
    longest: int | None = None  # Rows that the terminal shows; files have all
    name: str = ""  # By default the kind's, with hyphens


def define(
    kind: type[Row], caption: str | Callable[[Sequence[Row]], str], *columns: Column, **options: Any
) -> Definition:
    """A definition of these columns, with the other fields of `Definition` as options."""
    return Definition(kind, caption, columns, **options)


def make_table(definition: Definition, rows: Sequence[Row], place: Place = "files", *, name: str = "") -> Table:
    """The table of rows of one kind.

    Args:
        definition: its caption and columns.
        rows: of the definition's kind.
        place: where it is shown.
        name: instead of the definition's.
    """
    columns, key, is_strong = definition.columns, definition.key, definition.is_strong
    name = name or definition.name or definition.kind.kind.replace(" ", "-")
    caption = definition.caption(rows) if callable(definition.caption) else definition.caption
    limit = {"terminal": definition.longest, "page": LONGEST}.get(place) or len(rows)
    shown = rows[:limit]
    table = tabulate(name, caption, columns(rows) if callable(columns) else columns, shown, place)
    lines = [
        replace(line, key=key(row) if key else str(index), is_strong=is_strong is not None and is_strong(row))
        for index, (line, row) in enumerate(zip(table.rows, shown, strict=True))
    ]
    where = {"terminal": f"tables/{table.name}.csv"}.get(place, "results.jsonl")
    rest = f"; the first {limit:,} of {len(rows):,} rows, the others in {where}" if len(rows) > limit else ""
    return replace(table, caption=table.caption + rest, rows=lines)


def page_table(definition: Definition, records: Sequence[Row], name: str = "") -> Table | None:
    """Make the page's table of those of the records that are of its kind; None where there are none."""
    rows = of_kind(records, definition.kind)
    return make_table(definition, rows, "page", name=name) if rows else None


def tabulate(name: str, caption: str, columns: Sequence[Column], rows: Sequence[Row], place: Place = "files") -> Table:
    """The rows' cells under the given columns, without the empty ones; shared settings move to the caption.

    The settings of a single row are columns in a file, where they are looked for. In a terminal they would leave too
    little width for what was measured: only the first stays, and the outcome of a row that failed.
    """
    made = {
        column: [column.of(row) for row in rows]
        for column in (each.in_unit(rows) for each in columns)
        if (column.page if place == "page" else column.files and (column.brief or place == "files"))
    }
    shown = {column: cells for column, cells in made.items() if {cell.plain for cell in cells} - {"–", ""}}
    common = {
        column: cells[0].plain
        for column, cells in shown.items()
        if column.setting and len({cell.plain for cell in cells}) == 1
    }
    if len(rows) == 1:
        is_ok, moved = rows[0].status == "ok", list(common.items())[1:] if place == "terminal" else []
        common = {column: text for column, text in moved if column.title != "outcome" or is_ok}
    kept = {column: cells for column, cells in shown.items() if column not in common}
    stated = ", ".join(f"{column.title} {text}" for column, text in common.items() if text != "ok")
    aligned = [_aligned(cells) for cells in kept.values()]
    sizes = (cell for cells in shown.values() for cell, row in zip(cells, rows, strict=True) if _is_size(cell, row))
    return Table(
        caption=with_shapes(f"{caption} ({stated})" if stated else caption, (cell.plain for cell in sizes)),
        columns=[column.title for column in kept],
        rows=[TableRow(cells) for cells in zip(*aligned, strict=True)],
        name=name,
    )


def _is_size(cell: Cell, row: Row) -> bool:
    """True if a cell names one of our models. Of a user's own a row has no context, and its function's name may be
    like a size's."""
    return cell.name in ("workload", "size") and getattr(row, "context", 0) is not None


def with_shapes(caption: str, names: Iterable[str]) -> str:
    """The caption with the shape of each built-in model among these names, of which commas may join several: the names
    say little, and differ by year."""
    shapes = {name: shape for joined in names for name in joined.split(",") if (shape := shape_of(name))}
    told = ", ".join(f"{name} {shape}" for name, shape in shapes.items())
    return f"{caption}; {SHAPE_TITLE}: {told}" if told else caption


def text_table(name: str, caption: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """A table of texts that are not one row's values each."""
    cell = cache(Cell)  # most texts of a long table are the same
    aligned = [_aligned([*map(cell, texts)]) for texts in zip(*rows, strict=True)]
    return Table(caption, columns, [TableRow(cells, cells[0].text) for cells in zip(*aligned, strict=True)], name)


def outcome_table(caption: str, what: str, row: Row) -> Table:
    """Reasons why cases have no tables of their own."""
    return Table(caption, ["Step", "Outcome"], [TableRow([Cell(what, is_text=True), outcome_cell(row)])])


def _aligned(cells: Sequence[Cell]) -> Sequence[Cell]:
    """The cells of a column, set as words where one of them is long and not all are numbers."""
    texts = [cell.text for cell in cells]
    is_text = max(map(len, texts), default=0) > _SHORT and not all(map(_NUMBER.fullmatch, texts))
    return [replace(cell, is_text=True) if is_text and cell.is_text is None else cell for cell in cells]
