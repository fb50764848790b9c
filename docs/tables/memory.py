"""Tables of memory: peaks, what is kept for backward, checkpointing, owners."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from tables.source import SIZE, plain, results, where
from trainstep.records import Row
from trainstep.report.columns import Column, case_column, value_column
from trainstep.report.tables import Table, tabulate


def memory_peaks() -> Table:
    """Peaks of forward alone and of the whole step, by context and precision."""
    rows = results("h200-memory", "peak")
    columns = (
        SIZE,
        *(case_column(name, name) for name in ("batch", "attention", "optimizer", "precision", "context", "mode")),
        value_column("at rest (GiB)", "at_rest_gib"),
        *(value_column(f"{name} (GiB)", f"{name}_peak_gib") for name in ("forward", "loss", "backward")),
        value_column("optimizer (GiB)", "optimizer_peak_gib"),
        value_column("peak (GiB)", "peak_gib", digits=4),
        value_column("predicted (GiB)", "predicted_gib", digits=4),
        value_column("off by (%)", "prediction_error", 100, digits=2),
        Column("outcome", lambda row: row.status),
    )
    return tabulate("memory-peaks", where(rows), columns, sorted(rows, key=_by_precision_and_context))


def _by_precision_and_context(row: Row) -> tuple[bool, int, bool]:
    return row.case["precision"] != "fp32", int(row.case["context"] or 0), row.case["mode"] != "forward"


def memory_residuals() -> Table:
    """What one block keeps, eager and compiled, and the residual stream beside its formula."""
    rows = results("h200-residuals", "residual")
    shown = [row for row in rows if row.case["part"] in ("first block", "residual stream") and row.status == "ok"]
    columns = (
        *(case_column(name, name) for name in ("batch", "context", "attention", "precision")),
        Column("code", lambda row: "eager" if row.case["compile"] == "off" else "compiled"),
        Column("module", lambda row: str(row.case["what"])),
        value_column("kept for", "operation"),
        value_column("tensor", "tensor"),
        value_column("storages", "storages"),
        value_column("MiB", "mib"),
        value_column("share (%)", "share", 100),
        value_column("by formula (MiB)", "formula_mib"),
    )
    return tabulate("memory-residuals", f"One block of 2.7B; {where(rows)}", columns, shown)


def memory_checkpointing() -> Table:
    """Policies at 2.7B, context 2048, predicted and measured."""
    rows = results("h200-checkpointing", "checkpointing")
    columns = (
        SIZE,
        *(case_column(name, name) for name in ("batch", "context", "optimizer", "precision", "attention")),
        Column("policy", lambda row: str(row.case["checkpointing"])),
        value_column("predicted (GiB)", "predicted_gib", digits=4),
        value_column("measured (GiB)", "peak_gib", digits=4),
        value_column("off by (%)", "prediction_error", 100, digits=2),
        value_column("peak in", "peak_phase"),
        value_column("step (ms)", "step_ms"),
        Column("outcome", lambda row: row.status),
    )
    return tabulate("memory-checkpointing", where(rows), columns, rows)


TABLES: Mapping[str, Callable[[], Table]] = {
    "memory-peaks": memory_peaks,
    "memory-residuals": memory_residuals,
    "memory-checkpointing": memory_checkpointing,
    "memory-owners": partial(plain, "h200-allocations", "owner", brief=False),
    "memory-largest": partial(plain, "h200-allocations", "allocation", brief=False),
}
