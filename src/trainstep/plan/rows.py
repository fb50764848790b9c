"""`trainstep plan`: predictions as rows, by strategy, by checkpointing policy, by axis, and by number of GPUs.

`plan.measured.checked` holds such predictions against measurements.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any

from trainstep.config import ModelConfig, StepConfig
from trainstep.errors import UsageError
from trainstep.kinds import PlanLimitRow, PlanMachineRow, PlanMemoryRow, PlanRow, PlanScalingRow
from trainstep.plan import limits, strategies
from trainstep.plan.machine import GIB, Cluster
from trainstep.plan.memory import best_blocks_per_checkpoint
from trainstep.plan.parallelism import StepPlan, gpu_counts, scaled, strategy_plan
from trainstep.plan.strategies import Layout, MemorySplit
from trainstep.precision import PRECISIONS
from trainstep.records import Row
from trainstep.schemes import STRATEGIES


@dataclasses.dataclass(frozen=True)
class PlanRequest:
    """What is planned."""

    name: str
    model: ModelConfig
    step: StepConfig  # the batch is what each GPU brings
    cluster: Cluster
    tensor_parallel: int | None = None  # None: the one with the highest predicted throughput
    policies: Sequence[str] = ()
    """Checkpointing policies whose memory is shown; by default none, every-1 and the best K."""

    @property
    def settings(self) -> dict[str, Any]:
        """The settings of its rows, as the arguments of `PlannedStep`."""
        names = ("batch", "context", "precision", "compile", "attention", "optimizer")
        chosen = {name: getattr(self.step, name) for name in names}
        return {"workload": self.name, "device": self.cluster.machine.name} | chosen


def plan_records(request: PlanRequest) -> Iterator[Row]:
    """Everything `trainstep plan` shows. Errors come before the first row."""
    model, tokens = request.model, request.step.batch * request.step.context
    for what, value, most in (
        ("num_layers", model.num_layers, 1000),
        ("the number of parameters", model.num_parameters, 10**15),
        ("batch × context", tokens, 10**12),
        ("the number of GPUs", request.cluster.gpus, 10**7),
    ):
        if value > most:
            raise UsageError(f"{what} is {value:.3g}; the planner takes at most {most:.0e}. Check the sizes")
    if request.step.context > model.max_context:
        given = f"context is {request.step.context}"
        raise UsageError(f"{given}; the model accepts at most {model.max_context} (max_context)")
    layouts = _layouts(request)
    policies = request.policies
    if not policies:
        eager = dataclasses.replace(request.step, compile="off")
        best = f"every-{best_blocks_per_checkpoint(model, eager, on_cuda=True)}"
        policies = list(dict.fromkeys(["none", "every-1", best, request.step.checkpointing]))
    steps = [dataclasses.replace(request.step, checkpointing=policy) for policy in policies]
    plans = [strategy_plan(model, request.step, request.cluster, layout) for layout in layouts]
    memory = [(layout, step, strategies.strategy_memory(model, step, layout)) for layout in layouts for step in steps]
    yield _machine_row(request)
    for plan in plans:
        yield _strategy_row(request, plan)
    for layout, step, split in memory:
        yield PlanMemoryRow(**_memory_columns(request, step, layout, split))
    yield from _limit_rows(request, with_tensor=any(layout.tensor > 1 for layout in layouts))
    yield from _scaling_rows(request, layouts)


def _layouts(request: PlanRequest) -> list[Layout]:
    """One for each strategy; on one GPU too, to say how many it would take. TP only where a mesh is possible."""
    gpus, chosen, model = request.cluster.gpus, request.tensor_parallel, request.model
    sizes = strategies.tensor_parallel_choices(request.cluster, model) if chosen is None else [chosen]
    meshes = [strategies.layout_of("fsdp + tp", gpus, size, model) for size in sizes]
    plans = [strategy_plan(model, request.step, request.cluster, mesh) for mesh in meshes if mesh.tensor > 1]
    plans.sort(key=lambda plan: (not strategies.fits(plan.memory, request.cluster), -plan.tokens_per_s))
    alone = [strategies.layout_of(each, gpus, 1, model) for each in STRATEGIES[:-1]]
    return [*alone, *(plan.layout for plan in plans[:1])]


def _machine_row(request: PlanRequest) -> PlanMachineRow:
    cluster, machine = request.cluster, request.cluster.machine
    memory, room = machine.memory_bytes / GIB, strategies.tensor_bytes(machine) / GIB
    return PlanMachineRow(
        workload=request.name,
        device=machine.name,
        parameters=request.model.num_parameters,
        gpus=cluster.gpus,
        gpus_per_node=cluster.gpus_per_node,
        memory_gib=memory,
        tensors_gib=room,
        product_tflops=machine.matmul_flops[request.step.precision] / 1e12,
        copy_gb_s=machine.copy_bytes_per_s / 1e9,
        link_gb_s=machine.link.bus_bytes_per_s / 1e9,
        link_overhead_us=machine.link.overhead_s * 1e6,
        network_gb_s=cluster.network_bytes_per_s / 1e9,
        basis=f"{machine.basis}; {room:.4g} of a GPU's {memory:.4g} GiB are for tensors, the rest is left to the "
        "CUDA context and the libraries, by assumption",
    )


def _memory_columns(request: PlanRequest, step: StepConfig, layout: Layout, memory: MemorySplit) -> dict[str, Any]:
    """What rows of a strategy and rows of a checkpointing policy have in common."""
    kinds = ("weights", "gradients", "optimizer_state", "activations", "buffers")
    return {
        **request.settings,
        "checkpointing": step.checkpointing,
        "strategy": layout.strategy,
        "gpus": layout.gpus,
        "tensor_parallel": layout.tensor,
        **{f"{kind}_gib": getattr(memory, kind) / GIB for kind in kinds},
        "peak_gib": memory.total / GIB,
        "peak_at": memory.moment,
        "tensors_gib": strategies.tensor_bytes(request.cluster.machine) / GIB,
        "fits": strategies.fits(memory, request.cluster),
        "largest_batch": strategies.largest_batch(request.model, step, request.cluster, layout),
    }


def _strategy_row(request: PlanRequest, plan: StepPlan) -> PlanRow:
    step, cluster, layout, compute = request.step, request.cluster, plan.layout, plan.compute
    return PlanRow(
        **_memory_columns(request, step, layout, plan.memory),
        smallest_gpus=strategies.smallest_gpus(request.model, step, cluster, layout),
        sent_gb=plan.sent / 1e9,
        forward_ms=1e3 * compute.forward.total,
        backward_ms=1e3 * compute.backward.total,
        optimizer_ms=1e3 * compute.optimizer.total,
        compute_ms=1e3 * compute.total,
        communication_ms=1e3 * plan.communication_s,
        exposed_ms=1e3 * plan.exposed_s,
        step_ms=1e3 * plan.step_s,
        limit=plan.limit,
        tokens_per_s=plan.tokens_per_s,
        utilisation=plan.utilisation(cluster.machine.peak_flops[step.precision]),
    )


def _limit_rows(request: PlanRequest, *, with_tensor: bool) -> Iterator[PlanLimitRow]:
    """For each axis and connection: where communication takes as long as the matrix products that it hides behind.

    `with_tensor`: whether a strategy divides the matrices; a model may not allow it, as one of 25 heads on 8 GPUs.
    """
    cluster, step = request.cluster, request.step
    flops, precision = cluster.machine.matmul_flops[step.precision], PRECISIONS[step.precision]
    width = limits.width_between_collectives(request.model)
    tokens = cluster.gpus * step.batch * step.context
    connections = [("within a node", cluster.machine.link.bus_bytes_per_s)] if cluster.gpus_per_node > 1 else []
    if cluster.nodes > 1:
        connections.append(("across nodes", cluster.gpus_per_node * cluster.network_bytes_per_s))
    for connection, rate in connections:
        narrow = limits.intensity(flops, rate, precision.computed_bytes)
        wide = limits.intensity(flops, rate, precision.stored_bytes)
        at_data, at_fsdp = limits.data_axis_tokens(wide), limits.data_axis_tokens(narrow)
        least: dict[str, float | None] = {"data (gradients as kept)": at_data, "fsdp": at_fsdp}
        if with_tensor:
            least |= {
                "tensor": None,
                "fsdp × tensor, overlapped": limits.best_mesh_tokens(narrow, width),
                "fsdp × tensor, one after the other": limits.best_mesh_tokens(narrow, width, overlapped=False),
            }
        for axis, fewest in least.items():
            most = limits.tensor_axis_ranks(narrow, width) if fewest is None else tokens / fewest
            yield PlanLimitRow(
                **request.settings,
                axis=axis,
                connection=connection,
                gpus=cluster.gpus,
                flop_per_byte=flops / rate,
                least_tokens_per_gpu=fewest,
                most_gpus=max(1, math.floor(most)),  # one alone does not communicate
                tokens_per_gpu=step.batch * step.context,
            )


def _scaling_rows(request: PlanRequest, layouts: Sequence[Layout]) -> Iterator[PlanScalingRow]:
    """Throughput with the same batch on every GPU, up to `MOST_GPUS`: a row per number of GPUs and strategy."""
    for gpus in gpu_counts():
        cluster = scaled(request.cluster, gpus)
        for layout in layouts:
            if gpus % layout.tensor or (layout.strategy == "single") != (gpus == 1):
                continue
            placed = dataclasses.replace(layout, data=gpus // layout.tensor)
            plan = strategy_plan(request.model, request.step, cluster, placed)
            yield PlanScalingRow(
                **request.settings,
                gpus=gpus,
                strategy=layout.strategy,
                tokens_per_s=plan.tokens_per_s,
                step_ms=1e3 * plan.step_s,
                exposed_ms=1e3 * plan.exposed_s,
                limit=plan.limit,
                peak_gib=plan.memory.total / GIB,
                fits=strategies.fits(plan.memory, cluster),
            )
