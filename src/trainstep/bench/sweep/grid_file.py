"""A sweep's TOML file → its cases, every value checked by the command line's own parser before anything runs."""

from __future__ import annotations

import contextlib
import io
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainstep.bench.grid import expand
from trainstep.bench.sweep.case import PROCESSES, ROW_KINDS, Case, Place, flags
from trainstep.config import StepConfig, load_toml, resolve_size
from trainstep.errors import UsageError
from trainstep.records import Scalar

EXPECTED = 'expected command = "bench step", [fixed] with one value per flag and [axes] with a list of values per flag'
OWN_FLAGS = ("out", "debug", "help", "h", "from", "command", "row")
"""The sweep chooses each case's folder and prints its log; the last two are columns of its rows."""

Parser = Callable[[Sequence[str]], object]
"""The command line's parser: raises `UsageError`, or prints and exits, where words are wrong."""


@dataclass(frozen=True)
class Grid:
    """What a sweep file asks for."""

    axes: tuple[str, ...]
    cases: Sequence[Case]
    timeout_s: float | None
    """Seconds after which a case is ended."""

    def places(self, out: Path) -> list[Place]:
        """Every case with its folder below `out`."""
        return [Place(case, case.folder(out.resolve() / "cases", self.axes)) for case in self.cases]


def load_grid(path: Path, parse: Parser) -> Grid:
    """Read and check a sweep file: the cases are every combination of its axes, the last varying fastest.

    Raises:
        UsageError: unreadable, no grid, or a key or value that the command does not know; the message names the key.
    """
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UsageError(f"cannot read the sweep {path}: {error}") from error
    if unknown := sorted(set(tables) - {"command", "fixed", "axes", "processes", "timeout"}):
        raise UsageError(f"{path}: unknown table or key {unknown[0]!r}; {EXPECTED}")
    command = " ".join(str(tables.get("command", "")).split()).removeprefix("trainstep ")
    if command not in ROW_KINDS:
        raise UsageError(f"{path}: command is {tables.get('command')!r}; expected one of {', '.join(ROW_KINDS)}")
    fixed, axes = _table(tables, "fixed", path), _table(tables, "axes", path)
    if PROCESSES in tables:
        fixed = {PROCESSES: tables[PROCESSES], **fixed}
    for name, value in fixed.items():
        if isinstance(value, list):
            raise UsageError(f"{path}: [fixed] {name} is a list; move it to [axes], or join its values by commas")
        _check(path, f"[fixed] {name}", command, name, value, parse)
    if not axes:
        raise UsageError(f"{path}: an empty grid, as [axes] has no key; {EXPECTED}")
    for name, values in axes.items():
        where = f"[axes] {name}"
        if name in fixed:
            raise UsageError(f"{path}: {name} is both fixed and an axis; give it once")
        if not isinstance(values, list):
            raise UsageError(f"{path}: {where} is {values!r}; expected a list of values, or write it under [fixed]")
        if not values:
            raise UsageError(f"{path}: an empty grid, as {where} has no values; give it at least one")
        for value in values:
            _check(path, where, command, name, value, parse)
        told = [str(value) for value in values]  # 1 and "1" make one command
        if repeated := [value for value in values if values.count(value) > 1 or told.count(str(value)) > 1]:
            raise UsageError(f"{path}: {where} has {repeated[0]!r} twice; give each value once")
    timeout = tables.get("timeout")
    if timeout is not None and (isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or timeout <= 0):
        raise UsageError(f"{path}: timeout is {timeout!r}; expected seconds above 0")
    return Grid(tuple(axes), [Case(command, {**fixed, **point}) for point in expand(axes)], timeout)


def _table(tables: Mapping[str, Any], name: str, path: Path) -> dict[str, Any]:
    """A table of the file, its keys as flags of the command spell them in Python."""
    table = tables.get(name, {})
    if not isinstance(table, dict):
        raise UsageError(f"{path}: {name} is {table!r}; expected a table, written [{name}]")
    spelled = {key.lstrip("-").replace("-", "_"): value for key, value in table.items()}
    if len(spelled) < len(table):
        raise UsageError(f"{path}: [{name}] spells one flag in two ways among {', '.join(table)}; give it once")
    return spelled


def _check(path: Path, where: str, command: str, name: str, value: Scalar, parse: Parser) -> None:
    """Raise `UsageError` unless the command takes this flag with this value."""
    if name == PROCESSES:
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise UsageError(f"{path}: {where} is {value!r}; expected how many processes to start")
        return
    if name in OWN_FLAGS:
        raise UsageError(f"{path}: {where} is set by the sweep itself; leave it out")
    if not isinstance(value, (str, int, float, bool)):
        raise UsageError(f"{path}: {where} is {value!r}; expected a string, a number or true or false")
    told = io.StringIO()
    try:
        with contextlib.redirect_stderr(told), contextlib.redirect_stdout(told):
            parse([*command.split(), *(flags({name: value}) or [f"--{name.replace('_', '-')}"])])
        if name == "size":
            for each in str(value).split(","):
                resolve_size(each)
        if name == "config":
            load_toml(Path(str(value)))
        if name in StepConfig.__dataclass_fields__ and not isinstance(value, str):
            StepConfig(**{name: value})  # type: ignore[arg-type]
    except UsageError as error:
        raise UsageError(f"{path}: {where}: {error}") from error
    except SystemExit as error:
        raise UsageError(f"{path}: {where} = {value!r}: {_said(told.getvalue())}") from error


def _said(told: str) -> str:
    """The parser's complaint: what stands between its first two rules, the title above and the help below left out."""
    lines = [line.strip() for line in told.splitlines()]
    rules = [index for index, line in enumerate(lines) if line and not line.strip("-")]
    first, second = rules[:2] if len(rules) > 1 else (-1, len(lines))
    words = " ".join(line for line in lines[first + 1 : second] if line)
    if words.startswith("Unrecognized"):  # what another subcommand takes: the parser says after each word which took it
        words = re.sub(r" \(applied to [^)]*\)| Arguments are applied to .*", "", words)
    return words or "the command does not take it"
