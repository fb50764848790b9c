"""Rows of a profile: the step as a whole, its families of kernels, pieces of attention, kernels, and a timeline."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from trainstep.kinds.shared import Rates, StepSettings
from trainstep.records import setting


@dataclass(frozen=True, kw_only=True)
class ProfileRow(StepSettings):
    """One profiled step. Times are per step; `PHASE_profiled_ms` is with the profiler, `PHASE_ms` without."""

    kind: ClassVar[str] = "profile"
    profiled_n: int | None = None
    """Steps that the profiler recorded."""
    on_cpu: bool | None = None
    has_steps: bool | None = None
    """Whether the trace announces its steps; otherwise every figure is of the whole trace."""
    kernels: float | None = None
    kernels_ms: float | None = None
    """Summed; kernels that overlap count twice."""
    busy_ms: float | None = None
    phase_coverage: float | None = None
    """Share of the kernel time whose phase is known."""
    module_coverage: float | None = None
    cost_coverage: float | None = None
    counted: str | None = None
    """What FLOPs and bytes count."""
    outside_steps_ms: float | None = None
    matmul_share_step: float | None = None
    matmul_share_forward: float | None = None
    forward_kernels_ms: float | None = None
    forward_busy_ms: float | None = None
    loss_kernels_ms: float | None = None
    loss_busy_ms: float | None = None
    backward_kernels_ms: float | None = None
    backward_busy_ms: float | None = None
    optimizer_kernels_ms: float | None = None
    optimizer_busy_ms: float | None = None
    top_step_kernel: str | None = None
    """The kernel that takes most time."""
    top_step_kernel_family: str | None = None
    top_step_kernel_calls: float | None = None
    top_step_kernel_ms: float | None = None
    top_step_kernel_share: float | None = None
    most_called_step_kernel: str | None = None
    most_called_step_kernel_calls: float | None = None
    top_forward_kernel: str | None = None
    top_forward_kernel_family: str | None = None
    top_forward_kernel_calls: float | None = None
    top_forward_kernel_ms: float | None = None
    top_forward_kernel_share: float | None = None
    most_called_forward_kernel: str | None = None
    most_called_forward_kernel_calls: float | None = None
    gaps: int | None = None
    """Times at which the device did nothing, in the middle step."""
    gaps_ms: float | None = None
    largest_gap_ms: float | None = None
    largest_gap_phase: str | None = None
    largest_gap_before: str | None = None
    """The kernel after it."""
    communication_ms: float | None = None
    communication_overlapped_ms: float | None = None
    """Beside computation."""
    n: int | None = None
    """Steps timed without the profiler."""
    step_ms: float | None = None
    step_low_ms: float | None = None
    step_high_ms: float | None = None
    profiled_step_ms: float | None = None
    profiler_cost_ms: float | None = None
    profiler_cost: float | None = None
    """Relative to the step without it."""
    idle_ms: float | None = None
    idle_share: float | None = None
    forward_ms: float | None = None
    forward_profiled_ms: float | None = None
    loss_ms: float | None = None
    loss_profiled_ms: float | None = None
    backward_ms: float | None = None
    backward_profiled_ms: float | None = None
    optimizer_ms: float | None = None
    optimizer_profiled_ms: float | None = None
    sums_allowed_ms: float | None = None
    """By how much kernels may take longer than the unprofiled phase."""
    sums_disagree: tuple[str, ...] | None = None
    """The phases ("step" for the whole) whose kernels take longer than that."""
    trace: str | None = None
    """File name."""


@dataclass(frozen=True, kw_only=True)
class FamilyRow(StepSettings, Rates):
    """Kernels of one family in one phase ("step" for all)."""

    kind: ClassVar[str] = "family"
    phase: str = setting()
    family: str = setting()
    calls: float | None = None
    ms: float | None = None
    share: float | None = None
    """Of the phase's kernel time."""
    ceiling_precision: str | None = None
    """The precision of the measured product whose rate bounds this family; None for families that are no products."""


@dataclass(frozen=True, kw_only=True)
class PieceRow(StepSettings, Rates):
    """Scores, softmax or weighted sum of eager attention; `main` is its product or softmax alone."""

    kind: ClassVar[str] = "attention piece"
    phase: str = setting()
    piece: str = setting()
    ms: float | None = None
    main_ms: float | None = None
    calls: float | None = None
    main_tflop: float | None = None
    main_gb: float | None = None
    main_tflops: float | None = None
    main_gb_s: float | None = None
    main_flop_per_byte: float | None = None


@dataclass(frozen=True, kw_only=True)
class KernelRow(StepSettings, Rates):
    """One kernel in one phase and module; modules that differ in a number only are one row."""

    kind: ClassVar[str] = "kernel"
    phase: str = setting()
    module: str = setting()
    kernel: str = setting()
    family: str | None = None
    operator: str | None = None
    calls: float | None = None
    ms: float | None = None
    mean_us: float | None = None
    share: float | None = None
    """Of the step's kernel time."""
    full_name: str | None = None
    """Where `kernel` is a shortened form of it."""


@dataclass(frozen=True, kw_only=True)
class TimelineRow(StepSettings):
    """One step kernel by kernel, as series: start and duration in nanoseconds, and indices into lists of names."""

    kind: ClassVar[str] = "timeline"
    kernels: int | None = None
    bars: int | None = None
    joined_below_us: float | None = None
    """Neighbours that together are shorter are one bar; None where none were joined."""
