"""Rows: one measured case each, written as a line of JSON the moment it is known.

Every kind of row is a frozen dataclass in `trainstep.kinds`. Its fields are the case (what was run, made with
`setting()`: the fields by which rows of two files are matched) and the values (what was measured, with the unit at the
end of the name). Beside them every row has samples, the environment, and a status with a reason, so that a failure is a
row like any other.

On disk a row is one JSON object with a section for each of these (case, values, samples, series, environment). A field
that is None is not written.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar, get_args

from trainstep.errors import UsageError
from trainstep.stats import Summary

if TYPE_CHECKING:
    import pandas

Scalar = str | int | float | bool | None | tuple[str, ...]
"""What a column of a row holds: a number, a word, or several words."""
Status = Literal["ok", "out of memory", "unsupported", "wrong", "failed"]

SECTIONS = ("case", "values", "samples", "series", "environment")


def setting(default: Any = MISSING) -> Any:
    """A field that belongs to the case of a row; without a default it must be given."""
    return field(default=default, metadata={"section": "case"})


def further(section: str) -> Any:
    """A field that is a mapping of further columns of "case" or "values", whose names are not known beforehand."""
    return field(default_factory=dict, metadata={"section": section, "open": True})


@dataclass(frozen=True)
class Times:
    """Milliseconds of one phase: the median with its 95 % interval (None below 6 samples), and how they spread."""

    median: float
    low: float | None = None
    high: float | None = None
    mean: float | None = None
    std: float | None = None
    min: float | None = None
    max: float | None = None
    outliers: int | None = None

    @staticmethod
    def of(summary: Summary, *, spread: bool = True) -> Times:
        """The summary of milliseconds; without `spread` the median and its interval alone."""
        low, high = (summary.interval.low, summary.interval.high) if summary.interval else (None, None)
        if not spread:
            return Times(summary.median, low, high)
        std = None if math.isnan(summary.std) else summary.std
        return Times(summary.median, low, high, summary.mean, std, summary.min, summary.max, summary.outliers)


_TIME_COLUMNS = {
    "low": "low_ms", "high": "high_ms", "mean": "mean_ms", "std": "std_ms", "min": "min_ms", "max": "max_ms",
    "outliers": "outliers", "median": "ms",
}  # fmt: skip
"""Field of `Times` → the ending of its column; the shortest ending last."""


def times() -> Any:
    """A field that maps phases to `Times`; each is a set of columns `PHASE_ms`, `PHASE_low_ms` … of the row."""
    return field(default_factory=dict, metadata={"section": "values", "times": True})


@dataclass(frozen=True, kw_only=True)
class Row:
    """What rows of every kind have."""

    kind: ClassVar[str]
    """The name of the kind in files."""

    samples: Mapping[str, Sequence[float]] = field(default_factory=dict, metadata={"section": "samples"})
    """The single measurements behind the values, in the order they were taken."""
    status: Status = field(default="ok", metadata={"section": ""})
    """Whether the case ran, and if not, why not."""
    reason: str = field(default="", metadata={"section": ""})
    """One line, empty where the status is ok."""
    environment: Mapping[str, Scalar] = field(default_factory=dict, metadata={"section": "environment"})
    """Machine, versions, commit, date."""
    series: Mapping[str, Sequence[Scalar]] = field(default_factory=dict, metadata={"section": "series"})
    """Columns too long for values of their own, such as a timeline's events; which belong together, the kind says."""

    @cached_property
    def case(self) -> Mapping[str, Scalar]:
        """The settings by name, those that are None left out."""
        return {name: value for name, value in self._fields("case") if value is not None}

    @cached_property
    def values(self) -> Mapping[str, Scalar]:
        """What was measured by name, with a column for every part of `Times`; what is None is left out."""
        return {name: value for name, value in self._fields("values") if value is not None}

    def _fields(self, section: str) -> Iterable[tuple[str, Any]]:
        for each in dataclasses.fields(self):
            if each.metadata.get("section", "values") != section:
                continue
            value = getattr(self, each.name)
            if "times" in each.metadata:
                for phase, timed in value.items():
                    yield from ((f"{phase}_{end}", getattr(timed, part)) for part, end in _TIME_COLUMNS.items())
            elif "open" in each.metadata:
                yield from value.items()
            else:
                yield each.name, value


AnyRow = TypeVar("AnyRow", bound=Row)


@cache
def _layout(kind: type[Row]) -> tuple[dict[str, str], str | None, dict[str, str]]:
    """Of a kind: the section of each plain field, the field that holds `Times`, and by section the open one."""
    fields = dataclasses.fields(kind)
    plain = {each.name: each.metadata.get("section", "values") for each in fields if not each.metadata.keys() & _SPREAD}
    times_field = next((each.name for each in fields if "times" in each.metadata), None)
    return plain, times_field, {each.metadata["section"]: each.name for each in fields if "open" in each.metadata}


_SPREAD = {"times", "open"}


