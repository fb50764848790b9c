"""Damages files of every kind that trainstep reads, thousands of times, and reads them: `python -m tools.trust.fuzz`.

Each case is a file made here, damaged by a seed of its own: bytes flipped, cut, doubled or put in, or a value anywhere
in its structure replaced by an odd one; or another thing stands in its place, such as a pipe or a link to a device.
Reading it must end in rows, or in a `UsageError` of one line, within ten seconds of computing and a minute in all.
Nothing of it may run, write outside of the folder, or steer a terminal, and the file itself must stay as it is.

A case that fails is named by its subject and seed: `python -m tools.trust.fuzz --only trace --seed 17 --count 1` runs
it.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import gzip
import io
import json
import math
import os
import pickle
import random
import shutil
import signal
import sqlite3
import sys
import tempfile
import traceback
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import rich.console
import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves

from tests.measure.allocations.large import snapshot
from tests.measure.profile.large import events
from tests.measure.profile.test_nsys import export
from tests.measure.profile.test_trace import GPU
from trainstep.attention import tuned
from trainstep.base.config import load_toml
from trainstep.base.errors import UsageError, printable
from trainstep.base.files import remove
from trainstep.bench.allocations import imported_records
from trainstep.bench.profile import records_from_file
from trainstep.bench.sweep.cases import load_grid
from trainstep.checkpointing.policies import FORMAT, Policy
from trainstep.commands.cli import parse
from trainstep.parallel.process import join_group_or_alone
from trainstep.plan.measured import calibrated
from trainstep.report.compare import compare, comparison_table, repeatability
from trainstep.report.formats import to_csv
from trainstep.report.page import render
from trainstep.report.subjects import findings, make_tables
from trainstep.report.terminal import to_terminal
from trainstep.rows import KINDS
from trainstep.rows.records import Row, read_records
from trainstep.step.training_step import Replica
from trainstep.train.checkpoints import (
    NOTE,
    CheckpointWriter,
    form_of,
    load_training_state,
    name_of,
    open_checkpoint,
    training_state,
)
from trainstep.train.history import METRICS, read_metrics
from trainstep.train.metrics import MetricsWriter

SECONDS = 10.0  # of computing that a file may take
OTHERS = 12  # one case in so many is no file
PAGES = 20  # one case in so many also makes the page
RESULTS = Path(__file__).parents[2] / "docs" / "results"
TILES = Path(tuned.__file__).parent / "triton" / "tiles.json"

ODD: tuple[Any, ...] = (
    *(None, True, -1, 0, 1, 7, 2**31, 2**63, 2**64, -(2**70), 10**400, 0.5, -2.5, 1e300, 5e-324, math.nan, math.inf),
    *("", "x", "=1+1", "\x1b[31mred\x1b]0;t\x07", "\u202eevil", "a\u2028b", "\udc80", "\x00", "9" * 400, "{x}", "[/b]"),
    *([], [[]], {}, {"a": 1}, [1, "x", None], ["x"] * 3, "step 3", "alloc", "kernel"),
)
RUNS_CODE = {
    *("os.system", "os.exec", "os.posix_spawn", "os.fork", "subprocess.Popen", "os.mkdir", "os.remove", "os.rename"),
    *("socket.connect", "pickle.find_class", "ctypes.dlopen"),
}
METADATA_NAMES = (
    *("'torch.distributed.checkpoint.", "'torch', 'float32'", "'torch', 'Size'", "'pathlib', 'PosixPath'"),
    "'torch.serialization', '_get_layout'",
)
"""What a checkpoint's metadata, and torch's plan to read it, are made of."""
DONE_ANYWAY = {
    "metrics": ("os.mkdir", "os.rename", "os.remove('metrics.jsonl'"),
    "checkpoint": ("os.mkdir", "os.remove", "ctypes.dlopen", *(f"pickle.find_class({each}" for each in METADATA_NAMES)),
}
"""What reading these, or making the folder that they are in, does."""


class TooLong(Exception):
    """The ten seconds of computing, or the minute, are over."""


class Wrong(Exception):
    """Something that no traceback shows."""


# Damage


def of_bytes(rng: random.Random, data: bytes) -> bytes:
    """Some damage that any file can have."""
    content = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 5, 30))):
        at, length = rng.randrange(len(content) + 1), rng.choice((1, 2, 8, 100, 5000))
        match rng.randrange(7):
            case 0 if at < len(content):
                content[at] ^= 1 << rng.randrange(8)
            case 1 if at < len(content):
                content[at] = rng.randrange(256)
            case 2:
                del content[at : at + length]
            case 3:
                content[at:at] = content[at : at + length]
            case 4:
                content[at:at] = rng.randbytes(min(length, 100))
            case 5:
                content[at : at + length] = bytes(min(length, len(content) - at))
            case _ if rng.random() < 0.2:
                del content[at:]
    return bytes(content)


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, Any]]:
    """Every (container, key) of nested lists and dicts."""
    keys = range(len(value)) if isinstance(value, list) else list(value) if isinstance(value, dict) else ()
    for key in keys:
        yield value, key
        yield from places(value[key])


def of_values(rng: random.Random, value: Any) -> Any:
    """The value with odd ones at some places, keys lost or doubled, or lists that are shared."""
    value = copy.deepcopy(value)
    for _ in range(rng.choice((1, 1, 2, 4))):
        chosen = list(places(value))
        if not chosen:
            return value
        holder, key = rng.choice(chosen)
        match rng.randrange(8):
            case 0:
                del holder[key]
            case 1 if isinstance(holder, list):
                holder.insert(key, holder[key])
            case 2 if isinstance(holder, list) and holder:
                holder *= rng.choice((1, 2, 50))
            case 3 if isinstance(holder, dict):
                other = rng.choice(list(holder))
                holder[other] = holder.pop(key)
            case 4 if isinstance(holder[key], int | float) and not isinstance(holder[key], bool):
                holder[key] = rng.choice((-1, 2, 1e3, 1e9)) * holder[key]
            case _:
                holder[key] = copy.deepcopy(rng.choice(ODD))
    return value


def dumped(value: Any) -> bytes:
    return json.dumps(value).encode("utf-8", "surrogatepass")


def of_other(rng: random.Random, path: Path) -> None:
    """Put something else in the place of a file."""
    devices = [f"/dev/{name}" for name in ("zero", "full", "random", "tty", "null", "../proc/self/mem")]
    match kind := rng.choice(("pipe", "folder", path.name, "absent", *devices)):
        case "pipe":
            os.mkfifo(path)
        case "folder":
            path.mkdir()
        case _:
            path.symlink_to(kind)


# Subjects: what is damaged, and how it is read


SNAPSHOT = snapshot(300, devices=2, device=1, stacks=10)


@cache
def plain_trace() -> dict[str, Any]:
    return {"deviceProperties": [{"id": 0, "name": "NVIDIA H200"}], "traceEvents": [*GPU["traceEvents"], *events(60)]}


@cache
def plain_export() -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        return export(Path(folder) / "x.sqlite").read_bytes()


@cache
def plain_results() -> list[dict[str, Any]]:
    """A row of each kind that has been measured."""
    found: dict[str, dict[str, Any]] = {}
    for path in sorted(RESULTS.glob("*.jsonl")):
        for line in path.read_text(encoding="utf-8").split("\n"):
            if line and len(line) < 20_000:
                row = json.loads(line)
                found.setdefault(row["kind"], row)
    assert len(found) > len(KINDS) / 2, "most kinds have a row"
    return list(found.values())


RUN = {
    "model": {"size": "small", "num_layers": 2, "rope_theta": 1e4, "max_context": 512},
    "step": {"batch": 4, "context": 64, "learning_rate": 1e-3, "precision": "bf16", "checkpointing": "none"},
    "train": {"steps": 10},
}
SWEPT = {"command": "bench step", "timeout": 60.0, "fixed": {"batch": 2}, "axes": {"context": [16], "seed": [1, 2]}}
BLOCKS = {"blocks.0": {"recompute": True, "kept": ["mm#0"], "host": [1]}, "blocks.1": {"recompute": False}}
POLICY = {"format": FORMAT, "update_in_backward": True, "blocks": BLOCKS}


def damaged_toml(rng: random.Random, tables: dict[str, Any]) -> bytes:
    def lines(table: dict[str, Any]) -> str:
        return "".join(f"{key} = {json.dumps(value)}\n" for key, value in table.items() if not isinstance(value, dict))

    odd = tables if rng.random() < 0.3 else of_values(rng, tables)
    text = lines(odd) + "".join(f"[{key}]\n{lines(each)}" for key, each in odd.items() if isinstance(each, dict))
    data = text.encode("utf-8", "surrogatepass")
    return of_bytes(rng, data) if odd is tables else data


def damaged_json(rng: random.Random, value: Any) -> bytes:
    return of_bytes(rng, dumped(value)) if rng.random() < 0.3 else dumped(of_values(rng, value))


METRIC = {
    "step": 1, "loss": 2.5, "validation_loss": None, "learning_rate": 1e-3, "gradient_norm": 1.0, "step_ms": 3.0,
    "tokens_per_s": 5.0, "utilisation": None, "tokens": 10, "world_size": 1, "since_start": 1,
}  # fmt: skip


def damaged_snapshot(rng: random.Random) -> bytes:
    protocol = rng.choice((2, 4, 4, 4, 5))
    if rng.random() < 0.5:
        return of_bytes(rng, pickle.dumps(SNAPSHOT, protocol=protocol))
    content = of_values(rng, SNAPSHOT)
    if rng.random() < 0.1:
        content["more"] = Planted()
    return pickle.dumps(content, protocol=protocol)


class Planted:
    """Runs when a pickle of it is read."""

    def __reduce__(self) -> tuple[Any, ...]:
        return exec, ("import os; os.system('true')",)


def damaged_trace(rng: random.Random) -> bytes:
    if rng.random() < 0.5:
        data = of_bytes(rng, dumped(plain_trace()))
        return gzip.compress(data) if rng.random() < 0.3 else data
    data = dumped(of_values(rng, plain_trace()))
    return of_bytes(rng, gzip.compress(data)) if rng.random() < 0.2 else data


def damaged_export(rng: random.Random) -> bytes:
    if rng.random() < 0.4:
        return of_bytes(rng, plain_export())
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "x.sqlite"
        path.write_bytes(plain_export())
        with contextlib.closing(sqlite3.connect(path)) as database, contextlib.suppress(sqlite3.Error, OverflowError):
            tables = [name for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
            for _ in range(rng.choice((1, 2, 5))):
                table = rng.choice(tables)
                column = rng.choice([row[1] for row in database.execute(f"PRAGMA table_info({table})")])
                odd = rng.choice([each for each in ODD if not isinstance(each, list | dict) and each != "\udc80"])
                match rng.randrange(5):
                    case 0:
                        database.execute(f'ALTER TABLE {table} DROP COLUMN "{column}"')
                    case 1:
                        database.execute(f"INSERT INTO {table} SELECT * FROM {table}")
                    case 2:
                        database.execute(f"DELETE FROM {table}")
                    case _:
                        database.execute(f'UPDATE {table} SET "{column}" = ? WHERE rowid % 2 = 0', (odd,))
            database.commit()
        return path.read_bytes()


def damaged_lines(rng: random.Random, rows: list[dict[str, Any]]) -> bytes:
    if rng.random() < 0.4:
        return of_bytes(rng, b"".join(dumped(row) + b"\n" for row in rows))
    place = rng.randrange(len(rows))
    return b"".join(dumped(of_values(rng, row) if at == place else row) + b"\n" for at, row in enumerate(rows))


def damaged_results(rng: random.Random) -> bytes:
    return damaged_lines(rng, plain_results())


def damaged_metrics(rng: random.Random) -> bytes:
    return damaged_lines(rng, [{**METRIC, "step": step, "since_start": step} for step in range(1, 9)])


def show(rows: list[Row], *, page: bool, is_whole: bool = True) -> None:
    """All that is made of rows; nothing of it may steer a terminal.

    Rows that were read are shown in tables alone: what rules and pages say is of the rows that a command measured.
    """
    console = rich.console.Console(file=io.StringIO(), width=160)
    tables = make_tables(rows, "terminal")
    if passes := repeatability(rows):
        tables.append(comparison_table(passes, "passes"))
    for table in tables:
        console.print(to_terminal(table, 160))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    if is_whole:
        text += "\n".join(finding.sentence for finding in findings(rows))
    for table in make_tables(rows):
        text += to_csv(table)
    steering = {each for each in text if unicodedata.category(each) in ("Cc", "Cs", "Zl")} - {"\n", "\t"}
    if steering:
        raise Wrong(f"a terminal would be steered by {sorted(steering)[:5]}")
    if page and is_whole:
        render(rows).encode("utf-8", "backslashreplace")


def read_results(path: Path, *, page: bool) -> None:
    rows = read_records(path)
    for use in (lambda: compare(rows, rows), lambda: calibrated(rows)):
        with contextlib.suppress(UsageError):
            use()
    with contextlib.suppress(UsageError):  # samples that are no times
        show(rows, page=page, is_whole=False)


def read_curve(path: Path, *, page: bool) -> None:
    """As a run that goes on does. What the rows before said must still be there, but for a line that was torn."""
    folder = path.parent / "run"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    if not is_file(path):
        path.rename(folder / METRICS)
        read_metrics(folder / METRICS)
        return
    shutil.copy(path, folder / METRICS)
    before = whole_lines(path)
    with MetricsWriter(folder, step=10**500, tensorboard=False):
        pass
    kept = read_metrics(folder / METRICS)
    if len(kept) < before:
        raise Wrong(f"{before} rows were whole, and {len(kept)} are left")


def is_file(path: Path) -> bool:
    """False for what `of_other` makes."""
    return path.is_file() and not path.is_symlink()


def whole_lines(path: Path) -> int:
    count = 0
    for line in path.read_bytes().split(b"\n"):
        with contextlib.suppress(ValueError, RecursionError):
            count += bool(line) and isinstance(json.loads(line), dict)
    return count


def replica() -> Replica:
    """A model and its optimizer after a step: always the same."""
    torch.manual_seed(0)
    module = torch.nn.Linear(20, 30)
    optimizer = torch.optim.AdamW(module.parameters())
    module(torch.ones(2, 20)).sum().backward()
    optimizer.step()
    return Replica(module, optimizer)


@cache
def plain_checkpoint() -> dict[str, bytes]:
    """Name → content of the files of one."""
    with tempfile.TemporaryDirectory() as folder, join_group_or_alone("cpu"):
        writer = CheckpointWriter(Path(folder), keep=1, group=dist.new_group(backend="gloo"), last=None)
        saved = replica()
        writer.save(1, training_state(saved), form_of(saved))
        writer.close()
        return {path.name: path.read_bytes() for path in sorted((Path(folder) / name_of(1)).iterdir())}


def damaged_checkpoint(rng: random.Random) -> bytes:
    """The name of one of its files, and what is in it instead."""
    name = rng.choice(list(plain_checkpoint()))
    content = plain_checkpoint()[name]
    if name == NOTE and rng.random() < 0.5:
        return name.encode() + b"\n" + dumped(of_values(rng, json.loads(content)))
    kind = rng.random()
    damaged = of_bytes(rng, content)
    if kind < 0.1:
        damaged = pickle.dumps(Planted())
    elif kind < 0.7:  # one bit, which leaves the size as it is
        at = rng.randrange(len(content))
        damaged = content[:at] + bytes([content[at] ^ 1 << rng.randrange(8)]) + content[at + 1 :]
    return name.encode() + b"\n" + damaged


def read_checkpoint(path: Path, *, page: bool) -> None:
    """As a run that goes on does; if it is taken, it must be what was saved."""
    folder = path.parent / "checkpoints"
    shutil.rmtree(folder, ignore_errors=True)
    (folder / name_of(1)).mkdir(parents=True)
    name, _, content = path.read_bytes().partition(b"\n") if is_file(path) else (NOTE.encode(), b"", b"")
    for each, plain in plain_checkpoint().items():
        (folder / name_of(1) / each).write_bytes(content if each == name.decode() else plain)
    if not is_file(path):
        (folder / name_of(1) / NOTE).unlink()
        (folder / name_of(1) / NOTE).symlink_to(path)
    saved, loaded = replica(), replica()
    with torch.no_grad():
        for parameter in loaded.module.parameters():
            parameter.zero_()
    try:
        with join_group_or_alone("cpu") as process:
            checkpoint = open_checkpoint(folder, 1)
            load_training_state(checkpoint, loaded, process, dist.new_group(backend="gloo"))
    finally:
        if dist.is_initialized():  # after an error connections are broken off, and the group is still joined
            dist.destroy_process_group()
    same = zip(tree_leaves(training_state(saved)), tree_leaves(training_state(loaded)), strict=True)
    if not all(torch.equal(torch.as_tensor(a), torch.as_tensor(b)) for a, b in same):
        raise Wrong("other weights were loaded")


def read_tiles(path: Path, *, page: bool) -> None:
    """As a user's own are."""
    table = tuned.Table("", tuned.TileCase, tuned.Tile)
    table.user_file = lambda: path  # type: ignore[method-assign]
    table._users()


