"""Rows on disk: JSON Lines, each line written the moment its row is known; and how rows are picked out of a list."""

from __future__ import annotations

import contextlib
import gc
import json
import math
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Any

from trainstep.base.errors import UsageError
from trainstep.base.files import aside, cannot_write, parse_line, read_lines
from trainstep.rows import row_of
from trainstep.rows.row import AnyRow as AnyRow
from trainstep.rows.row import Row as Row
from trainstep.rows.row import Scalar as Scalar
from trainstep.rows.row import Status as Status
from trainstep.rows.row import Times as Times
from trainstep.rows.row import make_row as make_row

if TYPE_CHECKING:
    import pandas

SECTIONS = ("case", "values", "samples", "series", "environment")
_SECTIONS, _NEEDED, _KNOWN = {*SECTIONS}, {"kind", "case"}, {*SECTIONS, "kind", "status", "reason"}


@dataclass(frozen=True)
class SoFar:
    """Rows of measurements that go on: each stands until a row of its kind and case, or another `SoFar`, replaces it.

    What reads the file meanwhile, or after the run was killed, sees ordinary rows of fewer rounds.
    """

    rows: Sequence[Row]


class RecordWriter:
    """Writes rows to a JSON Lines file, each at once: what was measured survives whatever comes after.

    With the first row, and not before, a file already there becomes `NAME.previous.jsonl`, ready for `trainstep
    compare`; until then the rows are in a draft.

    Raises:
        UsageError: the folder or the file cannot be written. The rows before are whole.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._written: list[Row] = []
        self._so_far: list[Row] = []
        self._draft = path.with_name(f".draft-{secrets.token_hex(8)}-{path.name}")
        with self._said():
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._draft.open("xb", buffering=0)

    @property
    def rows(self) -> list[Row]:
        """Rows of the file."""
        return [*self._written, *self._so_far]

    def write(self, row: Row | SoFar) -> None:
        """Append one row; or replace those that stand so far, the file changing as a whole."""
        with self._said():
            if isinstance(row, SoFar):
                self._replace(self._written, list(row.rows))
            elif self._so_far:
                others = [each for each in self._so_far if (each.kind, each.case) != (row.kind, row.case)]
                self._replace([*self._written, row], others)
            else:
                self._append(row)

    def close(self) -> None:
        """Close the file."""
        self._file.close()
        if not self.rows:
            self._draft.unlink(missing_ok=True)

    def _append(self, row: Row) -> None:
        end = self._file.tell()
        try:
            write_all(self._file, _line(row))
        except OSError:
            self._file.truncate(end)  # half a line would make the others unreadable
            self._file.seek(end)
            raise
        self._put_in_place()
        self._written.append(row)

    def _replace(self, written: list[Row], so_far: list[Row]) -> None:
        if not (rows := [*written, *so_far]):
            return
        with aside(self.path, self._advice) as draft:
            _write_new(draft, rows)
            self._keep_previous()
        self._file.close()
        self._draft.unlink(missing_ok=True)
        self._file = self.path.open("ab", buffering=0)
        self._written, self._so_far = written, so_far

    def _put_in_place(self) -> None:
        """Give the draft its name; once it has, there is none. The first time, what was there is kept."""
        if self._draft.exists():
            self._keep_previous()
            self._draft.replace(self.path)

    def _keep_previous(self) -> None:
        if not self.rows and self.path.exists() and self.path.stat().st_size:
            self.path.replace(self.path.with_suffix(".previous.jsonl"))

    @contextlib.contextmanager
    def _said(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise cannot_write(self.path, error, self._advice) from error

    @property
    def _advice(self) -> str:
        kept = f"the {len(self.rows)} rows before are there; " if self.rows else ""
        return f"{kept}choose another folder with --out"


def write_whole(path: Path, rows: Iterable[Row]) -> None:
    """Write rows so that the file appears with all of them or not at all, whenever the process is killed.

    Raises:
        UsageError: the folder or the file cannot be written.
    """
    with aside(path) as draft:
        _write_new(draft, rows)


def _write_new(path: Path, rows: Iterable[Row]) -> None:
    with path.open("xb", buffering=0) as file:
        for row in rows:
            write_all(file, _line(row))


def _line(row: Row) -> bytes:
    line = sections_of(row)
    text = json.dumps(line, ensure_ascii=False)
    # Half a surrogate, which a name may hold and UTF-8 cannot: as its escape.
    if not text.isascii() and any("\ud800" <= each <= "\udfff" for each in text):
        text = json.dumps(line)
    return f"{text}\n".encode()


def sections_of(row: Row) -> dict[str, Any]:
    """A row as the object that JSON has of it; the arguments of `rows.row_of`."""
    sections = {name: dict(getattr(row, name)) for name in SECTIONS}
    found: dict[str, Any] = _jsonable({"kind": row.kind, **sections, "status": row.status, "reason": row.reason})
    return found


def write_all(file: IO[bytes], data: bytes) -> None:
    """An unbuffered file takes a part where the disk is nearly full."""
    left = memoryview(data)
    while left:
        left = left[file.write(left) :]


def _jsonable(value: Any) -> Any:
    """Six significant digits, more than any clock here has; NaN and infinity, which JSON lacks, as null."""
    if isinstance(value, dict):
        return {key: _jsonable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_jsonable(item) for item in value]
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    return value


@contextlib.contextmanager
def collection_paused() -> Iterator[None]:
    """No search for circles while millions of objects are made that are in none: it takes a third of the time."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def read_records(path: Path) -> list[Row]:
    """All rows of a file, or of a folder: that of a launch, such as `results/run/01-train`, or the one with all.

    Raises:
        UsageError: no such file, or a line that is no row of this version (the message names the line, and the commit
            that wrote it if it says so).
    """
    if path.is_dir():
        path = path / ("latest" if (path / "latest").is_dir() else "") / "results.jsonl"
    rows, environments = list[Row](), dict[bytes, Mapping[str, Scalar]]()
    with collection_paused():
        for number, line in enumerate(read_lines(path, "results from "), start=1):
            if line.strip():
                rows.append(_row_of_line(path, number, line, environments))
    if not rows:
        raise UsageError(f"{path} holds no results; expected the results.jsonl of a trainstep run")
    return rows