def make_row(kind: type[AnyRow], case: Mapping[str, Any], values: Mapping[str, Any], **rest: Any) -> AnyRow:
    """A row of this kind from its columns, as a file has them.

    Args:
        kind: a class of `trainstep.kinds`.
        case, values: columns by name; `Times` as `PHASE_ms`, `PHASE_low_ms` …
        rest: samples, series, environment, status, reason.

    Raises:
        ValueError: a column that the kind does not have, or one that is missing.
    """
    plain, times_field, open_fields = _layout(kind)  # type: ignore[arg-type]  # classes are hashable
    found: dict[str, Any] = {name: {} for name in open_fields.values()}
    timed: dict[str, dict[str, Any]] = {}
    for section, columns in (("case", case), ("values", values)):
        for name, value in columns.items():
            part = _part_of_times(name) if times_field is not None and section == "values" else None
            if plain.get(name) == section:
                found[name] = tuple(value) if isinstance(value, list) else value
            elif part is not None and (part[1] == "median" or f"{part[0]}_ms" in columns):
                timed.setdefault(part[0], {})[part[1]] = value
            elif section in open_fields:
                found[open_fields[section]][name] = value
            else:
                raise ValueError(f"a row of kind {kind.kind!r} has no {name!r} among its {section}")
    if times_field is not None:
        found[times_field] = {phase: Times(**parts) for phase, parts in timed.items() if parts["median"] is not None}
    missing = [each.name for each in dataclasses.fields(kind) if _is_required(each) and each.name not in found]
    if missing:
        raise ValueError(f"a row of kind {kind.kind!r} lacks {missing[0]!r} in its case")
    return kind(**found, **rest)


def _is_required(each: dataclasses.Field[Any]) -> bool:
    return each.default is MISSING and each.default_factory is MISSING


def _part_of_times(name: str) -> tuple[str, str] | None:
    """The phase and the field of `Times` of a column such as `forward_low_ms`."""
    for part, end in _TIME_COLUMNS.items():
        if name.endswith(f"_{end}"):
            return name.removesuffix(f"_{end}"), part
    return None


class RecordWriter:
    """Writes rows to a JSON Lines file, each flushed at once: what was measured survives whatever comes after.

    A file already there is kept as `NAME.previous.jsonl`, ready for `trainstep compare`.

    Raises:
        UsageError: the folder or the file cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.exists():
                path.replace(path.with_suffix(".previous.jsonl"))
            self._file = path.open("w", encoding="utf-8")
        except OSError as error:
            raise UsageError(f"cannot write {path}: {error.strerror}; choose another folder with --out") from error

    def write(self, row: Row) -> None:
        """Append one row."""
        self._file.write(json.dumps(_jsonable(as_json(row)), ensure_ascii=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def as_json(row: Row) -> dict[str, Any]:
    """The row as its line in a file."""
    sections = {name: dict(getattr(row, name)) for name in SECTIONS}
    return {"kind": row.kind, **sections, "status": row.status, "reason": row.reason}


def write_whole(path: Path, rows: Iterable[Row]) -> None:
    """Write rows so that the file appears with all of them or not at all, whenever the process is killed.

    Raises:
        UsageError: the folder or the file cannot be written.
    """
    draft = path.with_name(f".{path.name}")
    draft.unlink(missing_ok=True)
    writer = RecordWriter(draft)
    for row in rows:
        writer.write(row)
    writer.close()
    draft.replace(path)


def _jsonable(value: Any) -> Any:
    """Six significant digits, more than any clock here has; NaN and infinity, which JSON lacks, as null."""
    if isinstance(value, dict):
        return {key: _jsonable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_jsonable(item) for item in value]
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    return value


def read_records(path: Path) -> list[Row]:
    """All rows of a file; those of earlier versions as they would be written today.

    Raises:
        UsageError: no such file, or a line that is no row (the message names the line).
    """
    from trainstep.kinds import rows_of  # the kinds are made of what this module defines

    if path.is_dir():
        raise UsageError(f"{path} is a folder; expected its {path / 'results.jsonl'}")
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read results from {path}: {error}") from error
    rows: list[Row] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            rows += rows_of(**_parsed(line))
        except ValueError as error:
            raise UsageError(
                f"{path}, line {number}: {error}; expected a row of a trainstep run. "
                "If the file was cut short, delete that line to use the rest"
            ) from error
    if not rows:
        raise UsageError(f"{path} holds no results; expected the results.jsonl of a trainstep run")
    return rows


def _parsed(line: str) -> dict[str, Any]:
    """The line as the arguments of `kinds.rows_of`."""
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON ({error.msg})") from error
    if not isinstance(row, dict) or not {"kind", "case"} <= set(row) <= {"kind", "status", "reason", *SECTIONS}:
        raise ValueError("not a row")
    if any(not isinstance(row.get(name, {}), dict) for name in SECTIONS) or not isinstance(row["kind"], str):
        raise ValueError("a row with a section of the wrong type")
    if row.get("status", "ok") not in get_args(Status):
        raise ValueError(f"unknown status {row['status']!r}")
    return row


def of_kind(rows: Iterable[Row], kind: type[AnyRow]) -> list[AnyRow]:
    """The rows of one kind, in order."""
    return [row for row in rows if isinstance(row, kind)]


def by_case(rows: Iterable[AnyRow], *without: str) -> list[list[AnyRow]]:
    """The rows grouped by their cases, in order; settings named in `without` do not count."""
    groups: dict[tuple[tuple[str, Scalar], ...], list[AnyRow]] = {}
    for row in rows:
        told = tuple((name, value) for name, value in row.case.items() if name not in without)
        groups.setdefault(told, []).append(row)
    return list(groups.values())


def belonging(rows: Iterable[Row], kind: type[AnyRow], head: Row) -> list[AnyRow]:
    """The rows of one kind whose cases only add to that of `head`: the parts of what it is about."""
    return [row for row in of_kind(rows, kind) if head.case.items() <= row.case.items()]


def frame(rows: Iterable[Row]) -> pandas.DataFrame:
    """One tidy row per row: kind, case, values, status, reason, environment. Samples stay in the rows."""
    import pandas

    return pandas.DataFrame(
        [
            {"kind": row.kind, **row.case, **row.values}
            | {"status": row.status, "reason": row.reason, **row.environment}
            for row in rows
        ]
    )
