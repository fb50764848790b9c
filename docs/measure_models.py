"""Run every command on every model of tests/realworld/models.py: docs/results/cpu-models.json.

python docs/measure_models.py                              # all: an hour and more, on the CPU
python docs/measure_models.py --models llama,t5 --commands profile,dtypes
python docs/measure_models.py --seconds 120                # stop a command that takes longer

A cell is a process of its own, forked from one that has imported the libraries. Cells that are not measured are kept,
each with its commit, so the table can be filled in parts, and by several interpreters: models whose package this one
lacks are left as they are.
"""

from __future__ import annotations

import argparse
import importlib
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

from tables import RESULTS
from tests.realworld.models import LEAVES_OUT_LAYERS, MODELS
from trainstep.base.errors import UsageError
from trainstep.base.schemes import SCHEMES
from trainstep.check.reference import OWN_ARITHMETIC
from trainstep.check.step import RIGHT_UNCOMPILED
from trainstep.measure.environment import describe
from trainstep.rows import CheckpointingRow, MemoryTimelineRow, ParallelRow, PeakRow, StepRow
from trainstep.rows.records import Row, of_kind, read_records

ROOT = Path(__file__).parents[1]
COMPARED = "single,naive,flat,overlapped,bucketed-25,sharded-optimizer,fsdp,torch-ddp,torch-zero,torch-fsdp2"
KEPT = RESULTS / "cpu-models.json"
COMMANDS = {
    "analyze": "analyze --steps 7",
    "profile": "profile --steps 3",
    "dtypes": "dtypes --precision fp32,bf16",
    "timeline": "memory --timeline",
    "residuals": "memory --residuals",
    "checkpointing": "memory --checkpointing --policies none,every-1,selective --steps 2",
    "peaks": "memory --peaks",
    "bench step": "bench step --precision fp32,bf16 --steps 3",
    "bench parallel": f"bench parallel --steps 2 --rounds 1 --scheme {COMPARED}",
    "plan": "plan",
}
"""Column → the command's words, without the workload."""
SAID_OF = ("torch", "date", "commit")
"""What of the environment each cell says."""
WORST_FIRST = ("wrong", "failed", "out of memory", "off", "not checked", "limit")
PLAIN = "not asked for"
"""Why a row of the plain step is not checked: there is nothing plainer beside it."""
PEAK_AGREES = 0.01
"""Peaks of one step that two commands found may differ by this part of them, or by `SMALL_GIB`."""
SMALL_GIB = 16 / 2**20
PREDICTED = 0.05
"""A predicted peak may be off by this part of the measured one."""


def run_cell(words: Sequence[str], out: Path, said: Path, limit_s: float) -> tuple[str, str]:
    """Run a command in a process of its own; how it ended, and the last line it printed."""
    process = multiprocessing.get_context("fork").Process(target=_command, args=(words, said))
    process.start()
    process.join(limit_s)
    if process.exitcode is None:
        assert process.pid is not None
        os.killpg(process.pid, signal.SIGKILL)
        process.join()
        return "hangs", f"longer than {limit_s:g} s"
    lines = [line for line in said.read_text(errors="replace").splitlines() if line.strip()]
    last = next((line for line in reversed(lines) if line.startswith("trainstep: ")), lines[-1] if lines else "")
    ended = {0: "rows", 1: "rows", 2: "refused"}.get(process.exitcode, "crashes")
    return ("crashes" if ended == "rows" and not (out / "results.jsonl").exists() else ended), last


def _command(words: Sequence[str], said: Path) -> None:
    os.setsid()
    for output in (sys.stdout, sys.stderr):
        output.flush()
    with said.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    if words[:2] == ["bench", "parallel"]:
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m"]
        sys.exit(subprocess.run([*launch, "trainstep", *words], cwd=ROOT, check=False).returncode)
    from trainstep.commands.cli import main

    main(words)


