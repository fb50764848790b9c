"""What the tables of a profile show: the summary, families, pieces of attention, kernels."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from trainstep.report.columns import OUTCOME, SETTINGS, Column, case_column, count_column, median_column, value_column

_RATES = (
    value_column("TFLOP", "tflop", brief=False),
    value_column("GB", "gb", brief=False),
    value_column("TFLOP/s", "tflops"),
    value_column("GB/s", "gb_s"),
)
_TOLD = ("workload", "context", "precision")

KERNEL_COLUMNS: Mapping[str, tuple[str, tuple[Column, ...]]] = {
    "profile": (
        "The step without and with the profiler, and what it found",
        (
            *(replace(column, brief=column.title in _TOLD) for column in SETTINGS),
            median_column("step (ms) [95 %]", "step"),
            value_column("with the profiler (ms)", "profiled_step_ms"),
            value_column("its cost (%)", "profiler_cost", 100),
            count_column("kernels per step", "kernels"),
            value_column("busy (ms)", "busy_ms"),
            value_column("idle (%)", "idle_share", 100),
            value_column("in a known phase (%)", "phase_coverage", 100, digits=4),
            value_column("in a known module (%)", "module_coverage", 100, digits=4),
            value_column("matmul, of forward (%)", "matmul_share_forward", 100),
            value_column("matmul, of the step (%)", "matmul_share_step", 100),
            value_column("sums beyond the step", "sums_disagree"),
            value_column("top kernel of forward", "top_forward_kernel", brief=False),
            count_column("its calls per forward", "top_forward_kernel_calls", brief=False),
            value_column("its time (ms)", "top_forward_kernel_ms", brief=False),
            value_column("its share of forward (%)", "top_forward_kernel_share", 100, brief=False),
            value_column("top kernel of the step", "top_step_kernel", brief=False),
            count_column("its calls per step", "top_step_kernel_calls", brief=False),
            value_column("its time (ms) ", "top_step_kernel_ms", brief=False),
            value_column("its share of the step (%)", "top_step_kernel_share", 100, brief=False),
            OUTCOME,
        ),
    ),
    "family": (
        "Kernel time by family, per step; rates over what is counted",
        (
            *SETTINGS,
            Column("phase", lambda row: str(row.case["phase"])),
            Column("family", lambda row: str(row.case["family"])),
            count_column("calls", "calls"),
            value_column("ms", "ms"),
            value_column("share of the phase (%)", "share", 100),
            *_RATES,
            value_column("FLOP per byte", "flop_per_byte"),
        ),
    ),
    "attention piece": (
        "The pieces of eager attention, per step: all kernels of a piece, and its matrix product or softmax alone",
        (
            *SETTINGS,
            Column("phase", lambda row: str(row.case["phase"])),
            Column("piece", lambda row: str(row.case["piece"])),
            value_column("ms", "ms"),
            value_column("product or softmax (ms)", "main_ms"),
            value_column("its GFLOP", "main_tflop", 1e3),
            value_column("its GB", "main_gb"),
            value_column("its TFLOP/s", "main_tflops"),
            value_column("its GB/s", "main_gb_s"),
        ),
    ),
    "kernel": (
        "Kernels by phase and module, per step, the longest first",
        (
            *SETTINGS,
            Column("phase", lambda row: str(row.case["phase"])),
            case_column("module", "module"),
            Column("kernel", lambda row: str(row.case["kernel"])),
            value_column("family", "family"),
            value_column("operator", "operator", brief=False),
            count_column("calls", "calls"),
            value_column("ms", "ms"),
            value_column("mean (µs)", "mean_us"),
            value_column("share (%)", "share", 100),
            *_RATES,
        ),
    ),
}
"""For every kind of record of a profile: its table's caption and columns."""

BRIEF_ROWS: Mapping[str, int] = {"family": 24, "kernel": 20}
"""Rows of long tables that the terminal shows; files have them all."""
