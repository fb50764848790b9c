"""A sweep: every case, and per axis a chart and a table, a line for every combination of all that else differs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from trainstep.report import columns
from trainstep.report.blocks import Section, section
from trainstep.report.columns import Cell, Column, interval_cell
from trainstep.report.findings import Finding, found, listed, literal
from trainstep.report.numbers import NONE, as_float, count, number, numeric, unit_of
from trainstep.report.tables import Definition, Table, TableRow, page_table, with_shapes
from trainstep.rows import SweepRow
from trainstep.rows.records import Row, Scalar, of_kind


@dataclass(frozen=True)
class Measure:
    """Value that a sweep's rows are compared by."""

    title: str
    value: str  # Its name in the row, ending in its unit
    unit: str = "ms"
    scale: float = 1.0  # How many of the unit one of the row's is

    def cell(self, row: SweepRow | None) -> Cell:
        """The row's value with its interval; why there is none; a dash where there is no row."""
        if row is None or row.status != "ok":
            return Cell(row.status if row else NONE)
        stem, _, unit = self.value.rpartition("_")
        return interval_cell(row, self.value, f"{stem}_low_{unit}", f"{stem}_high_{unit}", self._text)

    def _text(self, value: Scalar) -> str:
        return number(value * self.scale if isinstance(value, float) else value)


_TIMES = (("step", "step"), ("both", "forward and backward"), ("time", "call"))


@dataclass(frozen=True)
class Line:
    """The rows over an axis, all else equal."""

    settings: Mapping[str, Scalar]  # All else that differs within the sweep; empty where nothing does
    rows: Mapping[Scalar, SweepRow]  # Value on the axis → row

    @property
    def name(self) -> str:
        """`size small, batch 4`."""
        return named(self.settings) or "all cases"


@dataclass(frozen=True)
class Axis:
    """An axis of a sweep."""

    name: str
    values: Sequence[Scalar]  # Numbers ascending, names as the sweep's file has them
    lines: Sequence[Line]


def in_order(rows: Sequence[SweepRow]) -> list[SweepRow]:
    """The rows as the sweep's file orders its cases, whichever ended first."""
    return sorted(rows, key=lambda row: row.number or 0)


def settings_of(rows: Sequence[SweepRow]) -> list[str]:
    """The flags that the sweep's file sets, fixed ones too."""
    return list(dict.fromkeys(name for row in rows for name in row.flags))


def measures_of(rows: Sequence[SweepRow]) -> list[Measure]:
    """Measures that these rows have: a time, and peak memory."""
    predicted = "predicted " if is_predicted(rows) else ""
    times = [Measure(f"{predicted}{title}", f"{phase}_ms") for phase, title in _TIMES]
    largest = max((as_float(row.values.get("peak_gib")) or 0.0 for row in rows), default=0.0)
    memory = Measure(f"{predicted}peak memory", "peak_gib", *unit_of(largest, columns.COLUMN_GIB))
    has = {name for row in rows for name, value in row.values.items() if as_float(value) is not None}
    return [*[each for each in times if each.value in has][:1], *([memory] if memory.value in has else [])]


def is_predicted(rows: Sequence[SweepRow]) -> bool:
    """True if the rows are a plan's, which measured nothing."""
    return any(row.command == "plan" for row in rows)


def axes_of(rows: Sequence[SweepRow]) -> list[Axis]:
    """Every flag with more than one value."""
    ordered = in_order(rows)
    names = [name for name in settings_of(ordered) if len({row.case.get(name) for row in ordered}) > 1]
    return [_axis(name, [*(other for other in names if other != name), "row"], ordered) for name in names]


def _axis(name: str, others: Sequence[str], rows: Sequence[SweepRow]) -> Axis:
    values = list(dict.fromkeys(row.case.get(name) for row in rows))
    if None not in map(as_float, values):
        values.sort(key=numeric)
    found: dict[tuple[Scalar, ...], dict[Scalar, SweepRow]] = {}
    for row in rows:
        found.setdefault(tuple(row.case.get(other) for other in others), {})[row.case.get(name)] = row
    lines = [
        Line({other: value for other, value in zip(others, key, strict=True) if value is not None}, points)
        for key, points in found.items()
    ]
    return Axis(name, values, lines)


def named(settings: Mapping[str, Scalar]) -> str:
    """Settings in words; which row of its case it is goes without the word."""
    names = {name: "" if name == "row" else f"{name.replace('_', ' ')} " for name in settings}
    return ", ".join(f"{names[name]}{shown(value)}" for name, value in settings.items())


def shown(value: Scalar) -> str:
    """A setting as the user wrote it."""
    return f"{value:g}" if isinstance(value, float) else number(value)


