"""Rows of several ranks: collectives, schemes of data parallel training, their traces, and training runs."""

from __future__ import annotations

from trainstep.rows.row import GpuState, GradientErrors, Row, Speedup, StepSettings, Timed, setting


class CollectiveSettings(Row):
    """Rows of one collective among some ranks."""

    collective: str = setting()
    world_size: int = setting()
    dtype: str = setting()
    backend: str | None = setting(None)
    hosts: int | None = setting(None)  # over which the ranks are spread, as many on each; None: one
    tensors: int | None = setting(None)  # that one call is given; None: one
    groups: str | None = setting(None)  # rows or columns of all ranks, at once; None: one group


class CollectiveRow(CollectiveSettings, GpuState, Timed, kind="collective"):
    """A collective at one size; a call lasts as long as on its slowest rank."""

    size_mb: float = setting()
    payload_bytes: int | None = None
    fastest_rank_ms: float | None = None
    slowest_rank_ms: float | None = None
    slowest_rank: int | None = None
    cpu_ms: float | None = None  # that a call keeps cores busy for, all threads of a rank; the mean of the ranks
    algorithm_gb_s: float | None = None
    bus_gb_s: float | None = None  # bytes on each link of a ring over the time
    wrong_ranks: tuple[int, ...] | None = None  # those that did not get what they should


class CollectiveFitRow(CollectiveSettings, kind="collective fit"):
    """Cost of a call: an overhead, and bytes on each link at a bandwidth."""

    sizes: int | None = None
    overhead_us: float | None = None
    bus_gb_s: float | None = None
    cpu_share: float | None = None  # of a call's time, for which it keeps a core of a rank busy
    worst_error: float | None = None


class SchemeSettings(StepSettings):
    """Rows of one scheme of data parallel training."""

    scheme: str = setting()
    world_size: int = setting()
    replicas: int | None = setting(None)  # of a hybrid scheme
    blocks_per_group: int | None = setting(None)  # gathered together, where weights are sharded; None: one
    timing: str | None = setting(None)  # sustained: no synchronisation between steps; None: one around each

    @property
    def label(self) -> str:
        """The scheme's name, made as `Scheme.label` makes it."""
        label = self.scheme if self.replicas is None else f"{self.scheme}-{self.replicas}"
        return label if self.blocks_per_group is None else f"{label} by {self.blocks_per_group} blocks"


class ParallelRow(SchemeSettings, GpuState, Timed, Speedup, GradientErrors, kind="parallel"):
    """A scheme of data parallel training: the step of the slowest rank, traffic, memory, agreement with one process.

    The speed-up is over one process: how many times as many samples a second. Among the times are
    `exposed_communication`, all that a step waits for other ranks, and `PHASE_computing`, a phase without its waits.
    Memory is of the rank that holds most, at the start, before the optimizer's step and after it.
    """

    rounds: int | None = None  # each built anew, in turns with the other schemes; samples come round after round
    exposed_share: float | None = None  # of the step, that it waits for other ranks
    all_communication_ms: float | None = None  # in which a call is under way, in a step in which calls are recorded
    samples_per_s: float | None = None  # rows of the batch, of all ranks; of single, of one process
    tokens_per_s: float | None = None  # of all ranks
    transport: str | None = None  # of ours: what carries shards and gradients, within a replica; not in older rows
    transport_between: str | None = None  # of ours: what carries gradients between replicas; None, in older rows: NCCL;
    # peer-copies: of older rows, which averaged each replica's means
    collectives: int | None = None
    sent_gib: float | None = None  # by a rank, over a ring
    sent_floor_gib: float | None = None
    start_weights_gib: float | None = None
    start_gradients_gib: float | None = None
    start_optimizer_state_gib: float | None = None
    start_gib: float | None = None
    before_step_weights_gib: float | None = None
    before_step_gradients_gib: float | None = None
    before_step_optimizer_state_gib: float | None = None
    before_step_gib: float | None = None
    after_step_weights_gib: float | None = None
    after_step_gradients_gib: float | None = None
    after_step_optimizer_state_gib: float | None = None
    after_step_gib: float | None = None
    peak_gib: float | None = None
    peak_reserved_gib: float | None = None  # by torch's allocator, which holds what is free between its blocks too
    predicted_start_gib: float | None = None
    predicted_before_step_gib: float | None = None
    predicted_after_step_gib: float | None = None
    gradient_allowed: float | None = None
    optimizer_error: float | None = None  # of updates from equal gradients
    optimizer_allowed: float | None = None
    ranks_agree: bool | None = None  # whether all ranks have the same parameters, to the bit
    loss_error: float | None = None  # after a few steps, against one process on the whole batch
    loss_allowed: float | None = None
    update_error: float | None = None  # of the parameters, relative to how far they moved
    update_allowed: float | None = None
    batches: str | None = None  # whose they are, where the workload gives every rank others
    share_difference: float | None = None  # of a batch's gradients from the mean of its shares', relative


class ParallelRatioRow(SchemeSettings, kind="parallel ratio"):
    """Ratio of one of our schemes to one of torch's, in one run: its step and its peak memory.

    Of a peer with several settings it is the fastest.
    """

    peer: str = setting()
    peer_setting: str | None = None  # the peer's fastest scheme
    rounds: int | None = None
    ratio: float | None = None  # of the steps' times, below 1 where ours is faster, with its interval within this run
    ratio_low: float | None = None
    ratio_high: float | None = None
    peak_ratio: float | None = None  # of the peaks of memory


class ParallelTraceRow(SchemeSettings, kind="parallel trace"):
    """A profiled step of rank 0 under a scheme: its overlap, and its bars as series."""

    on_cpu: bool | None = None
    step_ms: float | None = None  # median without the profiler, on the slowest rank
    profiled_step_ms: float | None = None
    span_ms: float | None = None  # from the first kernel to the last
    computation_ms: float | None = None
    communication_ms: float | None = None
    hidden_communication_ms: float | None = None
    exposed_communication_ms: float | None = None
    hidden_share: float | None = None
    idle_ms: float | None = None
    trace: str | None = None
    kernels: int | None = None
    bars: int | None = None
    joined_below_us: float | None = None
    exposed_from_us: float | None = None  # exposed communication is drawn from this length on


class ParallelFamilyRow(SchemeSettings, kind="parallel family"):
    """Kernels of one family that compute in one phase of rank 0's profiled step under a scheme."""

    phase: str = setting()
    family: str = setting()
    kernels: int | None = None
    ms: float | None = None  # summed; kernels that overlap count twice
    share: float | None = None  # of all kernels that compute


class TrainRow(StepSettings, Timed, kind="train"):
    """A training run, finished or as far as it has come; its curve is in the series."""

    scheme: str | None = setting(None)
    world_size: int | None = setting(None)
    replicas: int | None = setting(None)  # of a hybrid scheme
    blocks_per_group: int | None = setting(None)  # gathered together, where weights are sharded; None: one
    global_batch: int | None = setting(None)
    batches_per_update: int | None = setting(None)  # of a user's workload
    steps: int | None = setting(None)
    tokens_per_s: float | None = None
    utilisation: float | None = None
    first_loss: float | None = None
    last_loss: float | None = None
    validation_loss: float | None = None
    tokens: int | None = None
    peak_gib: float | None = None
    done: int | None = None  # updates made
    starts: int | None = None  # how often it was started, the first one among them
    trained_again: int | None = None  # updates that were made once more after a restart
    validation_share: float | None = None  # of the time of updates, validations and checkpoints together
    checkpoint_share: float | None = None  # the same of what updates waited for checkpoints
