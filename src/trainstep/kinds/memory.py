"""Rows of memory: peaks by phase, the timeline of allocations with its owners, residuals, checkpointing policies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from trainstep.kinds.shared import StepSettings
from trainstep.records import Times, setting, times


@dataclass(frozen=True, kw_only=True)
class PeakRow(StepSettings):
    """The most memory of a step, phase by phase."""

    kind: ClassVar[str] = "peak"
    mode: str | None = setting(None)
    at_rest_gib: float | None = None
    peak_gib: float | None = None
    forward_peak_gib: float | None = None
    loss_peak_gib: float | None = None
    backward_peak_gib: float | None = None
    optimizer_peak_gib: float | None = None
    peak_phase: str | None = None
    predicted_gib: float | None = None
    prediction_error: float | None = None
    """predicted / measured − 1."""


@dataclass(frozen=True, kw_only=True)
class MemoryTimelineRow(StepSettings):
    """Every allocation of a step; what the page draws is in the series."""

    kind: ClassVar[str] = "memory-timeline"
    device: str | None = setting(None)
    """Of an imported snapshot."""
    peak_gib: float | None = None
    peak_phase: str | None = None
    peak_state: int | None = None
    at_rest_gib: float | None = None
    unknown_share: float | None = None
    events: int | None = None
    allocations: int | None = None
    drawn: int | None = None
    smallest_drawn_mib: float | None = None
    allocator_gib: float | None = None
    """The peak as the GPU's allocator counts it."""
    snapshot: str | None = None
    """File name."""


@dataclass(frozen=True, kw_only=True)
class OwnerRow(StepSettings):
    """What one owner, or a part of it, holds at the peak."""

    kind: ClassVar[str] = "owner"
    device: str | None = setting(None)
    owner: str = setting()
    part: str = setting()
    """`all` for the owner's total."""
    mib: float | None = None
    share: float | None = None
    allocations: int | None = None


@dataclass(frozen=True, kw_only=True)
class AllocationRow(StepSettings):
    """One of the largest allocations; alike ones are one row."""

    kind: ClassVar[str] = "allocation"
    device: str | None = setting(None)
    rank: int = setting()
    """1 for the largest."""
    mib: float | None = None
    count: int | None = None
    owner: str | None = None
    module: str | None = None
    made_in: str | None = None
    line: str | None = None


@dataclass(frozen=True, kw_only=True)
class ResidualRow(StepSettings):
    """What forward keeps for backward: a group of alike residuals of the step or of its first block."""

    kind: ClassVar[str] = "residual"
    part: str = setting()
    """step, first block, residual stream."""
    what: str = setting()
    operation: str | None = None
    tensor: str | None = None
    storages: int | None = None
    mib: float | None = None
    share: float | None = None
    formula_mib: float | None = None


@dataclass(frozen=True, kw_only=True)
class CheckpointingRow(StepSettings):
    """A step's peak and time under one checkpointing policy, predicted and measured."""

    kind: ClassVar[str] = "checkpointing"
    times: Mapping[str, Times] = times()
    memory_gib: float | None = None
    """What the step may take."""
    predicted_gib: float | None = None
    predicted_moment: str | None = None
    peak_gib: float | None = None
    peak_phase: str | None = None
    prediction_error: float | None = None
