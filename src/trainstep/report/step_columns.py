"""Columns of steps (interim)."""

from __future__ import annotations

from collections.abc import Mapping

from trainstep.report.columns import (
    OUTCOME,
    SETTINGS,
    Column,
    case_column,
    mean_column,
    median_column,
    ratio_column,
    value_column,
)
from trainstep.report.numbers import number

COLUMNS: Mapping[str, tuple[str, tuple[Column, ...]]] = {
    "workload": (
        "The workload",
        (
            case_column("workload", "workload"),
            value_column("parameters", "parameters"),
            value_column("weights (GiB)", "parameters_gib"),
            value_column("blocks", "blocks"),
            value_column("tokens per step", "tokens"),
            value_column("forward (TFLOP)", "forward_tflop"),
        ),
    ),
    "step": (
        "Time of one step and its phases, ms",
        (
            *SETTINGS,
            case_column("mode", "mode"),
            case_column("warm-up", "warmup"),
            case_column("pass", "repeat"),
            Column("n", lambda row: number(row.values.get("n")), setting=True),
            *(value_column(name, f"{name}_ms") for name in ("forward", "loss", "backward", "optimizer")),
            median_column("step [95 %]", "step"),
            *(
                mean_column(f"{name}, mean ± std", name)
                for name in ("forward", "loss", "backward", "optimizer", "step")
            ),
            value_column("host waits", "wait_ms", brief=False),
            value_column("first step", "first_step_ms"),
            value_column("tokens/s", "tokens_per_s", brief=False),
            value_column("TFLOP/s", "achieved_tflops", brief=False),
            value_column("utilisation (%)", "utilisation", 100, brief=False),
            value_column("peak (GiB)", "peak_gib"),
            OUTCOME,
        ),
    ),
    "rung": (
        "The ladder: one change per rung, each checked against the first rung's loss and gradients",
        (
            *SETTINGS[:3],
            Column("rung", lambda row: str(row.case["rung"])),
            median_column("step (ms) [95 %]", "step"),
            ratio_column("speed-up [95 %]", "speedup"),
            ratio_column("against the rung before", "gain", brief=False),
            value_column("peak (GiB)", "peak_gib"),
            value_column("utilisation (%)", "utilisation", 100, brief=False),
            value_column("gradient error", "gradient_error", digits=2),
            value_column("budget", "error_budget", digits=2),
            value_column("verdict", "verdict"),
            Column("kept", lambda row: "yes" if row.values.get("kept") else "no", brief=False),
            Column("reason", lambda row: row.reason, brief=False),
        ),
    ),
    "control": (
        "The baseline at the start of the ladder and at its end: the interval of their ratio should contain 1",
        (
            *SETTINGS[:3],
            value_column("start (ms)", "first_ms"),
            value_column("end (ms)", "again_ms"),
            ratio_column("end / start [95 %]", "ratio"),
            OUTCOME,
        ),
    ),
    "attention": (
        "Attention: median of the passes in ms; TFLOP/s counts causal attention as half, backward as 2.5 forwards",
        (
            *(case_column(name, name) for name in ("dtype", "causal", "batch", "heads", "head_dim", "seq")),
            Column("implementation", lambda row: str(row.case["impl"])),
            value_column("forward", "forward_ms"),
            value_column("backward", "backward_ms"),
            median_column("both [95 %]", "both"),
            value_column("TFLOP/s forward", "forward_tflops", brief=False),
            value_column("TFLOP/s backward", "backward_tflops", brief=False),
            value_column("TFLOP/s", "both_tflops"),
            value_column("before backward (GiB)", "before_backward_gib"),
            value_column("by formula (GiB)", "predicted_before_backward_gib", brief=False),
            value_column("peak (GiB)", "peak_gib"),
            value_column("peak by formula (GiB)", "predicted_peak_gib"),
            value_column("score matrices at the peak", "score_matrices_at_peak", brief=False),
            value_column("error of o", "o_error", digits=2, brief=False),
            value_column("check and compilation (s)", "check_s", digits=2, brief=False),
            value_column("graphs compiled", "compilations", brief=False),
            value_column("recompiled while timed", "recompilations_timed", brief=False),
            OUTCOME,
        ),
    ),
    "collective": (
        "Collectives: time on the slowest rank; bus bandwidth is bytes on each link of a ring over that time",
        (
            *(case_column(name, name) for name in ("backend", "dtype", "collective")),
            case_column("ranks", "world_size"),
            case_column("MB", "size_mb"),
            Column("n", lambda row: number(row.values.get("n")), setting=True),
            median_column("time (ms) [95 %]", "time"),
            mean_column("mean ± std", "time"),
            value_column("fastest rank (ms)", "fastest_rank_ms", brief=False),
            value_column("slowest rank (ms)", "slowest_rank_ms", brief=False),
            value_column("algorithm GB/s", "algorithm_gb_s"),
            value_column("bus GB/s", "bus_gb_s"),
            OUTCOME,
        ),
    ),
    "collective fit": (
        "What a call costs: an overhead, and bytes on each link at a bandwidth",
        (
            *(case_column(name, name) for name in ("backend", "dtype", "collective")),
            case_column("ranks", "world_size"),
            value_column("overhead (µs)", "overhead_us"),
            value_column("bus GB/s", "bus_gb_s"),
            value_column("sizes", "sizes"),
            value_column("worst error (%)", "worst_error", 100, digits=2),
        ),
    ),
    "ceiling": (
        "What this device reaches",
        (
            Column(
                "operation",
                lambda row: " ".join(str(row.case[name]) for name in ("operation", "precision") if name in row.case),
            ),
            value_column("TFLOP/s", "tflops"),
            value_column("GB/s, read + written", "gb_s"),
        ),
    ),
    "dtype": (
        "The dtype of everything in a training step; alike modules as one row",
        (
            *SETTINGS,
            case_column("module", "module"),
            value_column("class", "class_name"),
            value_column("modules", "modules"),
            *(value_column(name, name) for name in ("parameters", "inputs", "outputs", "gradients")),
            OUTCOME,
        ),
    ),
    "accumulation": (
        "0.01 added a thousand times",
        (
            case_column("accumulator", "accumulator"),
            case_column("addend", "addend"),
            Column("sum", lambda row: f"{row.values['total']:.4f}"),
            value_column("why", "why"),
        ),
    ),
}
"""For every kind of record: its table's caption and columns."""
