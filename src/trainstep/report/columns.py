"""Cells and columns: how a row's values become the cells of a table, once for every place a table is shown in.

A cell carries its text, the raw value with its name, the interval and a tone. Files, the terminal and the page are
written from the same cells (`tables`, `formats`, `html`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from trainstep.base.config import CASE, settings_with
from trainstep.base.stats import WITHIN_RUN
from trainstep.report import numbers
from trainstep.report.numbers import as_float, number, typeset, unit_of
from trainstep.rows.records import Row, Scalar

COLUMN_GIB = 0.1
"""A column of sizes is in MiB where its largest is below this."""

INTERVAL = f"95 % interval {WITHIN_RUN}"
"""Name in sentences for the interval of a ratio that one run a side gave."""


@dataclass(frozen=True)
class Cell:
    """A value: as text for the reader, and as it is in the row for a program that reads the page."""

    text: str
    value: Scalar = None  # Written to the page's `data-value`; None writes none
    name: str = ""  # The row's name of it, in `data-column`
    low: Cell | None = None
    high: Cell | None = None
    of: Cell | None = None  # What the value is a part of; on the page alone
    note: str = ""  # Smaller, on a line of its own; on the page alone
    tone: Literal["", "good", "bad", "quiet"] = ""
    is_text: bool | None = None  # Set as words, not as a number; None: as the column's other cells are
    in_files: str | None = None  # The text outside of the page, where it is another

    @property
    def typeset(self) -> str:
        """The text as the page shows it, where the value is a number with a true minus sign and powers of ten."""
        return self.text if as_float(self.value) is None else typeset(self.text)

    @property
    def raw(self) -> str:
        """The value as the page's `data-value`."""
        return ", ".join(map(str, self.value)) if isinstance(self.value, tuple) else str(self.value)

    @property
    def plain(self) -> str:
        """The text with its interval, for files and the terminal."""
        if self.in_files is not None:
            return self.in_files
        return f"{self.text} [{self.low.text}–{self.high.text}]" if self.low and self.high else self.text


@dataclass(frozen=True)
class Column:
    """A column of a table."""

    title: str  # Header, with the unit
    cell: Callable[[Row], Cell | str]  # One row's cell
    brief: bool = True  # Whether the terminal shows it
    setting: bool = False  # Whether it says what was run: when it is the same in several rows, it moves to the caption
    files: bool = True  # Whether files (and the terminal, if brief) have it
    page: bool = True  # Whether the page shows it
    in_mib: Callable[[Row], Cell] | None = None  # Of a title that ends in `(GiB)`: one row's cell in MiB

    def in_unit(self, rows: Sequence[Row]) -> Column:
        """The column for these rows: in MiB where no size reaches `COLUMN_GIB`."""
        if self.in_mib is None:
            return self
        largest = max((as_float(self.of(row).value) or 0.0 for row in rows), default=0.0)
        if not largest or unit_of(largest, COLUMN_GIB)[0] == "GiB":
            return self
        return replace(self, title=self.title.replace("(GiB)", "(MiB)"), cell=self.in_mib)

    def of(self, row: Row) -> Cell:
        """The cell of a row."""
        found = self.cell(row)
        return found if isinstance(found, Cell) else Cell(found)


def value_cell(row: Row, name: str, text: Callable[[Scalar], str] = number) -> Cell:
    """Cell of one of the row's values."""
    value = row.values.get(name)
    return Cell(text(value), value, name)


def interval_cell(row: Row, name: str, low: str, high: str, text: Callable[[Scalar], str] = number) -> Cell:
    """Cell of one of the row's values, with the interval that two others are."""
    cell = value_cell(row, name, text)
    has_interval = low in row.values and high in row.values
    return replace(cell, low=value_cell(row, low, text), high=value_cell(row, high, text)) if has_interval else cell


def median_cell(row: Row, phase: str) -> Cell:
    """The median of a phase with its 95 % interval."""
    return interval_cell(row, f"{phase}_ms", f"{phase}_low_ms", f"{phase}_high_ms")


def ratio_cell(row: Row, name: str) -> Cell:
    """A ratio with its interval: `1.34× [1.30–1.38]`."""
    found = interval_cell(row, name, f"{name}_low", f"{name}_high")
    return found if found.value is None else replace(found, text=f"{found.text}×")


