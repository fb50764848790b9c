"""Tables of what is inside a step: kernels, attention's pieces, families; peaks, what is kept for backward, owners."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from tables import SIZE, plain, results, where
from trainstep.kinds import (
    AllocationRow,
    CheckpointingRow,
    FamilyRow,
    OwnerRow,
    PeakRow,
    PieceRow,
    ProfileRow,
    ResidualRow,
)
from trainstep.records import Row
from trainstep.report.columns import Column, case_column, count_column, value_column, value_columns
from trainstep.report.subjects.kernel_findings import brief_name
from trainstep.report.subjects.memory import residual_name
from trainstep.report.tables import Table, tabulate

PROFILES = "h200-profile"
PROFILED = (SIZE, *(case_column(name, name) for name in ("batch", "context", "precision", "attention")))


def profile_kernels() -> Table:
    """The top kernel of forward and of the step, and matmul's share in both."""
    rows = results(PROFILES, ProfileRow)
    columns = [*PROFILED]
    for where_, words in (("forward", "forward"), ("step", "the step")):
        columns += [
            Column(f"top kernel of {words}", partial(_top_kernel, f"top_{where_}_kernel")),
            value_column(f"its family ({where_})", f"top_{where_}_kernel_family"),
            count_column(f"calls per {where_}", f"top_{where_}_kernel_calls"),
            value_column(f"of {words} (%)", f"top_{where_}_kernel_share", 100),
            value_column(f"matmul, of {words} (%)", f"matmul_share_{where_}", 100),
        ]
    return tabulate("profile-kernels", where(rows), columns, rows)


def _top_kernel(name: str, row: Row) -> str:
    return brief_name(str(row.values[name]))


def profile_attention() -> Table:
    """Softmax beside the score product and the weighted sum in forward: time, FLOPs, bytes."""
    rows = [row for row in results(PROFILES, PieceRow) if row.phase == "forward"]
    columns = (
        *PROFILED,
        case_column("piece", "piece"),
        *value_columns({"all its kernels (ms)": "ms", "product or softmax alone (ms)": "main_ms"}),
        value_column("GFLOP", "main_tflop", 1e3),
        *value_columns({"GB": "main_gb", "TFLOP/s": "main_tflops", "GB/s": "main_gb_s"}),
    )
    return tabulate("profile-attention", f"forward; {where(rows)}", columns, rows)


def profile_families() -> Table:
    """Kernel time of the whole step by family."""
    rows = [row for row in results(PROFILES, FamilyRow) if row.phase == "step"]
    columns = (
        *PROFILED,
        case_column("family", "family"),
        count_column("calls", "calls"),
        value_column("ms", "ms"),
        value_column("share (%)", "share", 100),
        *value_columns({"TFLOP/s": "tflops", "GB/s": "gb_s"}),
    )
    return tabulate("profile-families", where(rows), columns, rows)


def profile_sums() -> Table:
    """What attribution covers, what profiling cost, and the kernels' sums beside the step without it."""
    rows = results(PROFILES, ProfileRow)
    columns = (
        *PROFILED,
        value_column("in a known phase and module (%)", "module_coverage", 100, digits=5),
        *value_columns({"step (ms)": "step_ms", "profiled (ms)": "profiled_step_ms"}),
        *(value_column(f"{name}: kernels (ms)", f"{name}_busy_ms") for name in ("forward", "backward", "optimizer")),
        *(value_column(f"{name}: phase (ms)", f"{name}_ms") for name in ("forward", "backward", "optimizer")),
        value_column("idle (%)", "idle_share", 100),
    )
    return tabulate("profile-sums", where(rows), columns, rows)


def memory_peaks() -> Table:
    """Peaks of forward alone and of the whole step, by context and precision."""
    rows = results("h200-memory", PeakRow)
    columns = (
        SIZE,
        *(case_column(name, name) for name in ("batch", "attention", "optimizer", "precision", "context", "mode")),
        value_column("at rest (GiB)", "at_rest_gib"),
        *(value_column(f"{name} (GiB)", f"{name}_peak_gib") for name in ("forward", "loss", "backward")),
        value_column("optimizer (GiB)", "optimizer_peak_gib"),
        *value_columns({"peak (GiB)": "peak_gib", "predicted (GiB)": "predicted_gib"}, digits=4),
        value_column("off by (%)", "prediction_error", 100, digits=2),
        Column("outcome", lambda row: row.status),
    )
    return tabulate("memory-peaks", where(rows), columns, sorted(rows, key=_by_precision_and_context))


def _by_precision_and_context(row: PeakRow) -> tuple[bool, int, bool]:
    return row.precision != "fp32", row.context or 0, row.mode != "forward"


def memory_residuals() -> Table:
    """What one block keeps, eager and compiled, and the residual stream beside its formula."""
    rows = results("h200-residuals", ResidualRow)
    shown = [row for row in rows if row.part in ("first block", "residual stream") and row.status == "ok"]
    columns = (
        *(case_column(name, name) for name in ("batch", "context", "attention", "precision")),
        Column("code", lambda row: "eager" if row.case["compile"] == "off" else "compiled"),
        Column("module", residual_name),
        *value_columns({"kept for": "operation", "tensor": "tensor", "storages": "storages", "MiB": "mib"}),
        value_column("share (%)", "share", 100),
        value_column("by formula (MiB)", "formula_mib"),
    )
    return tabulate("memory-residuals", f"One block of 2.7B; {where(rows)}", columns, shown)


def memory_checkpointing() -> Table:
    """Policies at 2.7B, context 2048, predicted and measured."""
    rows = results("h200-checkpointing", CheckpointingRow)
    columns = (
        SIZE,
        *(case_column(name, name) for name in ("batch", "context", "optimizer", "precision", "attention")),
        case_column("policy", "checkpointing"),
        *value_columns({"predicted (GiB)": "predicted_gib", "measured (GiB)": "peak_gib"}, digits=4),
        value_column("off by (%)", "prediction_error", 100, digits=2),
        *value_columns({"peak in": "peak_phase", "step (ms)": "step_ms"}),
        Column("outcome", lambda row: row.status),
    )
    return tabulate("memory-checkpointing", where(rows), columns, rows)


TABLES: Mapping[str, Callable[[], Table]] = {
    "profile-kernels": profile_kernels,
    "profile-attention": profile_attention,
    "profile-families": profile_families,
    "profile-sums": profile_sums,
    "memory-peaks": memory_peaks,
    "memory-residuals": memory_residuals,
    "memory-checkpointing": memory_checkpointing,
    "memory-owners": partial(plain, "h200-allocations", OwnerRow, brief=False),
    "memory-largest": partial(plain, "h200-allocations", AllocationRow, brief=False),
}
