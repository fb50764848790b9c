"""A kind's table as the files have it, on the page."""

from __future__ import annotations

import re
from collections.abc import Sequence

from trainstep.records import Record
from trainstep.report.blocks import Cell, Row, Table
from trainstep.report.columns import OUTCOME
from trainstep.report.tables import make_table

_NUMBER = re.compile(r"[-−]?[\d,.]+(e-?\d+)?|–|")
_SHORT = 12
"""Words up to this long are set like numbers, in a narrow column."""
_LONGEST = 60
"""Of longer outcomes only the beginning is shown; the files have them in full."""


def _are_numbers(texts: Sequence[str]) -> bool:
    return all(_NUMBER.fullmatch(text) for text in texts)


def _shortened(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1].rstrip()}…"


def plain_table(kind: str, rows: Sequence[Record], name: str = "") -> Table:
    """The table of records of one kind; columns of numbers or short words are narrow."""
    made = make_table(kind, rows)
    columns = [[row[index] for row in made.rows] for index in range(len(made.columns))]
    is_text = [max(map(len, column), default=0) > _SHORT and not _are_numbers(column) for column in columns]
    found = [
        Row(
            [
                Cell(_shortened(text) if title == OUTCOME.title else text, is_text=words)
                for title, text, words in zip(made.columns, row, is_text, strict=True)
            ],
            str(index),
        )
        for index, row in enumerate(made.rows)
    ]
    return Table(made.caption, made.columns, found, name=name or kind)
