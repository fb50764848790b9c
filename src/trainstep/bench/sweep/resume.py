"""A sweep over its folder: what was finished before is read, the rest is run, and rows come as they are known."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from trainstep.bench.sweep.case import Place
from trainstep.bench.sweep.grid_file import Grid
from trainstep.records import Row, Status

Execute = Callable[[Sequence[Place]], Generator[Place, None, None]]
"""Runs cases and yields each when it has ended and its rows are kept."""

RETRIED: tuple[Status, ...] = ("failed", "out of memory")


def places_of(grid: Grid, out: Path) -> list[Place]:
    """Every case with its folder below `out`."""
    return [Place(case, case.folder(out.resolve() / "cases", grid.axes)) for case in grid.cases]


def is_finished(place: Place, retried: Sequence[Status] = ()) -> bool:
    """Whether a case has ended before, and not with a status that is to be tried again."""
    rows = place.finished()
    return rows is not None and not any(row.status in retried for row in rows)


def sweep_records(
    places: Sequence[Place], execute: Execute, retried: Sequence[Status] = ()
) -> Generator[Row, None, None]:
    """The rows of finished cases, then those of the others as they end, each with its case's number from 1."""
    numbers = {place.case.identity: number for number, place in enumerate(places, start=1)}

    def rows(place: Place) -> Iterator[Row]:
        for row in place.finished() or ():
            yield replace(row, number=numbers[place.case.identity])

    pending = [place for place in places if not is_finished(place, retried)]
    for place in places:
        if place not in pending:
            yield from rows(place)
    with contextlib.closing(execute(pending)) as ended:
        for place in ended:
            yield from rows(place)
