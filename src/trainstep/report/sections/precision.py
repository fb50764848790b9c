"""Which dtype everything had, and what adding in half precision does to a sum."""

from __future__ import annotations

from collections.abc import Sequence

from trainstep.kinds import AccumulationRow, DtypeRow
from trainstep.records import Row, by_case, of_kind
from trainstep.report.blocks import Block, Section
from trainstep.report.sections.plain import plain_table


def dtypes(records: Sequence[Row]) -> Section | None:
    """The dtypes that were seen, precision by precision."""
    rows = of_kind(records, DtypeRow)
    if not rows:
        return None
    cases = by_case(rows, "module")
    blocks: list[Block] = [plain_table("dtype", own, f"dtypes-{place}") for place, own in enumerate(cases)]
    lead = "Autocast decides operation by operation, so these are read off the tensors as they passed."
    return Section("dtypes", "Precision", "Which dtype everything had", lead, blocks)


def accumulation(records: Sequence[Row]) -> Section | None:
    """0.01 added a thousand times."""
    rows = of_kind(records, AccumulationRow)
    if not rows:
        return None
    lead = "Why sums, averages and the optimizer stay in float32 when the products do not."
    return Section(
        "accumulation", "Accumulation", "Adding in half precision", lead, [plain_table("accumulation", rows)]
    )
