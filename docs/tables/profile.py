"""Tables of what is inside a step: kernels, attention's pieces, families; peaks, what is kept for backward, owners."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from tables import SIZE, one, plain, results, where
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
from trainstep.report import columns
from trainstep.report.columns import Column
from trainstep.report.subjects.kernel_findings import brief_name
from trainstep.report.subjects.memory import residual_name
from trainstep.report.tables import Table, tabulate

PROFILES = "h200-profile"
PROFILED = (SIZE, *columns.named("batch", "context", "precision", "attention"))


def profile_kernels() -> Table:
    """The top kernel of forward and of the step, and matmul's share in both."""
    rows = results(PROFILES, ProfileRow)
    wanted = [*PROFILED]
    for where_, words in (("forward", "forward"), ("step", "the step")):
        wanted += [
            Column(f"top kernel of {words}", partial(_top_kernel, f"top_{where_}_kernel")),
            columns.value(f"its family ({where_})", f"top_{where_}_kernel_family"),
            columns.count(f"calls per {where_}", f"top_{where_}_kernel_calls"),
            columns.value(f"of {words} (%)", f"top_{where_}_kernel_share"),
            columns.value(f"matmul, of {words} (%)", f"matmul_share_{where_}"),
        ]
    return tabulate("profile-kernels", where(rows), wanted, rows)


def _top_kernel(name: str, row: Row) -> str:
    return brief_name(str(row.values[name]))


def profile_attention() -> Table:
    """Softmax beside the score product and the weighted sum in forward: time, FLOPs, bytes."""
    rows = [row for row in results(PROFILES, PieceRow) if row.phase == "forward"]
    wanted = (
        *PROFILED,
        columns.case("piece", "piece"),
        *columns.values({"all its kernels (ms)": "ms", "product or softmax alone (ms)": "main_ms"}),
        columns.value("GFLOP", "main_tflop", scale=1e3),
        *columns.values({"GB": "main_gb", "TFLOP/s": "main_tflops", "GB/s": "main_gb_s"}),
    )
    return tabulate("profile-attention", f"forward; {where(rows)}", wanted, rows)


def profile_families() -> Table:
    """Kernel time of the whole step by family."""
    rows = [row for row in results(PROFILES, FamilyRow) if row.phase == "step"]
    wanted = (
        *PROFILED,
        columns.case("family", "family"),
        columns.count("calls", "calls"),
        *columns.values({"ms": "ms", "share (%)": "share", "TFLOP/s": "tflops", "GB/s": "gb_s"}),
    )
    return tabulate("profile-families", where(rows), wanted, rows)


def profile_sums() -> Table:
    """What attribution covers, what profiling cost, and the kernels' sums beside the step without it."""
    rows = results(PROFILES, ProfileRow)
    wanted = (
        *PROFILED,
        columns.value("in a known phase and module (%)", "module_coverage", digits=5),
        *columns.values({"step (ms)": "step_ms", "profiled (ms)": "profiled_step_ms"}),
        *(columns.value(f"{name}: kernels (ms)", f"{name}_busy_ms") for name in ("forward", "backward", "optimizer")),
        *(columns.value(f"{name}: phase (ms)", f"{name}_ms") for name in ("forward", "backward", "optimizer")),
        columns.value("idle (%)", "idle_share"),
    )
    return tabulate("profile-sums", where(rows), wanted, rows)


def memory_peaks() -> Table:
    """Peaks of forward alone and of the whole step, by context and precision."""
    rows = results("h200-memory", PeakRow)
    wanted = (
        SIZE,
        *columns.named("batch", "attention", "optimizer", "precision", "context", "mode"),
        columns.value("at rest (GiB)", "at_rest_gib"),
        *(columns.value(f"{name} (GiB)", f"{name}_peak_gib") for name in ("forward", "loss", "backward")),
        columns.value("optimizer (GiB)", "optimizer_peak_gib"),
        *columns.values({"peak (GiB)": "peak_gib", "predicted (GiB)": "predicted_gib"}, digits=4),
        columns.value("off by (%)", "prediction_error", digits=2),
        Column("outcome", lambda row: row.status),
    )
    return tabulate("memory-peaks", where(rows), wanted, sorted(rows, key=_by_precision_and_context))


def _by_precision_and_context(row: PeakRow) -> tuple[bool, int, bool]:
    return row.precision != "fp32", row.context or 0, row.mode != "forward"


def memory_residuals() -> Table:
    """What one block keeps, eager and compiled, and the residual stream beside its formula."""
    rows = results("h200-residuals", ResidualRow)
    shown = [row for row in rows if row.part in ("first block", "residual stream") and row.status == "ok"]
    wanted = (
        *columns.named("batch", "context", "attention", "precision"),
        Column("code", lambda row: "eager" if row.case["compile"] == "off" else "compiled"),
        Column("module", residual_name),
        *columns.values({"kept for": "operation", "tensor": "tensor", "storages": "storages", "MiB": "mib"}),
        *columns.values({"share (%)": "share", "by formula (MiB)": "formula_mib"}),
    )
    return tabulate("memory-residuals", f"One block of 2.7B; {where(rows)}", wanted, shown)


def memory_checkpointing() -> Table:
    """Policies at 2.7B, context 2048, predicted and measured."""
    rows = results("h200-checkpointing", CheckpointingRow)
    wanted = (
        SIZE,
        *columns.named("batch", "context", "optimizer", "precision", "attention"),
        columns.case("policy", "checkpointing"),
        *columns.values({"predicted (GiB)": "predicted_gib", "measured (GiB)": "peak_gib"}, digits=4),
        columns.value("off by (%)", "prediction_error", digits=2),
        *columns.values({"peak in": "peak_phase", "step (ms)": "step_ms"}),
        Column("outcome", lambda row: row.status),
    )
    return tabulate("memory-checkpointing", where(rows), wanted, rows)


def headline_memory() -> Table:
    """What checkpointing saves and costs."""
    rows = [
        one("h200-checkpointing", CheckpointingRow, checkpointing=name) for name in ("none", "selective", "every-1")
    ]
    wanted = (
        columns.case("checkpointing", "checkpointing"),
        *columns.values({"peak, predicted (GiB)": "predicted_gib", "peak, measured (GiB)": "peak_gib"}, digits=4),
        columns.value("step (ms)", "step_ms"),
    )
    return tabulate("headline-memory", f"2.7B, context 2,048, bf16, fused attention; {where(rows)}", wanted, rows)


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
    "headline-memory": headline_memory,
}
