"""What forward keeps for backward, and what checkpointing makes of it."""

from __future__ import annotations

from collections.abc import Sequence

from trainstep.kinds import CheckpointingRow, ResidualRow
from trainstep.records import Row, by_case, of_kind
from trainstep.report import plots
from trainstep.report.blocks import Block, Chart, Charts, Section
from trainstep.report.cells import get, gib, number
from trainstep.report.plots import Bar
from trainstep.report.sections.plain import plain_table

PARTS = {"first block": "One block", "step": "The whole step"}
"""Parts of residual records that have charts, the smaller first."""


def residuals(records: Sequence[Row]) -> Section | None:
    """What forward keeps, by module and operation."""
    rows = of_kind(records, ResidualRow)
    if not rows:
        return None
    charts = []
    for part, words in PARTS.items():
        own = [row for row in rows if row.case["part"] == part and get(row, "mib") is not None]
        cases = by_case(own, "what")
        has_precisions = len({row.case.get("precision") for row in own}) > 1
        for place, group in enumerate(cases):
            told = f"{words}, {group[0].case['precision']}" if has_precisions else words
            charts.append(_chart(f"{part}-{place}".replace(" ", "-"), told, group))
    blocks: list[Block] = [Charts(charts)] if charts else []
    for place, own in enumerate(by_case(rows, "part", "what")):
        blocks.append(plain_table("residual", own, f"residuals-{place}"))
    lead = (
        "Tensors that autograd holds on to between forward and backward, without parameters, each storage once. These "
        "are the activations that a larger batch or context multiplies."
    )
    return Section("residuals", "Kept for backward", "What forward keeps for backward", lead, blocks)


def _chart(name: str, words: str, rows: Sequence[Row]) -> Chart:
    bars = []
    for row in rows:
        if row.case["what"] == "all":
            continue
        size, share = get(row, "mib") or 0, get(row, "share") or 0
        what, operation = str(row.case["what"]), row.values.get("operation")
        tip = f"{gib(size / 1024)}, {share:.1%} of it\n{row.values.get('tensor') or 'various tensors'}"
        if operation:
            rank, _, module = what.partition(". ")
            tip = f"{module}\n{tip}"
            is_compiled = operation == "CompiledFunction"  # which names neither operation nor module
            last = module.rpartition(".")[2]
            what = f"{rank}. {row.values['tensor'] if is_compiled else f'{operation}, {last}'}"
        tip += f"\n{number(row.values.get('storages'))} storages"
        bars.append(Bar(what, size, f"{share:.1%}", tip))
    total = next((get(row, "mib") or 0 for row in rows if row.case["what"] == "all"), 0)
    form = "eager" if rows[0].case["compile"] == "off" else "compiled"
    return Chart(f"residuals-{name}", f"{words}, {form}: {gib(total / 1024)}", "", plots.bars(bars, "MiB"))


def checkpointing(records: Sequence[Row]) -> Section | None:
    """The peak under each checkpointing policy, predicted and measured."""
    rows = of_kind(records, CheckpointingRow)
    if not rows:
        return None
    blocks: list[Block] = []
    studies = by_case(rows, "checkpointing")
    blocks.append(Charts([_policies(study, place, len(studies) > 1) for place, study in enumerate(studies)]))
    blocks.append(plain_table("checkpointing", rows))
    lead = (
        "Every K blocks keeps the input of every K blocks and runs the blocks again in backward. Every K costs one "
        "more forward of the blocks, so the K with the smallest peak is the best."
    )
    return Section("checkpointing", "Checkpointing", "What checkpointing makes of it", lead, blocks)


def _policies(rows: Sequence[Row], place: int, is_told: bool) -> Chart:
    largest = max((get(row, name) or 0 for row in rows for name in ("peak_gib", "predicted_gib")), default=0)
    unit, scale = ("GiB", 1.0) if largest >= 1 else ("MiB", 1024.0)
    limit = next((value for row in rows if (value := get(row, "memory_gib")) is not None), None)
    bars = []
    for row in rows:
        peak, predicted = get(row, "peak_gib"), get(row, "predicted_gib")
        tip = f"peak {gib(peak)}, in {row.values.get('peak_phase')}" if peak is not None else row.reason
        tip += f"\npredicted {gib(predicted)}" if predicted is not None else ""
        time = get(row, "step_ms")
        tip += f"\n{number(time)} ms per step" if time is not None else ""
        bars.append(
            Bar(
                str(row.case["checkpointing"]),
                None if peak is None else peak * scale,
                row.status if peak is None else f"{number(peak * scale)} {unit}",
                tip,
                second=None if predicted is None else predicted * scale,
            )
        )
    shown = limit * scale if limit is not None and largest > 0.3 * limit else None
    legend = [("accent", "measured"), ("neutral", "predicted")]
    caption = "The dashed line is the memory there is." if shown else ""
    told = ", ".join(str(rows[0].case[name]) for name in ("precision", "attention") if rows[0].case.get(name))
    title = f"Peak by policy: {told}" if is_told else "Peak by policy"
    return Chart(f"checkpointing-{place}", title, caption, plots.bars(bars, unit, limit=shown), legend)
