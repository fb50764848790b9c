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
