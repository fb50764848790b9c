"""Subjects that are not files of their own yet (interim)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from trainstep.kinds import KINDS, SweepRow
from trainstep.records import Row
from trainstep.report.blocks import Section
from trainstep.report.columns import OUTCOME, Column, case_column, mean_column, median_column, value_column
from trainstep.report.finding import Finding
from trainstep.report.numbers import number
from trainstep.report.parallel_columns import PARALLEL_COLUMNS
from trainstep.report.parallel_findings import parallel_findings
from trainstep.report.plan_columns import PLAN_COLUMNS
from trainstep.report.plan_findings import plan_findings
from trainstep.report.sections import attention as attention_sections
from trainstep.report.sections import collectives as collective_sections
from trainstep.report.sections import parallel as parallel_sections
from trainstep.report.sections import plan as plan_sections
from trainstep.report.sections import sweep as sweep_sections
from trainstep.report.sweep_columns import CAPTION, sweep_columns
from trainstep.report.sweep_findings import sweep_findings
from trainstep.report.tables import Definition
from trainstep.report.train_columns import TRAIN_COLUMNS


@dataclass(frozen=True)
class Interim:
    """A subject."""

    TABLES: Sequence[Definition]
    RULES: Sequence[Callable[[Sequence[Row]], list[Finding]]]
    SECTIONS: Sequence[Callable[[Sequence[Row]], Section | None]]


def _tables(columns: Mapping[str, tuple[str, tuple[Column, ...]]]) -> list[Definition]:
    return [Definition(KINDS[kind], caption, those) for kind, (caption, those) in columns.items()]


ATTENTION_COLUMNS: Mapping[str, tuple[str, tuple[Column, ...]]] = {
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
}

attention = Interim(
    _tables({**ATTENTION_COLUMNS, **PARALLEL_COLUMNS, **TRAIN_COLUMNS}),
    (parallel_findings,),
    (attention_sections.attention, collective_sections.collectives, parallel_sections.parallel),
)
plan = Interim(_tables(PLAN_COLUMNS), (plan_findings,), (plan_sections.plan,))
sweep = Interim([Definition(SweepRow, CAPTION, sweep_columns)], (sweep_findings,), (sweep_sections.sweep,))
