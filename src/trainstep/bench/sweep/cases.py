"""The cases of a sweep: from its TOML file, checked by the command line's own parser; who each is, and its folder.

A case is finished when its folder has `rows.jsonl`, which appears whole or not at all. The sweep's results are these
files one after the other, so nothing else has to be kept to resume.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from trainstep.base.config import StepConfig, load_toml, resolve_size
from trainstep.base.errors import UsageError
from trainstep.base.files import read_toml
from trainstep.bench.cases import expand
from trainstep.rows import (
    AttentionRow,
    ChangeRow,
    CollectiveRow,
    MemoryTimelineRow,
    ParallelRow,
    PeakRow,
    PlanRow,
    ProfileRow,
    StepRow,
    SweepRow,
)
from trainstep.rows.records import Row, Scalar, Status, of_kind, read_records, write_whole

ROW_KINDS: Mapping[str, tuple[type[Row], ...]] = {
    "analyze": (ChangeRow,),
    "bench attention": (AttentionRow,),
    "bench collectives": (CollectiveRow,),
    "bench ladder": (ChangeRow,),
    "bench parallel": (ParallelRow,),
    "bench step": (StepRow,),
    "memory": (PeakRow, MemoryTimelineRow),
    "plan": (PlanRow,),
    "profile": (ProfileRow,),
}
"""Commands that can be swept → the kind of record that becomes a row: the first of these that the case wrote."""

PROCESSES = "processes"  # the one setting that is no flag: how many processes torchrun starts
EXPECTED = 'expected command = "bench step", [fixed] with one value per flag and [axes] with a list of values per flag'
OWN_FLAGS = ("out", "debug", "help", "h", "from", "command", "row")
"""The sweep chooses each case's folder and prints its log; the last two are columns of its rows."""

Parser = Callable[[Sequence[str]], object]
"""The command line's parser: raises `UsageError` where words are wrong."""


@dataclass(frozen=True)
class Case:
    """A cell of the grid."""

    command: str  # a key of `ROW_KINDS`
    settings: Mapping[str, Scalar]  # flag without dashes → value, and `processes`; in the file's order
    folder: Path = Path()  # its own

    @property
    def processes(self) -> int | None:
        """Processes that torchrun starts; None for one process without it."""
        count = self.settings.get(PROCESSES)
        return count if isinstance(count, int) else None

    @property
    def words(self) -> list[str]:
        """The command line after `trainstep`, without `--out`."""
        return [*self.command.split(), *flags(self.settings)]

    @property
    def identity(self) -> str:
        """Twelve hexadecimal digits of the command's words, whatever their order in the file.

        Not of the version: a commit does not void what was measured, and rows carry theirs.
        """
        texts = {
            name: str(each).lower() if isinstance(each, bool) else str(each) for name, each in self.settings.items()
        }
        return hashlib.sha256(json.dumps([self.command, sorted(texts.items())]).encode()).hexdigest()[:12]

    def columns(self) -> dict[str, Scalar]:
        """The columns that identify the case's rows."""
        return {"command": self.command, **self.settings}

    def below(self, cases: Path, axes: Sequence[str]) -> Case:
        """The case with a folder of its own, named after its place on the axes and its identity."""
        named = " ".join(f"{name}={self.settings[name]}" for name in axes)
        readable = re.sub(r"[^\w.=+-]+", "_", named)[:80]
        return replace(self, folder=cases / f"{readable}-{self.identity}")

    def finished(self) -> list[SweepRow] | None:
        """The rows of a case that has ended, well or not; None while it has not."""
        kept = self.folder / "rows.jsonl"
        return of_kind(read_records(kept), SweepRow) if kept.exists() else None

    def is_finished(self, retried: Sequence[Status] = ()) -> bool:
        """True if the case has ended before, and not with a status that is to be tried again."""
        rows = self.finished()
        return rows is not None and not any(row.status in retried for row in rows)

    def keep(self, rows: Sequence[Row]) -> None:
        """Write the rows; with this the case is finished."""
        assert rows, "a finished case has a row"
        write_whole(self.folder / "rows.jsonl", rows)

    def clear(self) -> None:
        """Forget an earlier run, so that nothing of it can pass for this one's."""
        for name in ("rows.jsonl", "results.jsonl", "stdout.txt", "stderr.txt"):
            (self.folder / name).unlink(missing_ok=True)


