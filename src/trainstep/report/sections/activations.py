"""What forward keeps for backward, and what checkpointing makes of it."""

from __future__ import annotations

from collections.abc import Sequence

from trainstep.report import plots
from trainstep.report.blocks import Block, Chart, Charts, Section
from trainstep.report.cells import get, gib, number
from trainstep.report.plots import Bar
from trainstep.report.records import Record, of_kind
from trainstep.report.sections.plain import plain_table

PARTS = {"first block": "One block", "step": "The whole step"}
"""Parts of residual records that have charts, the smaller first."""


def residuals(records: Sequence[Record]) -> Section | None:
    """What forward keeps, by module and operation."""
    rows = of_kind(records, "residual")
    if not rows:
        return None
    charts = []
    for part, words in PARTS.items():
        own = [row for row in rows if row.case["part"] == part and get(row, "mib") is not None]
        for compiled in dict.fromkeys(row.case["compile"] for row in own):
            group = [row for row in own if row.case["compile"] == compiled]
            if len({tuple(row.case.items()) for row in group}) == len(group) and len(_cases(group)) == 1:
                charts.append(_chart(part, words, str(compiled), group))
    blocks: list[Block] = [Charts(charts)] if charts else []
    blocks.append(plain_table("residual", rows, "residuals"))
    lead = (
        "Tensors that autograd holds on to between forward and backward, without parameters, each storage once. These "
        "are the activations that a larger batch or context multiplies."
    )
    return Section("residuals", "Kept for backward", "What forward keeps for backward", lead, blocks)


def _cases(rows: Sequence[Record]) -> set[tuple[object, ...]]:
    return {tuple(value for name, value in row.case.items() if name not in ("part", "what")) for row in rows}


def _chart(part: str, words: str, compiled: str, rows: Sequence[Record]) -> Chart:
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
            what = f"{rank}. {operation}, {module.rpartition('.')[2]}"
        tip += f"\n{number(row.values.get('storages'))} storages"
        bars.append(Bar(what, size, f"{share:.1%}", tip))
    total = next((get(row, "mib") or 0 for row in rows if row.case["what"] == "all"), 0)
    form = "eager" if compiled == "off" else f"compiled {compiled}"
    name = f"residuals-{part}-{compiled}".replace(" ", "-")
    return Chart(name, f"{words}, {form}: {gib(total / 1024)}", "", plots.bars(bars, "MiB"))


def checkpointing(records: Sequence[Record]) -> Section | None:
    """The peak under each checkpointing policy, predicted and measured."""
    rows = of_kind(records, "checkpointing")
    if not rows:
        return None
    blocks: list[Block] = []
    if len({row.case["checkpointing"] for row in rows}) == len(rows):
        blocks.append(Charts([_policies(rows)]))
    blocks.append(plain_table("checkpointing", rows))
    lead = (
        "Every K blocks keeps the input of every K blocks and runs the blocks again in backward. Every K costs one "
        "more forward of the blocks, so the K with the smallest peak is the best."
    )
    return Section("checkpointing", "Checkpointing", "What checkpointing makes of it", lead, blocks)


def _policies(rows: Sequence[Record]) -> Chart:
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
    return Chart("checkpointing", "Peak by policy", caption, plots.bars(bars, unit, limit=shown), legend)