def _columns(rows: Sequence[Row]) -> Sequence[Column]:
    swept = of_kind(rows, SweepRow)
    step = "predicted step (ms)" if is_predicted(swept) else "step (ms) [95 %]"
    return (
        Column("case", lambda row: count(row.values.get("number"))),
        columns.case("command", "command"),
        *(columns.case(name.replace("_", " "), name) for name in settings_of(swept)),
        Column("row", lambda row: str(row.case.get("row") or "")),
        Column("n", lambda row: count(row.values.get("n")), setting=True, brief=False),
        columns.median(step, "step"),
        columns.median("forward and backward (ms) [95 %]", "both"),
        columns.median("call (ms) [95 %]", "time"),
        *columns.values({"tokens/s": "tokens_per_s", "peak (GiB)": "peak_gib"}),
        columns.value("case took (s)", "case_s", brief=False),
        Column("folder in cases/", lambda row: str(row.values.get("folder", "")), brief=False),
        columns.OUTCOME,
    )


TABLES = (Definition(SweepRow, "The sweep: one row per case, or per row of a case that measures several", _columns),)


def axis_tables(records: Sequence[Row]) -> list[Table]:
    """A table per axis and measure that the rows have."""
    rows = in_order(of_kind(records, SweepRow))
    return [axis_table(axis, measure) for axis in axes_of(rows) for measure in measures_of(rows)]


DERIVED = (axis_tables,)


def axis_table(axis: Axis, measure: Measure) -> Table:
    """A sweep's measured values over one axis: a line per combination of all else, a column where those are few."""
    name = axis.name.replace("_", " ")
    values = [shown(value) for value in axis.values]
    cells = [[measure.cell(line.rows.get(value)) for value in axis.values] for line in axis.lines]
    lines = [line.name for line in axis.lines]
    if len(values) > len(lines):
        heads, titles, cells = values, [name, *lines], [list(column) for column in zip(*cells, strict=True)]
    else:
        heads, titles = lines, ["", *(f"{name} {value}" for value in values)]
    interval = " [95 %]" if measure.unit == "ms" else ""
    caption = f"{measure.title[:1].upper()}{measure.title[1:]} by {name}, {measure.unit}{interval}"
    sizes = [str(row.case.get("size")) for line in axis.lines for row in line.rows.values()]
    return Table(
        with_shapes(caption, sizes),
        titles,
        [TableRow([Cell(head, is_text=True), *row], head) for head, row in zip(heads, cells, strict=True)],
        f"{'memory' if measure.value == 'peak_gib' else 'sweep'}-by-{axis.name.replace('_', '-')}",
    )


_PLURAL = {"device": "devices", "threads": "numbers of threads", "torch": "versions of torch", "commit": "commits"}
"""Parts of the environment that make times differ, where they differ."""


def findings(records: Sequence[Row]) -> Iterator[Finding]:
    """Rows without a result, and rows of different environments."""
    rows = in_order(of_kind(records, SweepRow))
    lacking = Counter(row.status for row in rows if row.status != "ok")
    if lacking:
        counts = listed([f"{times} {status}" for status, times in lacking.items()])
        logs = " Their words are in stderr.txt of their folders below cases/." if lacking["failed"] else ""
        said = f"Of {{rows}} rows, {{without_result}} have no result: {counts}.{logs}"
        yield found("sweep.without-result", said, rows=len(rows), without_result=lacking.total())
    for name in _PLURAL:
        if name == "threads" and len({row.flags.get("processes") for row in rows}) > 1:
            continue  # processes that torchrun starts share the cores: that is what was swept
        values = tuple(dict.fromkeys(str(row.environment[name]) for row in rows if name in row.environment))
        if len(values) > 1:
            what = f"{_PLURAL[name]} {listed([value[:12] if name == 'commit' else value for value in values])}"
            said = "The rows were measured with different "
            said += f"{literal(what)}: compare their times with care, or sweep anew."
            yield found("sweep.environments", said, **{name: values})


RULES = (findings,)


def sweep(records: Sequence[Row]) -> Section | None:
    """All cases of a sweep, where there are any."""
    rows = in_order(of_kind(records, SweepRow))
    failed = sum(row.status != "ok" for row in rows)
    says = "times are predictions" if is_predicted(rows) else "brackets are 95 % intervals of the median"
    lead = (
        f"Each case ran in a process of its own: {len(rows)} rows, {failed} without a result. A table by one "
        f"setting has the combinations of all others; {says}."
    )
    return section("sweep", "Sweep", "The sweep", lead, *axis_tables(rows), page_table(TABLES[0], rows))


SECTIONS = (sweep,)
