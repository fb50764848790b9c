"""Tables of memory: peaks, a step's allocations, what forward keeps, checkpointing policies."""

from __future__ import annotations

from collections.abc import Mapping

from trainstep.report.columns import OUTCOME, SETTINGS, Column, case_column, median_column, value_column

_TELLING = ("workload", "context", "batch", "precision", "compile", "checkpointing")

MEMORY_COLUMNS: Mapping[str, tuple[str, tuple[Column, ...]]] = {
    "peak": (
        "Peak memory by phase, GiB",
        (
            *SETTINGS,
            case_column("mode", "mode"),
            value_column("at rest", "at_rest_gib"),
            *(value_column(name, f"{name}_peak_gib") for name in ("forward", "loss", "backward", "optimizer")),
            value_column("peak", "peak_gib", digits=4),
            value_column("predicted", "predicted_gib", digits=4),
            value_column("prediction off by (%)", "prediction_error", 100, digits=2),
            OUTCOME,
        ),
    ),
    "memory-timeline": (
        "Every allocation of one step",
        (
            *(column for column in SETTINGS if column.title in _TELLING),
            case_column("device", "device"),
            value_column("at rest (GiB)", "at_rest_gib"),
            value_column("peak (GiB)", "peak_gib", digits=4),
            value_column("by the allocator (GiB)", "allocator_gib", digits=4),
            value_column("peak in", "peak_phase"),
            value_column("no owner at the peak (%)", "unknown_share", 100, digits=2),
            value_column("allocations", "allocations"),
            value_column("events", "events", brief=False),
            value_column("snapshot", "snapshot"),
            OUTCOME,
        ),
    ),
    "owner": (
        "Who owns the peak",
        (
            *SETTINGS,
            case_column("device", "device"),
            Column("owner", lambda row: str(row.case["owner"])),
            Column("part", lambda row: str(row.case["part"])),
            value_column("MiB", "mib"),
            value_column("share of the peak (%)", "share", 100),
            value_column("allocations", "allocations"),
        ),
    ),
    "allocation": (
        "The largest allocations of the step, and the line of code that made them",
        (
            *SETTINGS,
            case_column("device", "device"),
            Column("rank", lambda row: str(row.case["rank"])),
            value_column("MiB", "mib"),
            value_column("times", "count"),
            value_column("owner", "owner"),
            value_column("module", "module"),
            value_column("made in", "made_in"),
            value_column("line", "line"),
        ),
    ),
    "residual": (
        "What forward keeps for backward, without parameters; each storage once",
        (
            *SETTINGS,
            case_column("part", "part"),
            Column("what", lambda row: str(row.case["what"])),
            value_column("kept for", "operation"),
            value_column("tensor", "tensor"),
            value_column("storages", "storages"),
            value_column("MiB", "mib"),
            value_column("share (%)", "share", 100),
            value_column("formula (MiB)", "formula_mib"),
            OUTCOME,
        ),
    ),
    "checkpointing": (
        "One training step under checkpointing policies: peak memory predicted and measured, and time",
        (
            *(column for column in SETTINGS if column.title != "checkpointing"),
            Column("checkpointing", lambda row: str(row.case["checkpointing"])),
            value_column("predicted (GiB)", "predicted_gib", digits=4),
            value_column("peak (GiB)", "peak_gib", digits=4),
            value_column("prediction off by (%)", "prediction_error", 100, digits=2),
            value_column("peak in", "peak_phase"),
            median_column("step (ms) [95 %]", "step"),
            OUTCOME,
        ),
    ),
}
"""For every kind of record about memory: its table's caption and columns."""
