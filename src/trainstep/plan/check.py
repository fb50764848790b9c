"""Predictions beside what was measured: how far `trainstep plan` is off, row by row."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator

from trainstep.config import SIZES, ModelConfig, StepConfig
from trainstep.errors import UnsupportedError
from trainstep.kinds import ParallelRow, PlanCheckRow
from trainstep.plan.machine import GIB, Cluster, Machine
from trainstep.plan.memory import peak_bytes
from trainstep.plan.parallelism import strategy_plan
from trainstep.plan.roofline import step_seconds
from trainstep.plan.strategies import Layout, strategy_memory
from trainstep.records import Row, Scalar, make_row
from trainstep.schemes import SCHEMES


def checked(records: Iterable[Row], machine: Machine, network_bytes_per_s: float = 40e9) -> Iterator[PlanCheckRow]:
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
        ranks = row.world_size if isinstance(row, ParallelRow) and strategy != "single" else 1
        cluster = Cluster(machine, max(ranks, 1), 1, network_bytes_per_s)
        layout = Layout(strategy, ranks)
        step_ms, peak_gib = row.values.get("step_ms"), row.values.get("peak_gib")
        seconds = _seconds(model, step, cluster, layout) if isinstance(step_ms, float) else None
        peak = _peak(model, step, layout) if isinstance(peak_gib, float) else None
        values: dict[str, Scalar] = {}
        if isinstance(step_ms, float) and seconds is not None:
            error = 1e3 * seconds / step_ms - 1
            values |= {"step_ms": step_ms, "predicted_ms": 1e3 * seconds, "time_error": error}
        if isinstance(peak_gib, float) and peak is not None:
            values |= {"peak_gib": peak_gib, "predicted_gib": peak / GIB, "memory_error": peak / GIB / peak_gib - 1}
        if values:
            case = {**row.case, "strategy": strategy, "gpus": ranks}
            yield make_row(PlanCheckRow, case, values, environment=row.environment)


def _seconds(model: ModelConfig, step: StepConfig, cluster: Cluster, layout: Layout) -> float | None:
    """Predicted seconds of a step; None where there is no time model."""
    try:
        if layout.strategy == "single":
            return step_seconds(model, step, cluster.machine).total
        return strategy_plan(model, dataclasses.replace(step, loss="dense"), cluster, layout).step_s
    except UnsupportedError:
        return None


def _peak(model: ModelConfig, step: StepConfig, layout: Layout) -> int | None:
    """Predicted peak of a GPU; None where there is no formula."""
    try:
        peak_bytes(model, step, on_cuda=True)  # which refuses what strategies would count as uncompiled
        return strategy_memory(model, step, layout).total
    except UnsupportedError:
        return None


def _step_of(row: Row) -> StepConfig:
    names = ("batch", "context", "precision", "compile", "attention", "loss", "optimizer")
    settings = {name: row.case[name] for name in names if row.case.get(name) is not None}
    return StepConfig(**settings, checkpointing=str(row.case.get("checkpointing") or "none"))  # type: ignore[arg-type]
