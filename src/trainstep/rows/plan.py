"""Rows of predictions, of their check against measurements, and of sweeps."""

from __future__ import annotations

from collections.abc import Mapping

from trainstep.rows.row import Row, Scalar, Times, further, setting, times


class PlanMachineRow(Row, kind="plan machine"):
    """Machine that a prediction stands on."""

    workload: str = setting()
    device: str = setting()
    parameters: int | None = None
    gpus: int | None = None
    gpus_per_node: int | None = None
    memory_gib: float | None = None
    tensors_gib: float | None = None  # room for tensors
    product_tflops: float | None = None
    copy_gb_s: float | None = None
    link_gb_s: float | None = None
    link_overhead_us: float | None = None
    network_gb_s: float | None = None
    basis: str | None = None  # where the rates come from, in words


class PlannedStep(Row):
    """The step that is planned; the batch is what each GPU brings. What a user's workload decides itself is None."""

    workload: str = setting()
    device: str = setting()
    batch: int | None = setting(None)
    context: int | None = setting(None)
    precision: str = setting()
    compile: str = setting()
    attention: str | None = setting(None)
    optimizer: str | None = setting(None)


class PlannedMemory(PlannedStep):
    """Bytes that one GPU holds at its peak under a strategy and a checkpointing policy."""

    checkpointing: str = setting()
    strategy: str = setting()
    gpus: int = setting()
    tensor_parallel: int = setting()
    replicas: int | None = setting(None)  # of hsdp
    blocks_per_group: int | None = setting(None)  # that fsdp and hsdp gather together; None: one
    weights_gib: float | None = None
    gradients_gib: float | None = None
    optimizer_state_gib: float | None = None
    activations_gib: float | None = None
    buffers_gib: float | None = None
    peak_gib: float | None = None
    peak_at: str | None = None
    tensors_gib: float | None = None
    fits: bool | None = None
    largest_batch: int | None = None


class PlanRow(PlannedMemory, kind="plan"):
    """A step under one strategy."""

    smallest_gpus: int | None = None
    sent_gb: float | None = None
    forward_ms: float | None = None
    backward_ms: float | None = None
    optimizer_ms: float | None = None
    compute_ms: float | None = None
    communication_ms: float | None = None
    exposed_ms: float | None = None
    launch_ms: float | None = None  # the host's, of the whole step; None where it was not measured
    step_ms: float | None = None
    limit: str | None = None
    tokens_per_s: float | None = None
    utilisation: float | None = None


class PlanMemoryRow(PlannedMemory, kind="plan memory"):
    """Memory of one GPU at its peak under one checkpointing policy."""


class PlanLimitRow(PlannedStep, kind="plan limit"):
    """Limit of one axis: how far it scales before its communication takes longer than the matrix products."""

    axis: str = setting()
    connection: str = setting()
    gpus: int = setting()
    flop_per_byte: float | None = None
    least_tokens_per_gpu: float | None = None
    most_gpus: int | None = None
    tokens_per_gpu: int | None = None


class PlanScalingRow(PlannedStep, kind="plan scaling"):
    """Throughput of one strategy on a number of GPUs, with the same batch on each."""

    gpus: int = setting()
    strategy: str = setting()
    tokens_per_s: float | None = None
    step_ms: float | None = None
    exposed_ms: float | None = None
    limit: str | None = None
    peak_gib: float | None = None
    fits: bool | None = None


class SweepRow(Row, kind="sweep"):
    """A case of a sweep, or one row of a case that measures several."""

    command: str = setting()
    row: str | None = setting(None)  # which of the case's rows this is, in words; None where there is one
    flags: Mapping[str, Scalar] = further("case")  # the flags that the sweep's file sets
    times: Mapping[str, Times] = times()
    number: int | None = None  # of the case in the sweep's file, from 1
    case_s: float | None = None  # seconds that the case took
    folder: str | None = None  # in cases/
    measured: Mapping[str, Scalar] = further("values")  # the values of the row that the case's command wrote
