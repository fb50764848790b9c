"""Run every command on every model of tests/realworld/models.py: docs/results/cpu-models.json.

python docs/measure_models.py                              # all: two hours and more, on the CPU
python docs/measure_models.py --models llama,t5 --commands profile,dtypes
python docs/measure_models.py --seconds 120                # stop a command that takes longer

A cell is a process of its own. Cells that are not measured are kept, each with its commit, so the table can be filled
in parts, and by several interpreters: models whose package this one lacks are left as they are.
"""

from __future__ import annotations

import importlib
import json
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from measuring import Ended, keep, origin_of, parser, run
from tables import RESULTS
from tests.realworld.models import LEAVES_OUT_LAYERS, MODELS
from trainstep.base.schemes import SCHEMES
from trainstep.check.reference import OWN_ARITHMETIC
from trainstep.check.step import RIGHT_UNCOMPILED
from trainstep.rows import MemoryTimelineRow, ParallelRow, PeakRow, StepRow
from trainstep.rows.records import Row, of_kind

COMPARED = "single,naive,flat,overlapped,bucketed-25,sharded-optimizer,fsdp,torch-ddp,torch-zero,torch-fsdp2"
KEPT = RESULTS / "cpu-models.json"
COMMANDS = {
    "analyze": "analyze --steps 7",
    "profile": "profile --steps 3",
    "dtypes": "dtypes --precision fp32,bf16",
    "timeline": "memory --timeline",
    "residuals": "memory --residuals",
    "checkpointing": "memory --peaks --mode step --policies none,every-1,selective",
    "peaks": "memory --peaks",
    "bench step": "bench step --precision fp32,bf16 --steps 3",
    "bench parallel": f"bench parallel --steps 2 --rounds 1 --scheme {COMPARED}",
    "plan": "plan",
}
"""Column → the command's words, without the workload."""
WORST_FIRST = ("wrong", "failed", "out of memory", "off", "not checked", "limit")
PLAIN = "not asked for"
"""Why a row of the plain step is not checked: there is nothing plainer beside it."""
PEAK_AGREES = 0.01
"""Peaks of one step that two commands found may differ by this part of them, or by `SMALL_GIB`."""
SMALL_GIB = 16 / 2**20
PREDICTED = 0.05
"""A predicted peak may be off by this part of the measured one."""


def outcome(ended: Ended) -> dict[str, Any]:
    """What a cell came to, with what was said where it is not right."""
    rows = ended.rows
    if ended.how != "rows":
        return {"what": ended.how, "rows": len(rows), "said": [ended.last.removeprefix("trainstep: ")]}
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
        if isinstance(row, PeakRow) and abs(row.prediction_error or 0) > PREDICTED:
            found.setdefault("off", {})[f"predicted peak {row.prediction_error:+.1%}"] = None
    worst = next((each for each in WORST_FIRST if each in found), None)
    said = list(dict.fromkeys(text for texts in found.values() for text in texts))
    return {"what": worst or ("right" if rows else "crashes"), "rows": len(rows), "said": said}


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
            words = [*COMMANDS[name].split(), "--workload", f"tests.realworld.models:{model}", "--out", folder]
            start, ranks = time.monotonic(), 2 if name == "bench parallel" else 1
            ended = run(words, Path(folder), ranks=ranks, environment={"OMP_NUM_THREADS": "1"}, limit_s=limit_s)
        rows[name] = ended.rows
        cells[name] = outcome(ended) | {"seconds": round(time.monotonic() - start)}
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
    asked = parser(__doc__)
    asked.add_argument("--models", default=",".join(MODELS))
    asked.add_argument("--commands", default=",".join(COMMANDS))
    asked.add_argument("--seconds", type=float, default=600, help="of a command, after which it is ended")
    given = asked.parse_args()
    origin = origin_of("cpu")
    for model in given.models.split(","):
        try:
            package = importlib.import_module(MODELS[model])
        except ImportError as error:
            print(f"{model:18} left out: {error}", flush=True)
            continue
        cells = measure(model, given.commands.split(","), given.seconds)
        cells = {name: cell | origin for name, cell in cells.items()}
        before = json.loads(KEPT.read_text(encoding="utf-8")).get(model, {}) if KEPT.exists() else {}
        version = f"{MODELS[model]} {getattr(package, '__version__', '')}".strip()
        keep(KEPT, model, {"package": version, "cells": before.get("cells", {}) | cells}, MODELS)


if __name__ == "__main__":
    main()
