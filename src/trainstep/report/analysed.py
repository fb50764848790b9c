"""The step that was taken apart: which row it is, and what else was measured of the same step."""

from __future__ import annotations

from collections.abc import Sequence

from trainstep.kinds import StepRow
from trainstep.records import Row, of_kind
from trainstep.report.numbers import numeric

PHASE_NAMES = ("forward", "loss", "backward", "optimizer")


def full_steps(records: Sequence[Row]) -> list[StepRow]:
    """The rows of the one full step that was taken apart, one per warm-up; none where a grid of steps was measured."""
    rows = [row for row in of_kind(records, StepRow) if row.status == "ok" and row.case["mode"] == "step"]
    cases = {tuple((name, value) for name, value in row.case.items() if name != "warmup") for row in rows}
    return rows if len(cases) == 1 else []


def analysed_step(records: Sequence[Row]) -> StepRow | None:
    """The step that was taken apart: the row with the longest warm-up."""
    return max(full_steps(records), key=lambda row: numeric(row.case["warmup"]), default=None)


def is_same_step(step: Row, other: Row) -> bool:
    """Whether `other` (a profile, a rung, an allocation timeline) is of the step with the settings of `step`."""
    own = {name: value for name, value in other.case.items() if name != "rung"}
    return bool(own) and all(name in step.case and step.case[name] == value for name, value in own.items())
