"""A table drawn in a terminal, under one another in parts where its columns do not fit side by side."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from itertools import chain, combinations

import rich.box
import rich.table
from rich.cells import cell_len
from rich.console import Group
from rich.text import Text

from trainstep.base.errors import printable
from trainstep.report.tables import Table

LONGEST_CELL = 60
"""Characters of a cell that are shown; the files have all."""

_NOT_BROKEN = 24  # places of a cell that stay on one line
_GAP, _EDGES = 3, 2  # characters between columns, and at both ends of a line


def to_terminal(table: Table, width: int) -> Group:
    """The table for `width` characters a line: its caption, and under it as many columns as fit.

    The others follow in further parts, each with the columns that tell rows apart. Numbers are never broken; markup in
    cells is shown, not obeyed, and long reasons are cut.
    """
    caption = Text(printable(table.caption), style="table.title")
    rows = [[_cut(cell) for cell in row] for row in table.texts()]
    titles = [printable(title) for title in table.columns]
    columns = [[title, *cells] for title, *cells in zip(titles, *rows, strict=True)]
    least, parts = [_least(column) for column in columns], [list(range(len(columns)))]
    if _total(max(map(cell_len, column)) for column in columns) > width:
        titles = ["\n".join(textwrap.wrap(title, size)) for title, size in zip(titles, least, strict=True)]
        parts = _parts(least, _telling_apart(rows, least, width), width)
    has_room = [_total(least[column] for column in part) <= width for part in parts]
    return Group(caption, *(_draw(titles, rows, part, fits) for part, fits in zip(parts, has_room, strict=True)))


def _draw(titles: Sequence[str], rows: Sequence[Sequence[str]], part: Sequence[int], fits: bool) -> rich.table.Table:
    drawn = rich.table.Table(box=rich.box.SIMPLE_HEAD, pad_edge=False)
    for column in part:
        is_whole = all(cell_len(row[column]) <= _NOT_BROKEN or " " not in row[column] for row in rows)
        drawn.add_column(Text(titles[column]), overflow="fold", no_wrap=fits and is_whole)
    for row in rows:
        drawn.add_row(*(Text(row[column]) for column in part))
    return drawn


def _parts(least: Sequence[int], keys: Sequence[int], width: int) -> list[list[int]]:
    """The columns of each part: the keys, and others in order as long as there is room, at least one."""
    parts = [list(keys)]
    for column in range(len(least)):
        if column in keys:
            continue
        is_full = _total(least[each] for each in (*parts[-1], column)) > width
        if is_full and len(parts[-1]) > len(keys):
            parts.append(list(keys))
        parts[-1].append(column)
    return [sorted(part) for part in parts]


def _telling_apart(rows: Sequence[Sequence[str]], least: Sequence[int], width: int) -> Sequence[int]:
    """The fewest columns that tell all rows apart in two thirds of the width, the first among them and at most three,
    as far left as can be; the first alone if there are none."""
    for count in range(3):
        for others in combinations(range(1, len(least)), count):
            keys = (0, *others)
            is_narrow = _total(least[each] for each in keys) <= width * 2 // 3
            if is_narrow and len({tuple(row[each] for each in keys) for row in rows}) == len(rows):
                return keys
    return (0,)


def _total(widths: Iterable[int]) -> int:
    every = list(widths)
    return sum(every) + _GAP * (len(every) - 1) + _EDGES


def _least(column: Sequence[str]) -> int:
    """Characters that a column needs so that no word of it is broken, and no short cell."""
    title, *cells = column
    words = chain(title.split(), *(cell.split() for cell in cells))
    return max([1, *map(cell_len, words), *(min(cell_len(cell), _NOT_BROKEN) for cell in cells)])


def _cut(cell: str) -> str:
    return cell if len(cell) <= LONGEST_CELL else cell[: LONGEST_CELL - 1] + "…"
