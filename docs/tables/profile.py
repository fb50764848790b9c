"""Tables of what is inside a step: kernels, attention's pieces, families; peaks, what is kept for backward, owners."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from tables import OUTCOME, SIZE, of_rows, plain
from trainstep import rows as kinds
from trainstep.report import columns
from trainstep.report.columns import Column
from trainstep.report.subjects import fit
from trainstep.report.subjects.kernel_findings import brief_name
from trainstep.report.subjects.memory import residual_name
from trainstep.report.tables import Table
from trainstep.rows.records import Row

PROFILES = "h200-profile"
PROFILED = (SIZE, *columns.named("batch", "context", "precision", "attention"))
PHASES = ("forward", "backward", "optimizer")
POLICIES = ("none", "selective", "every-1")
"""Of checkpointing, those that README.md shows."""


def top_kernel(part: str, words: str) -> list[Column]:
    """The longest kernel of forward or of the step, and matmul's share."""

    def name(row: Row) -> str:
        return brief_name(str(row.values[f"top_{part}_kernel"]))

    return [
        Column(f"top kernel of {words}", name),
        columns.value(f"its family ({part})", f"top_{part}_kernel_family"),
        columns.count(f"calls per {part}", f"top_{part}_kernel_calls"),
        columns.value(f"of {words} (%)", f"top_{part}_kernel_share"),
        columns.value(f"matmul, of {words} (%)", f"matmul_share_{part}"),
    ]


def _fits(name: str, caption: str) -> Table:
    """Choices of activations, predicted and measured."""
    return of_rows(
        name,
        kinds.FitRow,
        Column("activations", fit.form_of),
        columns.value("budget (GiB)", "budget_gib", 4),
        *columns.values({"predicted (GiB)": "predicted_gib", "measured (GiB)": "peak_gib"}, digits=4),
        columns.value("off by (%)", "prediction_error", digits=2),
        columns.value("predicted (ms)", "predicted_ms"),
        columns.median("step (ms) [95 %]", "step"),
        columns.value("off by (%)", "time_error", digits=2),
        *columns.values(
            {"blocks kept": "blocks_kept", "computed again": "blocks_again", "in host memory (GiB)": "host_gib"}
        ),
        caption=caption,
    )


TABLES: Mapping[str, Callable[[], Table]] = {
    "profile-kernels": partial(
        of_rows,
        PROFILES,
        kinds.ProfileRow,
        *PROFILED,
        *top_kernel("forward", "forward"),
        *top_kernel("step", "the step"),
    ),
    "profile-attention": partial(
        of_rows,
        PROFILES,
        kinds.PieceRow,
        *PROFILED,
        columns.case("piece", "piece"),
        *columns.values({"all its kernels (ms)": "ms", "product or softmax alone (ms)": "main_ms"}),
        columns.value("GFLOP", "main_tflop", scale=1e3),
        *columns.values({"GB": "main_gb", "TFLOP/s": "main_tflops", "GB/s": "main_gb_s"}),
        caption="forward",
        only=lambda row: row.phase == "forward",
    ),
    "profile-families": partial(
        of_rows,
        PROFILES,
        kinds.FamilyRow,
        *PROFILED,
        columns.case("family", "family"),
        columns.count("calls", "calls"),
        *columns.values({"ms": "ms", "share (%)": "share", "TFLOP/s": "tflops", "GB/s": "gb_s"}),
        only=lambda row: row.phase == "step",
    ),
    "profile-sums": partial(
        of_rows,
        PROFILES,
        kinds.ProfileRow,
        *PROFILED,
        columns.value("in a known phase and module (%)", "module_coverage", digits=5),
        *columns.values({"step (ms)": "step_ms", "profiled (ms)": "profiled_step_ms"}),
        *columns.values({f"{name}: kernels (ms)": f"{name}_busy_ms" for name in PHASES}),
        *columns.values({f"{name}: phase (ms)": f"{name}_ms" for name in PHASES}),
        columns.value("idle (%)", "idle_share"),
    ),
    "memory-peaks": partial(
        of_rows,
        "h200-memory",
        kinds.PeakRow,
        SIZE,
        *columns.named("batch", "attention", "optimizer", "precision", "context", "mode"),
        columns.value("at rest (GiB)", "at_rest_gib"),
        *columns.values({f"{name} (GiB)": f"{name}_peak_gib" for name in ("forward", "loss", "backward", "optimizer")}),
        *columns.values({"peak (GiB)": "peak_gib", "predicted (GiB)": "predicted_gib"}, digits=4),
        columns.value("off by (%)", "prediction_error", digits=2),
        OUTCOME,
        key=lambda row: (row.precision != "fp32", row.context or 0, row.mode != "forward"),
    ),
    "memory-residuals": partial(
        of_rows,
        "h200-residuals",
        kinds.ResidualRow,
        *columns.named("batch", "context", "attention", "precision"),
        Column("code", lambda row: "eager" if row.case["compile"] == "off" else "compiled"),
        Column("module", residual_name),
        *columns.values({"kept for": "operation", "tensor": "tensor", "storages": "storages", "MiB": "mib"}),
        *columns.values({"share (%)": "share", "by formula (MiB)": "formula_mib"}),
        caption="2.7B, one block",
        only=lambda row: row.part in ("first block", "residual stream") and row.status == "ok",
    ),
    "memory-checkpointing": partial(
        of_rows,
        "h200-checkpointing",
        kinds.CheckpointingRow,
        SIZE,
        *columns.named("batch", "context", "optimizer", "precision", "attention"),
        columns.case("policy", "checkpointing"),
        *columns.values({"predicted (GiB)": "predicted_gib", "measured (GiB)": "peak_gib"}, digits=4),
        columns.value("off by (%)", "prediction_error", digits=2),
        *columns.values({"peak in": "peak_phase", "step (ms)": "step_ms"}),
        OUTCOME,
    ),
    "headline-memory": partial(
        of_rows,
        "h200-checkpointing",
        kinds.CheckpointingRow,
        columns.case("checkpointing", "checkpointing"),
        *columns.values({"peak, predicted (GiB)": "predicted_gib", "peak, measured (GiB)": "peak_gib"}, digits=4),
        columns.value("step (ms)", "step_ms"),
        caption="2.7B, context 2,048, bf16, fused attention",
        only=lambda row: row.checkpointing in POLICIES,
        key=lambda row: POLICIES.index(row.checkpointing),
    ),
    "memory-fit": partial(
        _fits, "h200-fit", "2.7B, batch 8, context 2,048, bf16, SDPA, fused AdamW; budgets of 50, 65, 80 %"
    ),
    "memory-fit-8192": partial(
        _fits, "h200-fit-8192", "2.7B, batch 2, context 8,192, bf16, SDPA, fused AdamW; budgets of 50, 65, 80 %"
    ),
    "memory-fit-gpt2": partial(
        _fits,
        "h200-fit-gpt2",
        "GPT-2 of transformers, 64 × 1,024 tokens, bf16, SDPA, fused AdamW; budgets of 50, 65, 80 %",
    ),
    "memory-fit-llama": partial(
        _fits,
        "h200-fit-llama",
        "A Llama of 1.04 B from transformers, 8 × 2,048 tokens, bf16, SDPA, fused AdamW; budgets of 50, 65, 80 %",
    ),
    "memory-owners": partial(plain, "h200-allocations", kinds.OwnerRow, brief=False),
    "memory-largest": partial(plain, "h200-allocations", kinds.AllocationRow, brief=False),
}
