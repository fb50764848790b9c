"""Rows of memory: peaks by phase, the timeline of allocations with its owners, residuals, checkpointing policies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from trainstep.kinds.row import StepSettings, Times, setting, times


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
    device: int | None = setting(None)
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
    """What one owner holds at the peak, or a part of it: the part has a module, an operation, a phase or a line."""

    kind: ClassVar[str] = "owner"
    device: int | None = setting(None)
    owner: str = setting()
    module: str | None = setting(None)
    """The part of the model; None for activations of the loss, and for temporaries made outside of modules."""
    operation: str | None = setting(None)
    """The autograd node that made temporaries in backward."""
    phase: str | None = setting(None)
    """In which temporaries were made; of activations only where no module made them."""
    line: str | None = setting(None)
    """Of code, in an imported snapshot; `no stack` where none was recorded."""
    mib: float | None = None
    share: float | None = None
    allocations: int | None = None

    @property
    def is_total(self) -> bool:
        """Whether the row is about all that the owner holds."""
        return self.module is self.operation is self.phase is self.line is None


@dataclass(frozen=True, kw_only=True)
class AllocationRow(StepSettings):
    """One of the largest allocations; alike ones are one row."""

    kind: ClassVar[str] = "allocation"
    device: int | None = setting(None)
    rank: int = setting()
    """1 for the largest."""
    mib: float | None = None
    count: int | None = None
    owner: str | None = None
    module: str | None = None
    phase: str | None = None
    """In which it was made."""
    operation: str | None = None
    """The autograd node that made it, in backward."""
    line: str | None = None


@dataclass(frozen=True, kw_only=True)
class ResidualRow(StepSettings):
    """What forward keeps for backward: a group of alike residuals of the step or of its first block."""

    kind: ClassVar[str] = "residual"
    part: str = setting()
    """step, first block, residual stream."""
    group: str = setting()
    """largest (with its rank and module), the rest, all; of the residual stream: input of the first block."""
    rank: int | None = setting(None)
    """1 for the largest."""
    module: str | None = setting(None)
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