@dataclass(frozen=True)
class Subject:
    """A kind of file."""

    name: str  # of the file, with the ending that it has
    damage: Callable[[random.Random], bytes]
    read: Callable[..., None]


SUBJECTS = {
    "snapshot": Subject("s.pickle", damaged_snapshot, lambda path, page: show(list(imported_records(path)), page=page)),
    "trace": Subject("t.json", damaged_trace, lambda path, page: show(list(records_from_file(path)), page=page)),
    "export": Subject("e.sqlite", damaged_export, lambda path, page: show(list(records_from_file(path)), page=page)),
    "results": Subject("results.jsonl", damaged_results, read_results),
    "metrics": Subject("m.jsonl", damaged_metrics, read_curve),
    "checkpoint": Subject("checkpoint.file", damaged_checkpoint, read_checkpoint),
    "config": Subject("run.toml", lambda rng: damaged_toml(rng, RUN), lambda path, page: load_toml(path)),
    "sweep": Subject("s.toml", lambda rng: damaged_toml(rng, SWEPT), lambda path, page: load_grid(path, parse)),
    "policy": Subject("policy.json", lambda rng: damaged_json(rng, POLICY), lambda path, page: Policy.load(path)),
    "tiles": Subject("tiles.json", lambda rng: damaged_json(rng, json.loads(TILES.read_text())[:3]), read_tiles),
}

