"""Rows of kernels: a profiled step, its families, pieces of attention, kernels and timeline; and attention, and fused
operators, alone."""

from __future__ import annotations

from trainstep.rows.row import GpuState, Rates, Row, StepSettings, Timed, setting


class OfDevice(StepSettings):
    """Work of one device, per step; the device is named where there are several."""

    device: str | None = setting(None)
    has_steps: bool | None = None  # whether the trace announces its steps; otherwise every figure is of the whole trace


class ProfileRow(OfDevice, Timed, kind="profile"):
    """A profiled step, times per step: of the step and its phases without the profiler ("forward") and with it
    ("forward_profiled"), and of a phase's kernels, summed ("forward_kernels") and without overlap ("forward_busy").
    """

    devices: int | None = None  # how many devices the trace is of; None for one
    profiled_n: int | None = None  # steps that the profiler recorded
    on_cpu: bool | None = None
    kernels: float | None = None
    kernels_ms: float | None = None  # summed; kernels that overlap count twice
    copies: float | None = None  # what copy engines did: copies and fills, which are no kernels
    transfers_ms: float | None = None  # of copies between host and device, summed
    transfers_overlapped_ms: float | None = None  # beside kernels
    transfers_gb: float | None = None
    transfers_pinned_share: float | None = None  # of their time, to or from pinned memory; None where not told
    transfers_to_host_share: float | None = None  # of their time
    graphs_ms: float | None = None  # of CUDA graphs recorded as one
    notes: tuple[str, ...] | None = None  # what the reader of the trace left out or could not tell
    busy_ms: float | None = None  # in which a kernel or a transfer ran
    phase_coverage: float | None = None  # share of the kernel time whose phase is known
    module_coverage: float | None = None
    cost_coverage: float | None = None
    counted: str | None = None  # what FLOPs and bytes count
    outside_steps_ms: float | None = None
    undecided_share: float | None = None  # of the kernel time, of kernels that neither an operator nor a name tells
    matmul_share_step: float | None = None  # None where too much is undecided
    matmul_share_forward: float | None = None
    top_step_kernel: str | None = None  # the kernel that takes most time
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
    gaps: int | None = None  # times at which the device did nothing, in the middle step
    gaps_ms: float | None = None
    largest_gap_ms: float | None = None
    largest_gap_phase: str | None = None
    largest_gap_before: str | None = None  # the kernel after it
    communication_ms: float | None = None
    communication_overlapped_ms: float | None = None  # beside computation
    profiled_step_ms: float | None = None
    profiler_cost_ms: float | None = None
    profiler_cost: float | None = None  # relative to the step without it
    idle_ms: float | None = None
    idle_share: float | None = None
    sums_allowed_ms: float | None = None  # by how much kernels may take longer than the unprofiled phase
    sums_disagree: tuple[str, ...] | None = None
    """The phases ("step" for the whole) whose kernels take longer than that."""
    trace: str | None = None  # file name


class FamilyRow(OfDevice, Rates, kind="family"):
    """Kernels of one family in one phase ("step" for all)."""

    phase: str = setting()
    family: str = setting()
    calls: float | None = None
    ms: float | None = None
    share: float | None = None  # of the phase's kernel time; None for transfers, which are none
    ceiling_precision: str | None = None
    """The precision of the measured product whose rate bounds this family; None for families that are no products."""


class PieceRow(OfDevice, Rates, kind="attention piece"):
    """Scores, softmax or weighted sum of eager attention; `main` is its product or softmax alone."""

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


class KernelRow(OfDevice, Rates, kind="kernel"):
    """A kernel in one phase and module; modules that differ in a number only are one row."""

    phase: str = setting()
    module: str = setting()
    kernel: str = setting()
    family: str | None = None
    operator: str | None = None
    calls: float | None = None
    ms: float | None = None
    mean_us: float | None = None
    share: float | None = None  # of the step's kernel time; None for transfers, which are none
    full_name: str | None = None  # where `kernel` is a shortened form of it


class TimelineRow(OfDevice, kind="timeline"):
    """A step kernel by kernel, as series: start and duration in nanoseconds, and indices into lists of names."""

    kernels: int | None = None
    bars: int | None = None
    joined_below_us: float | None = None
    """Neighbours that together are shorter are one bar; None where none were joined."""


class Passes(GpuState, Timed):
    """An implementation of an operator in one case: its times are of forward, backward and both."""

    rounds: int | None = None  # in turns with the other implementations of the case; samples come round after round
    package: str | None = None  # whose kernels ran and which version, where they are neither torch's nor ours
    not_timed: str | None = None  # why it was checked alone
    issue_ms: float | None = None  # host's time to launch forward and backward, waits within included; the median
    before_backward_gib: float | None = None  # what forward left, of a fused operator its inputs apart
    peak_gib: float | None = None  # of a fused operator above its inputs
    check_s: float | None = None
    compilations: int | None = None
    recompilations_timed: int | None = None
    error_share: float | None = None  # error / allowed of what is nearest to its allowance; above 1: wrong
    error_nearest: str | None = None  # which that is


class AttentionSettings(Row):
    """Rows of one implementation of attention."""

    impl: str = setting()
    batch: int = setting()
    heads: int = setting()
    seq: int = setting()
    head_dim: int = setting()
    causal: str = setting()  # yes or no
    dtype: str = setting()
    window: int | None = setting(None)  # keys that a query sees, its own the last; None for all
    deterministic: str | None = setting(None)  # yes where the same bits were asked for every time


class AttentionRow(AttentionSettings, Passes, kind="attention"):
    """A case of `bench attention`, with errors against float64."""

    forward_tflops: float | None = None
    backward_tflops: float | None = None  # backward counts as 2.5 forwards, causal attention as half
    both_tflops: float | None = None
    o_error: float | None = None  # ‖x - reference‖ / ‖reference‖ over all heads
    dq_error: float | None = None
    dk_error: float | None = None
    dv_error: float | None = None
    o_allowed: float | None = None  # the error budget of `o_error`, where a result was wrong
    dq_allowed: float | None = None
    dk_allowed: float | None = None
    dv_allowed: float | None = None
    predicted_before_backward_gib: float | None = None
    predicted_peak_gib: float | None = None
    score_matrices_at_peak: int | None = None


class PassRatios(Row):
    """Ratios of passes taken in turns, below 1 where ours are faster; the intervals are those within this run."""

    rounds: int | None = None
    forward: float | None = None
    forward_low: float | None = None
    forward_high: float | None = None
    backward: float | None = None
    backward_low: float | None = None
    backward_high: float | None = None
    both: float | None = None
    both_low: float | None = None
    both_high: float | None = None


class FusedSettings(Row):
    """Rows of one implementation of a fused operator."""

    operator: str = setting()
    impl: str = setting()
    shape: str = setting()  # the model's name; its sizes follow
    tokens: int = setting()
    d_model: int = setting()
    heads: int = setting()
    vocab_size: int = setting()
    dtype: str = setting()


class FusedRow(FusedSettings, Passes, kind="fused operator"):
    """A case of `bench fused`."""


class FusedRatioRow(FusedSettings, PassRatios, kind="fused ratio"):
    """Our operator over another implementation's on one shape, in one run."""

    peer: str = setting()


class AttentionRatioRow(AttentionSettings, PassRatios, kind="attention ratio"):
    """Our kernels over a peer's on one shape, in one run."""

    peer: str = setting()
