"""Predictions beside what was measured: how far `trainstep plan` is off, row by row."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator

from trainstep.config import SIZES, StepConfig
from trainstep.errors import UnsupportedError
from trainstep.plan.layout import Layout
from trainstep.plan.machine import GIB, Cluster, Machine
from trainstep.plan.memory import peak_bytes
from trainstep.plan.parallelism import strategy_plan
from trainstep.plan.roofline import step_seconds
from trainstep.plan.strategy_memory import strategy_memory
from trainstep.records import Record, Scalar
from trainstep.schemes import SCHEMES


def checked(records: Iterable[Record], machine: Machine, network_bytes_per_s: float = 40e9) -> Iterator[Record]:
    """Measured steps of named sizes, each beside its prediction: rows of the kinds step, rung, peak, checkpointing and
    parallel. What has no prediction, as compiled code's memory, stays empty."""
    for row in records:
        if row.status != "ok" or row.case.get("workload") not in SIZES or row.case.get("mode", "step") != "step":
            continue
        scheme = SCHEMES.get(str(row.case.get("scheme", "single")))
        if scheme is None or not scheme.is_planned:
            continue
        strategy = scheme.planned_as or "single"
        model, step = SIZES[str(row.case["workload"])], _step_of(row)
        ranks = int(str(row.case.get("world_size", 1))) if strategy != "single" else 1
        cluster = Cluster(machine, max(ranks, 1), 1, network_bytes_per_s)
        layout = Layout(strategy, ranks)
        values: dict[str, Scalar] = {}
        measured_ms, measured_gib = row.values.get("step_ms"), row.values.get("peak_gib")
        if isinstance(measured_ms, float):
            try:
                seconds = (
                    step_seconds(model, step, machine).total
                    if strategy == "single"
                    else strategy_plan(model, dataclasses.replace(step, loss="dense"), cluster, layout).step_s
                )
            except UnsupportedError:
                pass
            else:
                values |= {
                    "step_ms": measured_ms,
                    "predicted_ms": 1e3 * seconds,
                    "time_error": 1e3 * seconds / measured_ms - 1,
                }
        if isinstance(measured_gib, float):
            try:
                peak_bytes(model, step, on_cuda=True)
                predicted = strategy_memory(model, step, layout).total / GIB
            except UnsupportedError:
                pass
            else:
                values |= {
                    "peak_gib": measured_gib,
                    "predicted_gib": predicted,
                    "memory_error": predicted / measured_gib - 1,
                }
        if values:
            case = {**row.case, "strategy": strategy, "gpus": ranks}
            yield Record("plan check", case, values, environment=row.environment)


def _step_of(row: Record) -> StepConfig:
    names = ("batch", "context", "precision", "compile", "attention", "loss", "optimizer")
    settings = {name: row.case[name] for name in names if row.case.get(name) is not None}
    return StepConfig(**settings, checkpointing=str(row.case.get("checkpointing") or "none"))  # type: ignore[arg-type]