@cache
def _decoders() -> tuple[Any, Any]:
    """For lines as we write them, to the arguments of `row_of` with the environment as text, and for environments."""
    import msgspec

    entry: Any = str | Annotated[int, msgspec.Meta(ge=-(2**63) + 1, le=2**63 - 2)] | float | bool
    section: Any = dict[str, entry | tuple[entry, ...] | None]
    columns: Any = dict[str, list[entry | None]]
    sections: Any = [("case", section), ("values", section), ("samples", columns), ("series", columns)]
    texts: Any = [("kind", str), ("status", str), ("reason", str), ("environment", msgspec.Raw)]
    line = msgspec.defstruct("Line", [*sections, *texts], forbid_unknown_fields=True)
    return msgspec.json.Decoder(line), msgspec.json.Decoder(section)


def _row_of_line(path: Path, number: int, line: bytes, environments: dict[bytes, Mapping[str, Scalar]]) -> Row:
    """The row; what is wrong with a line, or not as we write it, the slower second part finds.

    Args:
        environments: text → content. Rows share it, as it is a third of a line and the same in most.
    """
    import msgspec

    lines, of_environments = _decoders()
    with contextlib.suppress(msgspec.MsgspecError, RecursionError, ValueError):
        told = lines.decode(line)
        if (text := bytes(told.environment)) not in environments:
            environments[text] = of_environments.decode(text)
        rest = {"samples": told.samples, "series": told.series, "status": told.status, "reason": told.reason}
        row = row_of(told.kind, told.case, told.values, **rest)
        object.__setattr__(row, "environment", environments[text])
        return row
    try:
        columns = parse_line(line)
        if not isinstance(columns, dict) or not _NEEDED <= columns.keys() <= _KNOWN:
            raise ValueError("not a row")
        if {type(columns[name]) for name in columns.keys() & _SECTIONS} != {dict} or type(columns["kind"]) is not str:
            raise ValueError("a row with a section of the wrong type")
    except ValueError as error:
        advice = "If the file was cut short, delete that line to use the rest"
        raise UsageError(f"{path}, line {number}: {error}; expected a row of a trainstep run. {advice}") from error
    try:
        return row_of(**columns)
    except ValueError as error:
        commit = columns.get("environment", {}).get("commit", "unknown")
        advice = f"Measure again, or read the file with the version that wrote it (commit {commit})"
        what = f"{error}; expected a row of this version of trainstep"
        raise UsageError(f"{path}, line {number}: {what}. {advice}") from error


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
    """A table with a tidy line per row: kind, case, values, status, reason, environment. Samples stay in the rows."""
    import pandas

    return pandas.DataFrame(
        [
            {"kind": row.kind, **row.case, **row.values}
            | {"status": row.status, "reason": row.reason, **row.environment}
            for row in rows
        ]
    )