def value(title: str, name: str, digits: int = 3, brief: bool = True, *, scale: float = 1, page: bool = True) -> Column:
    """Column of one of the row's values; a share in per cent where the title ends in `(%)`, a small size in MiB."""

    def scaled(factor: float) -> Callable[[Row], Cell]:
        def text(value: Scalar) -> str:
            return number(value * factor if isinstance(value, float) and factor != 1 else value, digits)

        return lambda row: value_cell(row, name, text)

    in_mib = scaled(1024) if title.endswith("(GiB)") else None
    return Column(title, scaled(100 if title.endswith("(%)") else scale), brief, page=page, in_mib=in_mib)


def count(title: str, name: str, brief: bool = True, *, page: bool = True) -> Column:
    """Column of one of the row's values that says how many."""
    return Column(title, lambda row: value_cell(row, name, numbers.count), brief, page=page)


COUNTED = Column("n", lambda row: number(row.values.get("n")), setting=True)
"""Number of samples that a time is of."""


def case(title: str, name: str) -> Column:
    """Column of one of the settings that identify the case."""

    def cell(row: Row) -> Cell:
        value = row.case.get(name)
        return Cell(f"{value:g}" if isinstance(value, float) else number(value), value, name)

    return Column(title, cell, setting=True)


def issue_apart(rows: Sequence[Row]) -> str:
    """Note on passes whose launches are told apart from their times."""
    is_known = any(row.values.get("issue_ms") is not None for row in rows)
    return ", as often as hides the host’s launches (“issue”) where that can be" if is_known else ""


def values(names: Mapping[str, str], digits: int = 3, **shown: bool) -> list[Column]:
    """`value` for each title and name."""
    return [value(title, name, digits, **shown) for title, name in names.items()]


def cases(names: Mapping[str, str]) -> list[Column]:
    """`case` for each title and name."""
    return [case(title, name) for title, name in names.items()]


def named(*names: str) -> list[Column]:
    """`case` for each name, which is its title too."""
    return [case(name, name) for name in names]


def word(title: str, name: str, *, page: bool = True) -> Column:
    """A setting or a value that is a word: set as one however short, and a column even where all rows have the same."""

    def cell(row: Row) -> Cell:
        value = row.case.get(name, row.values.get(name))
        return Cell(number(value), value, name, is_text=True)

    return Column(title, cell, page=page)


def words(names: Mapping[str, str]) -> list[Column]:
    """`word` for each title and name."""
    return [word(title, name) for title, name in names.items()]


def median(title: str, phase: str) -> Column:
    """The median with its 95 % interval."""
    return Column(title, lambda row: median_cell(row, phase))


def mean(title: str, phase: str) -> Column:
    """Mean ± standard deviation."""

    def cell(row: Row) -> Cell:
        mean, std = row.values.get(f"{phase}_mean_ms"), row.values.get(f"{phase}_std_ms")
        text = number(mean) if std is None else f"{number(mean)} ± {number(std, 2)}"
        return Cell(text, mean, f"{phase}_mean_ms")

    return Column(title, cell, brief=False)


def ratio(title: str, name: str, brief: bool = True, *, between_runs: bool = False) -> Column:
    """A ratio with its interval; the title says where that is true within one run alone."""
    where = "" if between_runs else f", {WITHIN_RUN}"
    return Column(f"{title} [95 %{where}]", lambda row: ratio_cell(row, name), brief)


def files_only(column: Column) -> Column:
    """The column, not shown on the page."""
    return replace(column, page=False)


def outcome_cell(row: Row) -> Cell:
    """ok, or the status with its reason."""
    if row.status == "ok":
        return Cell("ok", is_text=True)
    return Cell(row.status, note=row.reason, tone="bad", is_text=True, in_files=f"{row.status}: {row.reason}")


OUTCOME = Column("outcome", outcome_cell, setting=True)

_TITLES = {"loss": "loss kind", "optimizer": "optimizer kind"}
SETTINGS = (
    case("workload", "workload"),
    *(case(_TITLES.get(name, name), name) for name in settings_with(CASE)),
)  # How the step was taken, for rows that have `StepSettings`