def outcome(rows: Sequence[Row], ended: str, last: str) -> dict[str, Any]:
    """What a cell came to, with what was said where it is not right."""
    if ended != "rows":
        return {"what": ended, "rows": len(rows), "said": [last.removeprefix("trainstep: ")]}
    found: dict[str, dict[str, None]] = {}
    for row in rows:
        if row.status != "ok":
            peers = isinstance(row, ParallelRow) and SCHEMES[row.scheme].peer is not None
            is_torch_s = any(each in row.reason for each in (OWN_ARITHMETIC, RIGHT_UNCOMPILED))
            is_limit = row.status == "unsupported" or peers or is_torch_s
            what = "limit" if is_limit else row.status
            found.setdefault(what, {})[f"{row.scheme}: {row.reason}" if peers else str(row.reason)] = None
        elif (why := row.values.get("not_checked")) and why != PLAIN:
            found.setdefault("not checked", {})[str(why)] = None
    off = [row for row in rows if isinstance(row, (PeakRow, CheckpointingRow)) and _is_off(row.prediction_error)]
    for row in off:
        found.setdefault("off", {})[f"predicted peak {row.prediction_error:+.1%}"] = None
    worst = next(
        (each for each in ("wrong", "failed", "out of memory", "off", "not checked", "limit") if each in found), None
    )
    said = list(dict.fromkeys(text for texts in found.values() for text in texts))
    return {"what": worst or ("right" if rows else "crashes"), "rows": len(rows), "said": said}


def _is_off(error: float | None) -> bool:
    return error is not None and abs(error) > PREDICTED


def peaks_disagree(rows: dict[str, Sequence[Row]]) -> str | None:
    """Whether the commands that follow the memory of the plain step in fp32 found different peaks of it."""
    found: dict[str, float] = {}
    for name, kind in (("bench step", StepRow), ("timeline", MemoryTimelineRow), ("peaks", PeakRow)):
        for row in of_kind(rows.get(name, ()), kind):
            is_plain = row.case.get("precision") == "fp32" and row.case.get("mode", "step") == "step"
            if row.status == "ok" and is_plain and row.peak_gib is not None:
                found[name] = row.peak_gib
    if not found or max(found.values()) - min(found.values()) <= max(PEAK_AGREES * max(found.values()), SMALL_GIB):
        return None
    return "peaks differ: " + ", ".join(f"{name} {peak * 1024:.3g} MiB" for name, peak in found.items())


def measure(model: str, commands: Sequence[str], limit_s: float) -> dict[str, dict[str, Any]]:
    """The cells of one model."""
    cells: dict[str, dict[str, Any]] = {}
    rows: dict[str, Sequence[Row]] = {}
    for name in commands:
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "out"
            words = [*COMMANDS[name].split(), "--workload", f"tests.realworld.models:{model}", "--out", str(out)]
            start = time.monotonic()
            ended, last = run_cell(words, out, Path(folder) / "said", limit_s)
            try:
                rows[name] = read_records(out / "results.jsonl") if (out / "results.jsonl").exists() else []
            except UsageError as error:
                ended, last, rows[name] = "crashes", str(error), []
            cells[name] = outcome(rows[name], ended, last) | {"seconds": round(time.monotonic() - start)}
        said = "; ".join(cells[name]["said"])[:110]
        print(f"{model:18} {name:15} {cells[name]['seconds']:4} s {cells[name]['what']} {said}", flush=True)
    if difference := peaks_disagree(rows):
        if model in LEAVES_OUT_LAYERS:
            difference += ": each looked at another step, and layers are left out at random"
        cells["peaks"] |= {"what": "limit" if model in LEAVES_OUT_LAYERS else "off", "said": [difference]}
        print(f"{model:18} {difference}", flush=True)
    return cells


def main() -> None:
    """Measure what was asked for, and keep it beside what is there."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--commands", default=",".join(COMMANDS))
    parser.add_argument("--seconds", type=float, default=600, help="of a command, after which it is ended")
    given = parser.parse_args()
    environment = describe(torch.device("cpu"))
    os.environ |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    os.environ["PYTHONPATH"] = os.pathsep.join((str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")))
    for model in given.models.split(","):
        try:
            importlib.import_module(MODELS[model])
        except ImportError as error:
            print(f"{model:18} left out: {error}", flush=True)
            continue
        cells = measure(model, given.commands.split(","), given.seconds)
        cells = {name: cell | {each: environment[each] for each in SAID_OF} for name, cell in cells.items()}
        kept = json.loads(KEPT.read_text(encoding="utf-8")) if KEPT.exists() else {}
        cells = kept.get(model, {}).get("cells", {}) | cells
        package = importlib.import_module(MODELS[model])
        version = str(getattr(package, "__version__", ""))
        kept[model] = {"package": f"{MODELS[model]} {version}".strip(), "cells": cells}
        kept = {name: kept[name] for name in MODELS if name in kept}
        KEPT.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
