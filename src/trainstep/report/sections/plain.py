"""A kind's table on the page."""

from __future__ import annotations

from collections.abc import Sequence

from trainstep.kinds import KINDS
from trainstep.records import Row
from trainstep.report.blocks import Table
from trainstep.report.subjects import TABLES
from trainstep.report.tables import make_table


def plain_table(kind: str, rows: Sequence[Row], name: str = "") -> Table:
    """The table of rows of one kind."""
    return make_table(TABLES[KINDS[kind]], rows, "page", name=name or kind)
