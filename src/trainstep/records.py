"""Records: one measured case each, written as a line of JSON the moment it is known.

A record carries its case (what was run), its values (units in their names), its samples, the environment, and a status
with a reason, so a failure is a row like any other. Files are JSON Lines; `frame` makes a tidy pandas table of them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from trainstep.errors import UsageError

if TYPE_CHECKING:
    import pandas

Scalar = str | int | float | bool | None
Status = Literal["ok", "out of memory", "unsupported", "wrong", "failed"]


@dataclass(frozen=True)
class Record:
    """One row."""

    kind: str
    """What kind of row: step, rung, memory, fact, finding …; rows of one kind share their columns."""
    case: Mapping[str, Scalar]
    """What was run: the columns by which rows of two files are matched."""
    values: Mapping[str, Scalar] = field(default_factory=dict)
    """What was measured, each name ending in its unit where it has one."""
    samples: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """The single measurements behind the values, in the order they were taken."""
    status: Status = "ok"
    """Whether the case ran, and if not, why not."""
    reason: str = ""
    """One line, empty where the status is ok."""
    environment: Mapping[str, Scalar] = field(default_factory=dict)
    """Machine, versions, commit, date."""
    series: Mapping[str, Sequence[Scalar]] = field(default_factory=dict)
    """Columns too long for values of their own, such as a timeline's events; which belong together, the kind says."""


class RecordWriter:
    """Writes records to a JSON Lines file, each flushed at once: what was measured survives whatever comes after.

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

    def write(self, record: Record) -> None:
        """Append one record."""
        self._file.write(json.dumps(_jsonable(asdict(record)), ensure_ascii=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def write_whole(path: Path, records: Iterable[Record]) -> None:
    """Write records so that the file appears with all of them or not at all, whenever the process is killed.

    Raises:
        UsageError: the folder or the file cannot be written.
    """
    draft = path.with_name(f".{path.name}")
    draft.unlink(missing_ok=True)
    writer = RecordWriter(draft)
    for record in records:
        writer.write(record)
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


def read_records(path: Path) -> list[Record]:
    """All records of a file.

    Raises:
        UsageError: no such file, or a line that is no record (the message names the line).
    """
    if path.is_dir():
        raise UsageError(f"{path} is a folder; expected its {path / 'results.jsonl'}")
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read results from {path}: {error}") from error
    records = [_parse(path, number, line) for number, line in enumerate(lines, start=1) if line.strip()]
    if not records:
        raise UsageError(f"{path} holds no results; expected the results.jsonl of a trainstep run")
    return records


def _parse(path: Path, number: int, line: str) -> Record:
    def corrupt(what: str) -> UsageError:
        return UsageError(
            f"{path}, line {number}: {what}; expected a record of a trainstep run. "
            "If the file was cut short, delete that line to use the rest"
        )

    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise corrupt(f"not JSON ({error.msg})") from error
    known = {item.name for item in fields(Record)}
    if not isinstance(row, dict) or not {"kind", "case"} <= set(row) <= known:
        raise corrupt("not a record")
    sections = ("case", "values", "samples", "series", "environment")
    if any(not isinstance(row.get(name, {}), dict) for name in sections) or not isinstance(row["kind"], str):
        raise corrupt("a record with a section of the wrong type")
    if row.get("status", "ok") not in get_args(Status):
        raise corrupt(f"unknown status {row['status']!r}")
    return Record(**row)


def of_kind(records: Iterable[Record], kind: str) -> list[Record]:
    """The records of one kind, in order."""
    return [record for record in records if record.kind == kind]


def by_case(records: Iterable[Record], *without: str) -> list[list[Record]]:
    """The records grouped by their cases, in order; columns named in `without` do not count."""
    groups: dict[tuple[tuple[str, Scalar], ...], list[Record]] = {}
    for record in records:
        told = tuple((name, value) for name, value in record.case.items() if name not in without)
        groups.setdefault(told, []).append(record)
    return list(groups.values())


def belonging(records: Iterable[Record], kind: str, head: Record) -> list[Record]:
    """The records of one kind whose cases only add to that of `head`: the parts of what it is about."""
    return [row for row in of_kind(records, kind) if head.case.items() <= row.case.items()]


def frame(records: Iterable[Record]) -> pandas.DataFrame:
    """One tidy row per record: kind, case, values, status, reason, environment. Samples stay in the records."""
    import pandas

    return pandas.DataFrame(
        [
            {"kind": record.kind, **record.case, **record.values}
            | {"status": record.status, "reason": record.reason, **record.environment}
            for record in records
        ]
    )