# Judging

_events: list[str] | None = None


def _hook(event: str, arguments: tuple[Any, ...]) -> None:
    if _events is None:
        return
    is_write = event == "open" and arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
    if event in RUNS_CODE or (is_write and not str(arguments[0]).startswith((tempfile.gettempdir(), "/dev/null"))):
        _events.append(f"{event}{arguments!r}"[:200])


def _over(*_: object) -> None:
    raise TooLong


def judge(subject: str, seed: int, folder: Path) -> str | None:
    """What is wrong with the reading of one damaged file; None where all is well."""
    global _events
    chosen, rng = SUBJECTS[subject], random.Random(f"{subject} {seed}")
    path = folder / chosen.name
    content, is_other = chosen.damage(rng), rng.randrange(OTHERS) == 0
    remove(path)
    of_other(rng, path) if is_other else path.write_bytes(content)
    previous = [signal.signal(each, _over) for each in (signal.SIGPROF, signal.SIGALRM)]
    _events = []
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    signal.setitimer(signal.ITIMER_REAL, 6 * SECONDS)
    try:
        chosen.read(path, page=seed % PAGES == 0)
    except UsageError as error:
        if "\n" in printable(str(error)):
            return f"a message of several lines: {error}"
    except TooLong:
        return f"more than {SECONDS:.0f} seconds of computing, or a minute"
    except Exception:
        return traceback.format_exc(limit=-6)
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        for each, handler in zip((signal.SIGPROF, signal.SIGALRM), previous, strict=True):
            signal.signal(each, handler)
        ran, _events = _events, None
    if ran := [each for each in ran or () if not each.startswith(DONE_ANYWAY.get(subject, ()))]:
        return f"ran {ran}"
    return None if is_other or path.read_bytes() == content else "the file was changed"


def fuzz(only: list[str], first: int, count: int) -> dict[str, str]:
    """`SUBJECT SEED` → what is wrong, of the cases that fail."""
    sys.addaudithook(_hook)
    wrong = {}
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(first, first + count):
            subject = only[seed % len(only)]
            if found := judge(subject, seed, Path(folder)):
                wrong[f"{subject} {seed}"] = found
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=list(SUBJECTS), action="append")
    given = parser.parse_args()
    only = given.only or list(SUBJECTS)
    wrong = fuzz(only, given.seed, given.count)
    for case, what in wrong.items():
        print(f"== {case}\n{printable(what)}")
    failed = Counter(case.split()[0] for case in wrong)
    print(f"{given.count} damaged files of {', '.join(only)}: {len(wrong)} wrong {dict(failed) or ''}")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
