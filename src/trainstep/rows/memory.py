"""Rows of memory: peaks by phase, the timeline of allocations with its owners, residuals, fits."""

from __future__ import annotations

from collections.abc import Mapping

from trainstep.rows.row import Peaks, PredictedPeak, StepSettings, Times, setting, times
from trainstep.rows.steps import Checked


class PeakRow(StepSettings, Peaks, PredictedPeak, kind="peak"):
    """The most memory of a step, phase by phase."""

    mode: str | None = setting(None)
    peak_phase: str | None = None
    not_predicted: str | None = None  # why a user's step has no prediction


class MemoryTimelineRow(StepSettings, kind="memory-timeline"):
    """Every allocation of a step; what the page draws is in the series."""

    mode: str | None = setting(None)  # None in older rows, of a whole step
    device: int | None = setting(None)  # of an imported snapshot
    peak_gib: float | None = None
    peak_phase: str | None = None
    peak_state: int | None = None
    at_rest_gib: float | None = None
    unknown_share: float | None = None
    events: int | None = None
    allocations: int | None = None
    drawn: int | None = None
    smallest_drawn_mib: float | None = None
    allocator_gib: float | None = None  # the peak as the GPU's allocator counts it
    snapshot: str | None = None  # file name
    uncompiled: bool | None = None  # whether code that the workload compiles by itself ran eagerly


class OwnerRow(StepSettings, kind="owner"):
    """Bytes that an owner holds at the peak, or a part of it: the part has a module, an operation, a phase or a
    line."""

    mode: str | None = setting(None)
    device: int | None = setting(None)
    owner: str = setting()
    module: str | None = setting(None)
    """The part of the model; None for activations of the loss, and for temporaries made outside of modules."""
    operation: str | None = setting(None)  # the autograd node that made temporaries in backward
    phase: str | None = setting(None)  # in which temporaries were made; of activations only where no module made them
    line: str | None = setting(None)  # of code or a node of backward, in an imported snapshot; else `no stack`
    mib: float | None = None
    share: float | None = None
    allocations: int | None = None

    @property
    def is_total(self) -> bool:
        """True if the row is about all that the owner holds."""
        return self.module is self.operation is self.phase is self.line is None


class AllocationRow(StepSettings, kind="allocation"):
    """An allocation among the largest; alike ones are one row."""

    mode: str | None = setting(None)
    device: int | None = setting(None)
    rank: int = setting()  # 1 for the largest
    mib: float | None = None
    count: int | None = None
    owner: str | None = None
    module: str | None = None
    phase: str | None = None  # in which it was made
    operation: str | None = None  # the autograd node that made it, in backward
    line: str | None = None


class ResidualRow(StepSettings, kind="residual"):
    """Tensors saved for backward: a group of alike residuals of the step or of its first block."""

    part: str = setting()  # step, first block, residual stream, or the backward of the first block, or of a named one
    group: str = setting()
    """largest (with its rank and module), the rest, all; of the residual stream: input of the first block; of backward:
    change of memory, gradients."""
    rank: int | None = setting(None)  # 1 for the largest
    module: str | None = setting(None)
    operation: str | None = None
    tensor: str | None = None
    storages: int | None = None
    mib: float | None = None
    share: float | None = None
    formula_mib: float | None = None


class FitRow(StepSettings, Checked, PredictedPeak, kind="fit"):
    """A step whose blocks' activations were chosen to fit a budget, or one beside it; predicted and measured."""

    form: str = setting()  # plain, all again, fit; or one policy for all blocks, such as every-1
    round: int | None = setting(None)  # of a fit: 1, then more where the measured peak corrected the prediction
    times: Mapping[str, Times] = times()
    budget_gib: float | None = None
    predicted_ms: float | None = None
    time_error: float | None = None  # predicted / measured − 1, of the median
    gap: float | None = None  # the added time is at most this share above the least possible, by prediction
    update_in_backward: bool | None = None  # whether the optimizer updates each block in backward
    choices: tuple[str, ...] | None = None  # neighbours with the same choice in one text
    blocks_kept: int | None = None  # that keep everything, in host memory or not
    blocks_again: int | None = None  # that are computed again, apart from what is kept
    blocks_sending: int | None = None  # that send something to host memory
    host_gib: float | None = None  # what is sent there
    policy: str | None = None  # the file
