"""Peaks of memory."""

from __future__ import annotations

from collections.abc import Sequence

from trainstep.kinds import RungRow, WorkloadRow
from trainstep.records import Row, of_kind
from trainstep.report import plots
from trainstep.report.analysed import PHASE_NAMES, analysed_step
from trainstep.report.blocks import Block, Chart, Charts, Facts, Section
from trainstep.report.cells import fact, get, gib, number
from trainstep.report.numbers import NONE, as_float
from trainstep.report.plots import Bar


def memory(records: Sequence[Row]) -> Section | None:
    """Peaks by phase and by rung, over what is there at rest."""
    step = analysed_step(records)
    rungs = [row for row in of_kind(records, RungRow) if get(row, "peak_gib") is not None or row.status != "ok"]
    has_peak = step is not None and get(step, "peak_gib") is not None
    if not has_peak and not any(get(row, "peak_gib") is not None for row in rungs):
        return None
    peaks = [get(row, "peak_gib") or 0 for row in [*rungs, *([step] if step else [])]]
    unit, scale = ("GiB", 1.0) if max(peaks) >= 1 else ("MiB", 1024.0)
    charts, blocks = [], list[Block]()
    legend = [("neutral", "there before the step: weights, optimizer state"), ("accent", "comes and goes with it")]
    if has_peak and step is not None:
        rest = get(step, "at_rest_gib") or 0
        names = [name for name in PHASE_NAMES if get(step, f"{name}_peak_gib") is not None]
        rows = [_memory_bar(name, get(step, f"{name}_peak_gib"), rest, unit, scale) for name in names]
        charts.append(Chart("memory-phases", "Peak by phase, of the analysed step", "", plots.bars(rows, unit), legend))
    if len(rungs) > 1:
        rows = [
            _memory_bar(
                str(row.case["rung"]),
                get(row, "peak_gib"),
                get(row, "at_rest_gib") or 0,
                unit,
                scale,
                "" if row.status == "ok" else row.status,
                f"{row.status}: {row.reason}",
            )
            for row in rungs
        ]
        device = max((as_float(row.environment.get("device_memory_gib")) or 0 for row in rungs), default=0)
        limit = device * scale if device and max(peaks) > 0.3 * device else None
        charts.append(
            Chart(
                "memory-rungs",
                "Peak by rung",
                "The dashed line is all the device has." if limit else "",
                plots.bars(rows, unit, limit=limit),
                legend,
            )
        )
    blocks.append(Charts(charts))
    if step is not None:
        known = ("parameters_gib", "optimizer_state_gib", "at_rest_gib", "peak_gib")
        workload = of_kind(records, WorkloadRow)
        source = {**(workload[0].values if workload else {}), **step.values}
        facts = [fact(name, source[name]) for name in known if source.get(name)]
        blocks.append(Facts(facts, name="memory"))
    return Section("memory", "Memory", "Where the memory goes", "", blocks)


def _memory_bar(
    name: str, peak: float | None, rest: float, unit: str, scale: float, status: str = "", reason: str = ""
) -> Bar:
    if peak is None:
        return Bar(name, None, status or NONE, reason if status else "not measured")
    tip = f"peak {gib(peak)}\nat rest {gib(rest)}\nabove that {gib(max(peak - rest, 0))}"
    return Bar(name, peak * scale, f"{number(peak * scale)} {unit}", tip, base=min(rest, peak) * scale)
