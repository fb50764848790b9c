"""The kinds of rows: a frozen dataclass each, by subject. Adding a kind is one class in a file here and its name below.

`rows_of` makes rows from what a file has, those of earlier versions included.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from trainstep.kinds.attention import AttentionRow
from trainstep.kinds.kernels import FamilyRow, KernelRow, PieceRow, ProfileRow, TimelineRow
from trainstep.kinds.memory import AllocationRow, CheckpointingRow, MemoryTimelineRow, OwnerRow, PeakRow, ResidualRow
from trainstep.kinds.migration import migrated
from trainstep.kinds.parallel import CollectiveFitRow, CollectiveRow, ParallelRow, ParallelTraceRow, TrainRow
from trainstep.kinds.plan import (
    PlanCheckRow,
    PlanLimitRow,
    PlanMachineRow,
    PlanMemoryRow,
    PlanRow,
    PlanScalingRow,
    SweepRow,
)
from trainstep.kinds.shared import StepSettings
from trainstep.kinds.steps import (
    AccumulationRow,
    CeilingRow,
    ControlRow,
    DtypeRow,
    RungRow,
    StepRow,
    TourRow,
    WorkloadRow,
)
from trainstep.records import Row, Scalar, Status, make_row

KINDS: Mapping[str, type[Row]] = {
    kind.kind: kind
    for kind in (
        WorkloadRow, StepRow, RungRow, ControlRow, CeilingRow, DtypeRow, AccumulationRow, TourRow,
        ProfileRow, FamilyRow, PieceRow, KernelRow, TimelineRow,
        PeakRow, MemoryTimelineRow, OwnerRow, AllocationRow, ResidualRow, CheckpointingRow,
        AttentionRow,
        CollectiveRow, CollectiveFitRow, ParallelRow, ParallelTraceRow, TrainRow,
        PlanMachineRow, PlanRow, PlanMemoryRow, PlanLimitRow, PlanScalingRow, PlanCheckRow, SweepRow,
    )
}  # fmt: skip
"""Name in files → kind."""


def rows_of(
    kind: str,
    case: Mapping[str, Any] | None = None,
    values: Mapping[str, Any] | None = None,
    samples: Mapping[str, Sequence[float]] | None = None,
    status: Status = "ok",
    reason: str = "",
    environment: Mapping[str, Scalar] | None = None,
    series: Mapping[str, Sequence[Scalar]] | None = None,
) -> list[Row]:
    """The row of these columns; columns of earlier versions are renamed first, which may make several rows of one.

    Raises:
        ValueError: no such kind, or columns that it does not have.
    """
    if kind not in KINDS:
        raise ValueError(f"unknown kind of row {kind!r}")
    rest: dict[str, Any] = {
        "samples": samples or {},
        "series": series or {},
        "status": status,
        "reason": reason,
        "environment": environment or {},
    }
    return [make_row(KINDS[kind], *columns, **rest) for columns in migrated(kind, case or {}, values or {})]


def row_of(*columns: Any, **more: Any) -> Row:
    """`rows_of` where there is one."""
    (row,) = rows_of(*columns, **more)
    return row


__all__ = [
    "KINDS",
    "AccumulationRow",
    "AllocationRow",
    "AttentionRow",
    "CeilingRow",
    "CheckpointingRow",
    "CollectiveFitRow",
    "CollectiveRow",
    "ControlRow",
    "DtypeRow",
    "FamilyRow",
    "KernelRow",
    "MemoryTimelineRow",
    "OwnerRow",
    "ParallelRow",
    "ParallelTraceRow",
    "PeakRow",
    "PieceRow",
    "PlanCheckRow",
    "PlanLimitRow",
    "PlanMachineRow",
    "PlanMemoryRow",
    "PlanRow",
    "PlanScalingRow",
    "ProfileRow",
    "ResidualRow",
    "RungRow",
    "StepRow",
    "StepSettings",
    "SweepRow",
    "TimelineRow",
    "TourRow",
    "TrainRow",
    "WorkloadRow",
    "row_of",
    "rows_of",
]
