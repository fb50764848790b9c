"""Schemes of data parallel training: what each one's step takes beyond one without communication, and what it holds."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from trainstep.kinds import ParallelRow, ParallelTraceRow
from trainstep.records import Row, by_case, of_kind
from trainstep.report import charts as plots
from trainstep.report.blocks import Block, Chart, Charts, Section
from trainstep.report.cells import get, number, told_apart
from trainstep.report.charts import Bar
from trainstep.report.numbers import NONE
from trainstep.report.overlap_chart import LEGEND, overlap_chart
from trainstep.report.sections.plain import plain_table

_KINDS = ("weights", "gradients", "optimizer_state")


def parallel(records: Sequence[Row]) -> Section | None:
    """All schemes that were compared, where there are any."""
    rows, traced = of_kind(records, ParallelRow), of_kind(records, ParallelTraceRow)
    if not rows and not traced:
        return None
    lead = (
        "Each scheme first trained a few steps and was compared with one process on the whole batch. A step lasts as "
        "long as on its slowest rank; what communication costs is the difference to the same step without any."
    )
    blocks = [*(_timed(rows) if rows else []), *(_traced(traced) if traced else [])]
    return Section("parallel", "Data parallel", "Data parallel training by scheme", lead, blocks)


def _timed(rows: Sequence[Row]) -> list[Block]:
    alone = next((get(row, "step_ms") for row in rows if row.case["scheme"] == "single"), None)
    charts = [
        Chart(
            "parallel-step",
            "Step on the slowest rank",
            "",
            partial(plots.bars, [_step_bar(row, alone) for row in rows], "ms per step"),
            [("neutral", "the step without communication"), ("accent", "exposed communication and other cost")],
        )
    ]
    if any(get(row, "peak_gib") is not None for row in rows):
        charts.append(
            Chart(
                "parallel-memory",
                "Memory of a rank",
                "",
                partial(plots.bars, [_memory_bar(row) for row in rows], "GiB"),
                [("neutral", "weights, gradients and optimizer state"), ("accent", "all else, at the peak")],
            )
        )
    return [Charts(charts), plain_table("parallel", rows)]


def _traced(rows: Sequence[Row]) -> list[Block]:
    """Steps below one another, a figure for each workload and number of ranks; and their sums."""
    groups = by_case([row for row in rows if row.status == "ok" and get(row, "bars")], "scheme")
    charts = [
        Chart(
            f"parallel-trace{f'-{place}' if place else ''}",
            "One step of rank 0, scheme by scheme, as the profiler saw it",
            _explained(group) + (f" {told_apart(group[0], [each[0] for each in groups])}." if len(groups) > 1 else ""),
            partial(overlap_chart, group),
            LEGEND,
        )
        for place, group in enumerate(groups)
    ]
    return [*(Charts([chart]) for chart in charts), plain_table("parallel trace", rows)]


def _explained(rows: Sequence[Row]) -> str:
    where = (
        "Communication is the time of Gloo’s threads in a collective"
        if any(row.values.get("on_cpu") for row in rows)
        else "Communication is NCCL’s kernels and copies between GPUs"
    )
    shortest = max(get(row, "exposed_from_us") or 0 for row in rows)
    text = (
        f"{where}, waiting for other ranks included; it is exposed where nothing is computed meanwhile (drawn from "
        f"{number(shortest)} µs on, the table has all). Drag over a part, or scroll with Shift, to see it closer."
    )
    if (below := max(get(row, "joined_below_us") or 0 for row in rows)) > 0:
        text += f" Neighbouring kernels that together are shorter than {number(below)} µs are drawn as one."
    return text


def _step_bar(row: Row, alone: float | None) -> Bar:
    scheme, step = str(row.case["scheme"]), get(row, "step_ms")
    if step is None:
        return Bar(scheme, None, row.status, f"{row.status}: {row.reason}")
    tip = f"{number(step)} ms"
    if alone is not None and scheme != "single":
        tip += f"\n{number(step - alone)} ms beyond {number(alone)} ms without communication"
    spread = (get(row, "step_low_ms"), get(row, "step_high_ms"))
    base = step if scheme == "single" else min(alone or 0, step)
    return Bar(scheme, step, f"{number(step)} ms", tip, low=spread[0], high=spread[1], base=base)


def _memory_bar(row: Row) -> Bar:
    scheme, peak = str(row.case["scheme"]), get(row, "peak_gib")
    if peak is None:
        return Bar(scheme, None, NONE, row.reason or "not measured")
    kept = {kind: get(row, f"before_step_{kind}_gib") or 0 for kind in _KINDS}
    tip = "\n".join(
        [f"peak {number(peak)} GiB", *(f"{kind.replace('_', ' ')} {number(v)}" for kind, v in kept.items())]
    )
    return Bar(scheme, peak, f"{number(peak)} GiB", tip, base=min(sum(kept.values()), peak))
