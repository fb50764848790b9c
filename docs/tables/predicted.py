"""Measured steps beside their predictions, for the tables of notebook/theory.md that say how far the plan is off."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress

from trainstep.base.config import CASE, POLICIES, SIZES, ModelConfig, StepConfig, settings_with
from trainstep.base.errors import UnsupportedError
from trainstep.base.schemes import SCHEMES, Strategy
from trainstep.plan.machine import GIB, Cluster, Machine
from trainstep.plan.memory import peak_bytes
from trainstep.plan.parallelism import strategy_plan
from trainstep.plan.roofline import step_seconds
from trainstep.plan.strategies import Layout, strategy_memory
from trainstep.report import columns
from trainstep.report.tables import define
from trainstep.rows import ParallelRow
from trainstep.rows.records import Row, Scalar, make_row
from trainstep.rows.row import further, setting


class PlanCheckRow(Row, kind="plan check"):
    """A measured step beside its prediction."""

    workload: str = setting()
    strategy: str = setting()
    gpus: int = setting()
    more: Mapping[str, Scalar] = further("case")  # the other settings of the measured row
    step_ms: float | None = None
    predicted_ms: float | None = None
    time_error: float | None = None  # predicted / measured − 1
    peak_gib: float | None = None
    predicted_gib: float | None = None
    memory_error: float | None = None


BESIDE = define(
    PlanCheckRow,
    "Predicted beside measured",
    *columns.named("workload", "batch", "context", "strategy", "gpus"),
    *columns.named("precision", "compile", "attention", "checkpointing", "optimizer"),
    *columns.values({"step (ms)": "step_ms", "predicted (ms)": "predicted_ms"}),
    columns.value("time off by (%)", "time_error", digits=2),
    *columns.values({"peak (GiB)": "peak_gib", "predicted (GiB)": "predicted_gib"}),
    columns.value("memory off by (%)", "memory_error", digits=2),
)


def checked(records: Iterable[Row], machine: Machine, network_bytes_per_s: float = 40e9) -> Iterator[PlanCheckRow]:
    """Measured steps of named sizes, each beside its prediction: rows of the kinds step, change, peak, fit and
    parallel. What has no prediction, as compiled code's memory, stays empty."""
    for row in records:
        if row.status != "ok" or row.case.get("workload") not in SIZES or row.case.get("mode", "step") != "step":
            continue
        scheme = SCHEMES.get(str(row.case.get("scheme", "single")))
        if scheme is None or not scheme.is_planned:
            continue
        policy = str(row.case.get("checkpointing", "none"))
        if policy not in POLICIES and not policy.startswith("@"):
            continue  # of an earlier version, which had policies of several blocks
        strategy: Strategy = scheme.planned_as or "single"
        model, step = SIZES[str(row.case["workload"])], _step_of(row)
        ranks = row.world_size if isinstance(row, ParallelRow) and strategy != "single" else 1
        cluster, layout = Cluster(machine, max(ranks, 1), 1, network_bytes_per_s), _layout(row, strategy, ranks)
        values: dict[str, Scalar] = {}
        if isinstance(step_ms := row.values.get("step_ms"), float):
            with suppress(UnsupportedError):  # no time model
                predicted = 1e3 * _seconds(model, step, cluster, layout)
                values |= {"step_ms": step_ms, "predicted_ms": predicted, "time_error": predicted / step_ms - 1}
        if isinstance(peak_gib := row.values.get("peak_gib"), float):
            with suppress(UnsupportedError):  # no formula
                peak_bytes(model, step, on_cuda=True)  # which refuses what strategies would count as uncompiled
                predicted = strategy_memory(model, step, layout).total / GIB
                values |= {"peak_gib": peak_gib, "predicted_gib": predicted, "memory_error": predicted / peak_gib - 1}
        if values:
            case = {**row.case, "strategy": strategy, "gpus": ranks}
            yield make_row(PlanCheckRow, case, values, environment=row.environment)


def _seconds(model: ModelConfig, step: StepConfig, cluster: Cluster, layout: Layout) -> float:
    machine = cluster.machine
    if layout.strategy == "single":
        launch_s = machine.scheme_launch_seconds("single", step.compile, step.precision, model.num_layers)
        return max(step_seconds(model, step, machine).total, launch_s)
    return strategy_plan(model, dataclasses.replace(step, loss="dense"), cluster, layout).step_s


def _layout(row: Row, strategy: Strategy, ranks: int) -> Layout:
    if not isinstance(row, ParallelRow):
        return Layout(strategy, ranks)
    by_copies, together = row.transport == "peer-copies", row.blocks_per_group or 1
    return Layout(strategy, ranks, replicas=row.replicas or 1, by_copies=by_copies, blocks_per_group=together)


def _step_of(row: Row) -> StepConfig:
    settings = {name: row.case[name] for name in settings_with(CASE) if row.case.get(name) is not None}
    return StepConfig(**settings)  # type: ignore[arg-type]
