"""What the tables of data parallel training show: schemes, and their traced steps."""

from __future__ import annotations

from collections.abc import Mapping

from trainstep.report.columns import OUTCOME, SETTINGS, Column, case_column, count_column, median_column, value_column
from trainstep.report.numbers import number

PARALLEL_COLUMNS: Mapping[str, tuple[str, tuple[Column, ...]]] = {
    "parallel": (
        "Schemes of data parallel training: step on the slowest rank, memory on the one that holds most",
        (
            *SETTINGS,
            case_column("ranks", "world_size"),
            case_column("scheme", "scheme"),
            Column("n", lambda row: number(row.values.get("n")), setting=True),
            median_column("step (ms) [95 %]", "step"),
            value_column("beyond single (ms)", "exposed_ms"),
            value_column("tokens/s", "tokens_per_s"),
            value_column("collectives", "collectives"),
            value_column("sent (GiB)", "sent_gib"),
            value_column("sent by plan (GiB)", "sent_floor_gib"),
            *(
                column
                for title, when in (("start", "start"), ("before step", "before_step"), ("after step", "after_step"))
                for column in (
                    value_column(f"{title} (GiB)", f"{when}_gib"),
                    value_column(f"{title} by plan (GiB)", f"predicted_{when}_gib"),
                    *(
                        value_column(f"{title}: {kind} (GiB)", f"{when}_{name}_gib", brief=False)
                        for kind, name in (
                            ("weights", "weights"),
                            ("gradients", "gradients"),
                            ("state", "optimizer_state"),
                        )
                    ),
                )
            ),
            value_column("peak (GiB)", "peak_gib"),
            value_column("loss off by", "loss_error", brief=False),
            value_column("allowed", "loss_allowed", brief=False),
            value_column("update off by", "update_error", brief=False),
            value_column("allowed", "update_allowed", brief=False),
            OUTCOME,
        ),
    ),
    "parallel trace": (
        "One profiled step of rank 0, ms: exposed is communication while nothing is computed, idle is neither",
        (
            *SETTINGS,
            case_column("ranks", "world_size"),
            Column("scheme", lambda row: str(row.case["scheme"])),
            value_column("step without the profiler", "step_ms"),
            value_column("traced, first to last kernel", "span_ms"),
            value_column("computation", "computation_ms"),
            value_column("communication", "communication_ms"),
            value_column("hidden communication", "hidden_communication_ms"),
            value_column("exposed communication", "exposed_communication_ms"),
            value_column("hidden (%)", "hidden_share", 100),
            value_column("idle", "idle_ms"),
            count_column("kernels", "kernels", brief=False),
            OUTCOME,
        ),
    ),
}
"""For every kind of record of data parallel training: its table's caption and columns."""
