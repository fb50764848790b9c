"""Tables of training runs: speed and end, and the curves side by side."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from tables.source import plain, results, where
from trainstep.kinds import TrainRow
from trainstep.report.numbers import number, numeric
from trainstep.report.tables import Table, text_table

SHOWN = 12  # Updates whose losses are shown


def curves() -> Table:
    """The loss of the same updates under each scheme, and how far the schemes are apart."""
    rows = results("h200-train", TrainRow)
    steps = [step for step in rows[0].series["step"] if isinstance(step, int)]
    assert all(list(row.series["step"]) == steps for row in rows), "runs of other lengths"
    shown = sorted({round(index * (len(steps) - 1) / (SHOWN - 1)) for index in range(SHOWN)})
    lines = []
    for index in shown:
        losses = [numeric(row.series["loss"][index]) for row in rows]
        apart = (max(losses) - min(losses)) / min(losses)
        lines.append((str(steps[index]), *(number(loss, 5) for loss in losses), number(apart, 2)))
    columns = ("update", *(f"loss, {row.scheme}" for row in rows), "apart, relative")
    caption = f"{rows[0].workload}, context {rows[0].context}, {rows[0].precision}; {where(rows)}"
    return text_table("train-curves", caption, columns, tuple(lines))


TABLES: Mapping[str, Callable[[], Table]] = {"train": partial(plain, "h200-train", TrainRow), "train-curves": curves}
