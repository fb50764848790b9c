"""Shared by the scripts that measure for the documents: commands in processes of their own, results kept in parts."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from trainstep.base.errors import UsageError
from trainstep.measure.environment import describe
from trainstep.rows.records import Row, read_records

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))  # for what tests share with these scripts
SAID_OF = ("torch", "date", "commit")
LAUNCH = ("-m", "trainstep")


def parser(description: str | None) -> argparse.ArgumentParser:
    """A script's parser, whose help is the script's docstring."""
    return argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)


@dataclass(frozen=True)
class Ended:
    """How a command ended."""

    how: str  # "rows", "refused", "hangs" or "crashes"
    last: str  # line that it printed, its error where it ended in one
    rows: Sequence[Row] = ()


def run(
    words: Sequence[str],
    out: Path,
    *,
    ranks: int = 1,
    folder: Path = ROOT,
    environment: Mapping[str, str] | None = None,
    limit_s: float | None = None,
    until_s: float | None = None,
) -> Ended:
    """Run `trainstep` with these words, which name `out` as its folder, in processes of their own.

    Args:
        ranks: processes that torchrun starts.
        folder: where it runs.
        environment: beside this process's own.
        limit_s: after which it is killed.
        until_s: after which it is interrupted, as by Ctrl-C, and keeps what it has.
    """
    torchrun = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}") if ranks > 1 else ()
    path = os.pathsep.join((str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")))
    own = os.environ | {"HF_HUB_OFFLINE": "1", "PYTHONPATH": path} | dict(environment or {})
    command = [sys.executable, *torchrun, *LAUNCH, *words]
    out.mkdir(parents=True, exist_ok=True)
    with (out / "said").open("w") as said:
        process = subprocess.Popen(command, cwd=folder, env=own, stdout=said, stderr=said, start_new_session=True)
        try:
            if until_s is not None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(until_s)
                process.send_signal(signal.SIGINT)
            process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return Ended("hangs", f"longer than {limit_s:g} s")
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    lines = [line for line in (out / "said").read_text(errors="replace").splitlines() if line.strip()] or [""]
    last = next((line for line in reversed(lines) if line.startswith("trainstep: ")), lines[-1])
    how = {0: "rows", 1: "rows", 2: "refused"}.get(process.returncode, "crashes" if until_s is None else "rows")
    try:
        rows = read_records(out / "results.jsonl") if (out / "results.jsonl").exists() else None
    except UsageError as error:
        return Ended("crashes", str(error))
    return Ended("crashes" if how == "rows" and rows is None else how, last, tuple(rows or ()))


def origin_of(device: str, *more: str) -> dict[str, Any]:
    """The facts of the environment that each kept cell has, and `more`."""
    environment = describe(torch.device(device))
    return {name: environment[name] for name in (*SAID_OF, *more)}


def keep(file: Path, name: str, cell: Any, order: Collection[str]) -> None:
    """Put a cell into a file of cells in the place of its earlier self, in this order of names."""
    kept = (json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}) | {name: cell}
    kept = {each: kept[each] for each in order if each in kept}
    file.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
