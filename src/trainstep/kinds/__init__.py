"""The kinds of rows: a class each, by subject. Adding a kind is one class in a file here and its name below.

`rows_of` makes rows from what a file has, those of earlier versions included.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from trainstep.kinds.kernels import AttentionRow, FamilyRow, KernelRow, PieceRow, ProfileRow, TimelineRow
from trainstep.kinds.memory import AllocationRow, CheckpointingRow, MemoryTimelineRow, OwnerRow, PeakRow, ResidualRow
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
from trainstep.kinds.row import Row, Scalar, Status, make_row
from trainstep.kinds.steps import (
    AccumulationRow,
    CeilingRow,
    ControlRow,
    DtypeRow,
    RatioRow,
    RungRow,
    StepRow,
    TourRow,
    WorkloadRow,
)

KINDS: Mapping[str, type[Row]] = {
    kind.kind: kind
    for kind in (
        WorkloadRow, StepRow, RatioRow, RungRow, ControlRow, CeilingRow, DtypeRow, AccumulationRow, TourRow,
        ProfileRow, FamilyRow, PieceRow, KernelRow, TimelineRow,
        PeakRow, MemoryTimelineRow, OwnerRow, AllocationRow, ResidualRow, CheckpointingRow,
        AttentionRow,
        CollectiveRow, CollectiveFitRow, ParallelRow, ParallelTraceRow, TrainRow,
        PlanMachineRow, PlanRow, PlanMemoryRow, PlanLimitRow, PlanScalingRow, PlanCheckRow, SweepRow,
    )
}  # fmt: skip
"""Name in files → kind, in the order of the page."""


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
    rest: dict[str, Any] = {"samples": samples or {}, "series": series or {}, "environment": environment or {}}
    rest |= {"status": status, "reason": reason}
    return [make_row(KINDS[kind], *columns, **rest) for columns in migrated(kind, case or {}, values or {})]


def row_of(*columns: Any, **more: Any) -> Row:
    """`rows_of` where there is one."""
    (row,) = rows_of(*columns, **more)
    return row


# Columns of rows that earlier versions wrote → those of today. Old names are known here alone.
Columns = dict[str, Any]


def migrated(kind: str, case: Mapping[str, Any], values: Mapping[str, Any]) -> list[tuple[Columns, Columns]]:
    """The columns as they would be written today; of one row that would be several now, those of each."""
    if kind == "plan scaling" and "strategy" not in case:
        return _by_strategy(dict(case), values)
    columns = dict(case), dict(values)
    if kind in _CHANGES:
        _CHANGES[kind](*columns)
    return [columns]


def _by_strategy(case: Columns, values: Mapping[str, Any]) -> list[tuple[Columns, Columns]]:
    """A row had the values of all strategies: `fsdp_tokens_per_s`."""
    ending, names = "_tokens_per_s", ("tokens_per_s", "step_ms", "exposed_ms", "limit", "peak_gib", "fits")
    strategies = [name.removesuffix(ending) for name in values if name.endswith(ending)]
    of_each = [{name: values.get(f"{strategy}_{name}") for name in names} for strategy in strategies]
    return [({**case, "strategy": strategy}, own) for strategy, own in zip(strategies, of_each, strict=True)]


def _ceiling(case: Columns, values: Columns) -> None:
    """The operation and its precision were one: `matmul bf16`."""
    if "what" in case:
        case["operation"], _, precision = case.pop("what").partition(" ")
        case["precision"] = precision or None


def _family(case: Columns, values: Columns) -> None:
    """As in ceilings."""
    if "ceiling" in values:
        named = values.pop("ceiling")
        values["ceiling_precision"] = named.removeprefix("matmul ") if named else None


def _profile(case: Columns, values: Columns) -> None:
    """The phases were joined to one text."""
    if isinstance(values.get("sums_disagree"), str):
        values["sums_disagree"] = values["sums_disagree"].split(", ")


def _dtype(case: Columns, values: Columns) -> None:
    """The class was named `class`, and dtypes were joined to one text."""
    if "class" in values:
        values["class_name"] = values.pop("class")
    for name in ("parameters", "inputs", "outputs", "gradients"):
        if isinstance(values.get(name), str):
            values[name] = values[name].split(", ")


def _residual(case: Columns, values: Columns) -> None:
    """Rank and module were one: `1. blocks.*.attention`; other groups had their name in their place."""
    if "what" in case:
        what = case.pop("what")
        rank, dot, module = what.partition(". ")
        is_ranked = dot and rank.isdecimal()
        case |= {"group": "largest", "rank": int(rank), "module": module} if is_ranked else {"group": what}


def _owner(case: Columns, values: Columns) -> None:
    """A part of an owner was one text: a module, `MODULE, OPERATION of PHASE`, or a line of code."""
    part = case.pop("part", "all")
    if part == "all":
        return
    if case["owner"] not in ("activations", "temporaries") or "device" in case:  # of an imported snapshot
        case["line"] = part
    elif case["owner"] == "activations":
        outside = {"the loss": "loss", "the model itself": "forward"}
        case |= {"phase": outside[part]} if part in outside else {"module": part}
    else:
        module, comma, made = part.rpartition(", ")
        operation, of, phase = made.rpartition(" of ")
        case |= ({"module": module} if comma else {}) | ({"operation": operation} if of else {}) | {"phase": phase}


def _allocation(case: Columns, values: Columns) -> None:
    """Phase and operation were one: `backward: Softmax`."""
    if "made_in" in values:
        phase, colon, operation = (values.pop("made_in") or "").partition(": ")
        values |= {"phase": phase or None, "operation": operation if colon else None}


_CHANGES: Mapping[str, Callable[[Columns, Columns], None]] = {
    each.__name__[1:]: each for each in (_ceiling, _family, _profile, _dtype, _residual, _owner, _allocation)
}

__all__ = ["KINDS", "row_of", "rows_of"]
__all__ += ["AccumulationRow", "CeilingRow", "ControlRow", "DtypeRow", "RatioRow", "RungRow", "StepRow", "TourRow"]
__all__ += ["WorkloadRow"]
__all__ += ["AttentionRow", "FamilyRow", "KernelRow", "PieceRow", "ProfileRow", "TimelineRow"]
__all__ += ["AllocationRow", "CheckpointingRow", "MemoryTimelineRow", "OwnerRow", "PeakRow", "ResidualRow"]
__all__ += ["CollectiveFitRow", "CollectiveRow", "ParallelRow", "ParallelTraceRow", "TrainRow"]
__all__ += ["PlanCheckRow", "PlanLimitRow", "PlanMachineRow", "PlanMemoryRow", "PlanRow", "PlanScalingRow", "SweepRow"]
