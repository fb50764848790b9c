"""What communication costs, in rows of before it was measured in the step itself: the step beyond the one without."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from trainstep.base.schemes import SCHEMES
from trainstep.report.columns import Column
from trainstep.report.numbers import number
from trainstep.rows import ParallelRow
from trainstep.rows.records import Row


def alone_ms(row: ParallelRow, rows: Sequence[ParallelRow]) -> float | None:
    """What a scheme's step would take without communication, from the same run's step on one rank.

    A rank that keeps a part of the optimizer's state updates that part alone: of the one rank's optimizer time, 1/N is
    counted then, N being the ranks of a replica. Nothing is taken off for weights that a rank keeps a part of, whose
    casts it may divide too.
    """
    training = {name: row.case[name] for name in row.case.keys() - {"scheme", "replicas", "blocks_per_group"}}
    same = (each for each in rows if each.scheme == "single" and training.items() <= each.case.items())
    single = next((each for each in same if "step" in each.times), None)
    if single is None:
        return None
    scheme = SCHEMES.get(row.scheme)
    if scheme is None or scheme.planned_as in (None, "ddp"):
        return single.times["step"].median
    update = single.times["optimizer"].median if "optimizer" in single.times else 0.0
    return single.times["step"].median - update * (1 - (row.replicas or 1) / row.world_size)


def communication(rows: Sequence[ParallelRow]) -> Sequence[Column]:
    """Columns of the step without communication, and of the time that a scheme takes beyond it."""

    def beyond(row: Row) -> str:
        value, step = alone_ms(cast("ParallelRow", row), rows), row.values.get("step_ms")
        return number(None if value is None or step is None or row.case["scheme"] == "single" else step - value)

    alone = Column("without communication (ms)", lambda row: number(alone_ms(cast("ParallelRow", row), rows)))
    return alone, Column("beyond that (ms)", beyond)
