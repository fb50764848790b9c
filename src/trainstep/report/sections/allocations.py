"""The allocations of one step, or of a snapshot: the stacked timeline, who owns the peak, the largest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from trainstep.kinds import AllocationRow, MemoryTimelineRow, OwnerRow
from trainstep.records import Row, Scalar, belonging, of_kind
from trainstep.report.allocation_chart import allocation_chart, layout_data, roles
from trainstep.report.blocks import Block, Cell, Chart, Charts, Section, Table, TableRow
from trainstep.report.cells import cell_of, get, gib, number, told_apart
from trainstep.report.numbers import NONE


def allocations(records: Sequence[Row]) -> Section | None:
    """All memory timelines, where there are any."""
    rows = of_kind(records, MemoryTimelineRow)
    if not rows:
        return None
    blocks: list[Block] = []
    for place, row in enumerate(rows):
        title = told_apart(row, rows)
        if row.status != "ok":
            failed = TableRow([Cell(title, is_text=True), Cell(row.status, note=row.reason, tone="bad", is_text=True)])
            blocks.append(Table("Not recorded", ["Step", "Outcome"], [failed]))
            continue
        blocks.append(Charts([_chart(row, title, place)]))
        blocks.append(_owners(belonging(records, OwnerRow, row), title, place))
        blocks.append(_largest(belonging(records, AllocationRow, row), title, place))
    lead = (
        "Every allocation, from the event that made it to the event that freed it. Drag over a part to see it closer; "
        "hover for an allocation’s size and the line of code that made it. What always stays is drawn as one at first; "
        "the slider shows more."
    )
    return Section("allocations", "Allocations", "Every allocation of the step", lead, blocks)


def _chart(row: Row, title: str, place: int) -> Chart:
    peak = get(row, "peak_gib") or 0
    unit, scale = ("GiB", 1.0) if peak >= 1 else ("MiB", 1024.0)
    groups = [str(name) for name in row.series["groups"]]
    order = sorted(range(len(groups)), key=lambda index: -int(str(row.series["bands"][index])))
    phase = row.values.get("peak_phase")
    caption = (
        f"The dashed line is the peak: {gib(peak)}{f', in {phase}' if phase else ''}. The black line is the total, "
        "small allocations included."
    )
    left_out = (get(row, "allocations") or 0) - (get(row, "drawn") or 0)
    if left_out > 0:
        caption += (
            f" Of {number(row.values['allocations'])} allocations, the {number(int(left_out))} below "
            f"{number(row.values['smallest_drawn_mib'])} MiB are only in sums."
        )
    swatches = roles(groups)
    return Chart(
        f"allocations-{place}",
        f"Live memory: {title}",
        caption,
        allocation_chart(row, unit, scale),
        [(swatches[index], groups[index]) for index in order],
        layout_data(row, unit, scale),
    )


def _owners(rows: Sequence[Row], title: str, place: int) -> Table:
    table_rows = []
    for row in rows:
        whole = row.case["part"] == "all"
        name = str(row.case["owner"]) if whole else f"· {row.case['part']}"
        share = get(row, "share") or 0
        cells = [
            Cell(name, is_text=True, tone="" if whole else "quiet"),
            cell_of(row, "mib", _mib),
            Cell(f"{share:.1%}", share, "share"),
            cell_of(row, "allocations"),
        ]
        table_rows.append(TableRow(cells, f"{row.case['owner']}: {row.case['part']}", is_strong=whole))
    columns = ["Owner", "Size", "Share of the peak", "Allocations"]
    return Table(f"Who owns the peak: {title}", columns, table_rows, name=f"owners-{place}")


def _largest(rows: Sequence[Row], title: str, place: int) -> Table:
    has_owners = any(row.values.get("made_in") for row in rows)
    words: Mapping[str, str] = {"owner": "Owner", "module": "Module or parameter", "made_in": "Made in"}
    texts = {name: title for name, title in words.items() if has_owners}
    table_rows = []
    for row in rows:
        cells = [cell_of(row, "mib", _mib), cell_of(row, "count")]
        cells += [Cell(_text(row.values.get(name)), is_text=True) for name in (*texts, "line")]
        table_rows.append(TableRow(cells, str(row.case["rank"])))
    columns = ["Size", "Times", *texts.values(), "Line of code"]
    return Table(f"The largest allocations: {title}", columns, table_rows, name=f"largest-{place}")


def _text(value: Scalar) -> str:
    return str(value) if value else NONE


def _mib(value: Scalar) -> str:
    return gib(float(value) / 1024) if isinstance(value, (int, float)) else NONE