def flags(settings: Mapping[str, Scalar]) -> list[str]:
    """Settings as flags: a true one alone, a false one not at all, underscores as dashes."""
    words: list[str] = []
    for name, value in settings.items():
        if name != PROCESSES and value is not False:
            words += [f"--{name.replace('_', '-')}"] + ([] if value is True else [str(value)])
    return words


@dataclass(frozen=True)
class Grid:
    """Contents of a sweep file."""

    axes: tuple[str, ...]
    cases: Sequence[Case]
    timeout_s: float | None  # after which a case is ended


def load_grid(path: Path, parse: Parser, out: Path = Path()) -> Grid:
    """Read and check a sweep file: the cases are every combination of its axes, the last varying fastest.

    Their folders are in `out`/cases.

    Raises:
        UsageError: unreadable, no grid, or a key or value that the command does not know; the message names the key.
    """
    tables = read_toml(path, dict[str, Any], "the sweep ")
    try:
        return _checked(tables, parse, out.resolve() / "cases")
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from error


def _checked(tables: Mapping[str, Any], parse: Parser, folder: Path) -> Grid:
    if unknown := sorted(set(tables) - {"command", "fixed", "axes", "processes", "timeout"}):
        raise UsageError(f"unknown table or key {unknown[0]!r}; {EXPECTED}")
    command = " ".join(str(tables.get("command", "")).split()).removeprefix("trainstep ")
    if command not in ROW_KINDS:
        raise UsageError(f"command is {tables.get('command')!r}; expected one of {', '.join(ROW_KINDS)}")
    fixed, axes = _table(tables, "fixed"), _table(tables, "axes")
    if PROCESSES in tables:
        fixed = {PROCESSES: tables[PROCESSES], **fixed}
    for name, value in fixed.items():
        if isinstance(value, list):
            raise UsageError(f"[fixed] {name} is a list; move it to [axes], or join its values by commas")
        _check(f"[fixed] {name}", command, name, value, parse)
    if not axes:
        raise UsageError(f"an empty grid, as [axes] has no key; {EXPECTED}")
    for name, values in axes.items():
        where = f"[axes] {name}"
        if name in fixed:
            raise UsageError(f"{name} is both fixed and an axis; give it once")
        if not isinstance(values, list):
            raise UsageError(f"{where} is {values!r}; expected a list of values, or write it under [fixed]")
        if not values:
            raise UsageError(f"an empty grid, as {where} has no values; give it at least one")
        for value in values:
            _check(where, command, name, value, parse)
        told = [str(value) for value in values]  # 1 and "1" make one command
        if repeated := [value for value in values if values.count(value) > 1 or told.count(str(value)) > 1]:
            raise UsageError(f"{where} has {repeated[0]!r} twice; give each value once")
    timeout = tables.get("timeout")
    if timeout is not None and (isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or not timeout > 0):
        raise UsageError(f"timeout is {timeout!r}; expected seconds above 0")
    cases = [Case(command, {**fixed, **point}).below(folder, tuple(axes)) for point in expand(axes)]
    return Grid(tuple(axes), cases, timeout)


def _table(tables: Mapping[str, Any], name: str) -> dict[str, Any]:
    """A table of the file, its keys as flags of the command spell them in Python."""
    table = tables.get(name, {})
    if not isinstance(table, dict):
        raise UsageError(f"{name} is {table!r}; expected a table, written [{name}]")
    spelled = {key.lstrip("-").replace("-", "_"): value for key, value in table.items()}
    if len(spelled) < len(table):
        raise UsageError(f"[{name}] spells one flag in two ways among {', '.join(table)}; give it once")
    return spelled


def _check(where: str, command: str, name: str, value: Scalar, parse: Parser) -> None:
    """Raise `UsageError` unless the command takes this flag with this value."""
    if name == PROCESSES:
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise UsageError(f"{where} is {value!r}; expected how many processes to start")
        return
    if name in OWN_FLAGS:
        raise UsageError(f"{where} is set by the sweep itself; leave it out")
    if not isinstance(value, (str, int, float, bool)):
        raise UsageError(f"{where} is {value!r}; expected a string, a number or true or false")
    try:
        parse([*command.split(), *(flags({name: value}) or [f"--{name.replace('_', '-')}"])])
        if name == "size":
            for each in str(value).split(","):
                resolve_size(each)
        if name == "config":
            load_toml(Path(str(value)))
        if name in StepConfig.__dataclass_fields__ and not isinstance(value, str):
            StepConfig(**{name: value})  # type: ignore[arg-type]
    except UsageError as error:
        raise UsageError(f"{where}: {error}") from error
