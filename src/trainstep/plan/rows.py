"""`trainstep plan`: predictions as rows, by strategy, by checkpointing policy, by axis, and by number of GPUs."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from trainstep.base.config import EVERY_BLOCK, ModelConfig, StepConfig
from trainstep.base.errors import UsageError
from trainstep.base.precision import PRECISIONS
from trainstep.base.schemes import STRATEGIES, Strategy, usual_replicas
from trainstep.plan import limits, strategies
from trainstep.plan.machine import GIB, Cluster, Machine
from trainstep.plan.parallelism import StepPlan, gpu_counts, scaled, strategy_plan
from trainstep.plan.strategies import Layout, MemorySplit
from trainstep.plan.traced import TracedCase
from trainstep.rows import PlanLimitRow, PlanMachineRow, PlanMemoryRow, PlanRow, PlanScalingRow
from trainstep.rows.records import Row


@dataclasses.dataclass(frozen=True)
class PlanRequest:
    """Step to plan: the built-in model's, or a user's that was traced."""

    name: str
    model: ModelConfig | None  # None where `traced` is given
    step: StepConfig  # the batch is what each GPU brings
    cluster: Cluster
    tensor_parallel: int | None = None  # None: the one with the highest predicted throughput
    replicas: int | None = None  # of hsdp; None: one on each node, or two on a single one
    blocks_per_group: int = 1  # that fsdp and hsdp gather together
    policies: Sequence[str] = ()
    """Checkpointing policies whose memory is shown; by default none and every-1."""
    traced: Mapping[str, TracedCase] = dataclasses.field(default_factory=dict)
    """A user's step under each policy that is shown, that of `step` among them."""
    own: Sequence[str] = ()  # settings that the user's workload decides itself, which are left empty

    @property
    def settings(self) -> dict[str, Any]:
        """The settings of its rows, as the arguments of `PlannedStep`."""
        names = ("batch", "context", "precision", "compile", "attention", "optimizer")
        chosen = {name: None if name in self.own else getattr(self.step, name) for name in names}
        return {"workload": self.name, "device": self.cluster.machine.name} | chosen

    @property
    def subject(self) -> _BuiltIn | _Traced:
        """Object that answers for the model."""
        return _BuiltIn(self) if self.model is not None else _Traced(self.traced, self.step.checkpointing)


class _BuiltIn:
    """The built-in model: everything by formula."""

    def __init__(self, request: PlanRequest) -> None:
        assert request.model is not None, "the built-in model has a shape"
        self.model, self._step = request.model, request.step
        self.parameters, self.tokens = request.model.num_parameters, request.step.batch * request.step.context

    def plan(self, cluster: Cluster, layout: Layout) -> StepPlan:
        return strategy_plan(self.model, self._step, cluster, layout)

    def memory(self, policy: str, layout: Layout) -> MemorySplit:
        return strategies.strategy_memory(self.model, self._under(policy), layout)

    def largest_batch(self, policy: str, cluster: Cluster, layout: Layout) -> int | None:
        return strategies.largest_batch(self.model, self._under(policy), cluster, layout)

    def least_tokens(self, machine: Machine, rate: float) -> tuple[float, float]:
        """(data, fsdp): the tokens per GPU at which an axis communicates as long as it computes."""
        precision = PRECISIONS[self._step.precision]
        flops = machine.matmul_flops[self._step.precision]
        narrow = limits.intensity(flops, rate, precision.computed_bytes)
        wide = limits.intensity(flops, rate, precision.stored_bytes)
        return limits.data_axis_tokens(wide), limits.data_axis_tokens(narrow)

    def _under(self, policy: str) -> StepConfig:
        return dataclasses.replace(self._step, checkpointing=policy)


class _Traced:
    """A user's model: from the operators and the memory of one traced step. Its batch is what it is."""

    def __init__(self, cases: Mapping[str, TracedCase], policy: str) -> None:
        self._cases, self._case = cases, cases[policy]
        self.parameters, self.tokens = self._case.step.parameters, self._case.step.tokens

    def plan(self, cluster: Cluster, layout: Layout) -> StepPlan:
        return self._case.plan(cluster, layout)

    def memory(self, policy: str, layout: Layout) -> MemorySplit:
        return self._cases[policy].memory(layout)

    def largest_batch(self, policy: str, cluster: Cluster, layout: Layout) -> int | None:
        return None

    def least_tokens(self, machine: Machine, rate: float) -> tuple[float, float]:
        """Limits as of the built-in model, if FLOPs grow with the tokens."""
        return self._case.least_tokens(machine, rate)


def plan_records(request: PlanRequest) -> Iterator[Row]:
    """Everything `trainstep plan` shows. Errors come before the first row."""
    _check_sizes(request)
    subject, layouts = request.subject, _layouts(request)
    policies = request.policies or list(request.traced)
    if not policies and request.model is not None:
        policies = list(dict.fromkeys(["none", EVERY_BLOCK, request.step.checkpointing]))
    plans = [subject.plan(request.cluster, layout) for layout in layouts]
    memory = [(layout, policy, subject.memory(policy, layout)) for layout in layouts for policy in policies]
    yield _machine_row(request)
    for plan in plans:
        yield _strategy_row(request, plan)
    for layout, policy, split in memory:
        yield PlanMemoryRow(**_memory_columns(request, policy, layout, split))
    yield from _limit_rows(request, with_tensor=any(layout.tensor > 1 for layout in layouts))
    yield from _scaling_rows(request, layouts)


def _check_sizes(request: PlanRequest) -> None:
    model, step = request.model, request.step
    limited: list[tuple[str, int, int]] = [("the number of GPUs", request.cluster.gpus, 10**7)]
    if model is not None:
        limited += [
            ("num_layers", model.num_layers, 1000),
            ("the number of parameters", model.num_parameters, 10**15),
            ("batch × context", step.batch * step.context, 10**12),
        ]
        model.require_context(step.context)
    if (replicas := request.replicas) is not None and (replicas < 1 or request.cluster.gpus % replicas):
        raise UsageError(f"{request.cluster.gpus} GPUs do not divide into {replicas} replicas; choose --replicas anew")
    if request.blocks_per_group < 1:
        raise UsageError(f"--blocks-per-group is {request.blocks_per_group}; expected 1 or more")
    if model is not None and request.blocks_per_group > model.num_layers:
        raise UsageError(f"--blocks-per-group is {request.blocks_per_group}; the model has {model.num_layers} blocks")
    for what, value, most in limited:
        if value > most:
            raise UsageError(f"{what} is {value:.3g}; the planner takes at most {most:.0e}. Check the sizes")


def _layouts(request: PlanRequest) -> list[Layout]:
    """Layouts, one for each strategy; on one GPU too, to say how many it would take. TP only where a mesh is
    possible."""
    gpus, chosen, model = request.cluster.gpus, request.tensor_parallel, request.model
    if model is None:
        refuse_for_own_models(chosen, request.blocks_per_group)
        return [_alone(request, each) for each in _strategies(request)]
    sizes = strategies.tensor_parallel_choices(request.cluster, model) if chosen is None else [chosen]
    meshes = [strategies.mesh_of(gpus, size, model) for size in sizes]
    plans = [strategy_plan(model, request.step, request.cluster, mesh) for mesh in meshes if mesh.tensor > 1]
    plans.sort(key=lambda plan: (not strategies.fits(plan.memory, request.cluster), plan.step_s / plan.layout.gpus))
    alone = [_alone(request, each) for each in _strategies(request)]
    return [*alone, *(plan.layout for plan in plans[:1])]


def refuse_for_own_models(tensor_parallel: int | None, blocks_per_group: int) -> None:
    """Refuse what takes the shapes of a model to plan: of a traced step no more than its calls are known.

    Raises:
        UsageError: `tensor_parallel` (ranks that share each block) is given, or `blocks_per_group` is above 1.
    """
    if tensor_parallel is not None or blocks_per_group > 1:
        flag = "--blocks-per-group" if tensor_parallel is None else "--tensor-parallel"
        raise UsageError(f"{flag} is planned for the built-in sizes alone; leave it out")


def _strategies(request: PlanRequest) -> Sequence[Strategy]:
    """All but tensor parallelism, which needs a mesh."""
    hybrid = _replicas(request, request.cluster) is not None
    return [each for each in STRATEGIES[:-1] if hybrid or each != "hsdp"]


def _alone(request: PlanRequest, strategy: Strategy) -> Layout:
    """A strategy over all GPUs, without tensor parallelism."""
    replicas = _replicas(request, request.cluster) if strategy == "hsdp" else None
    gpus = 1 if strategy == "single" else request.cluster.gpus
    together = request.blocks_per_group if strategy in ("fsdp", "hsdp") else 1
    return Layout(strategy, gpus, replicas=replicas or 1, blocks_per_group=together).placed_on(request.cluster)


def _replicas(request: PlanRequest, cluster: Cluster) -> int | None:
    """Replicas of hsdp on a cluster; None where it is not planned."""
    if request.replicas is None:
        return usual_replicas(cluster.gpus, cluster.nodes)
    return None if cluster.gpus % request.replicas else request.replicas


def _machine_row(request: PlanRequest) -> PlanMachineRow:
    cluster, machine = request.cluster, request.cluster.machine
    memory, room = machine.memory_bytes / GIB, strategies.tensor_bytes(machine) / GIB
    return PlanMachineRow(
        workload=request.name,
        device=machine.name,
        parameters=request.subject.parameters,
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


def _memory_columns(request: PlanRequest, policy: str, layout: Layout, memory: MemorySplit) -> dict[str, Any]:
    """Columns that rows of a strategy and rows of a checkpointing policy have in common."""
    kinds = ("weights", "gradients", "optimizer_state", "activations", "buffers")
    return {
        **request.settings,
        "checkpointing": policy,
        "strategy": layout.strategy,
        "gpus": layout.gpus,
        "tensor_parallel": layout.tensor,
        "replicas": layout.replicas if layout.strategy == "hsdp" else None,
        "blocks_per_group": layout.blocks_per_group if layout.blocks_per_group > 1 else None,
        **{f"{kind}_gib": getattr(memory, kind) / GIB for kind in kinds},
        "peak_gib": memory.total / GIB,
        "peak_at": memory.moment,
        "tensors_gib": strategies.tensor_bytes(request.cluster.machine) / GIB,
        "fits": strategies.fits(memory, request.cluster),
        "largest_batch": request.subject.largest_batch(policy, request.cluster, layout),
    }


def _strategy_row(request: PlanRequest, plan: StepPlan) -> PlanRow:
    step, cluster, layout, compute = request.step, request.cluster, plan.layout, plan.compute
    policy = step.checkpointing
    return PlanRow(
        **_memory_columns(request, policy, layout, plan.memory),
        smallest_gpus=strategies.fewest_gpus(partial(request.subject.memory, policy), cluster, layout),
        sent_gb=plan.sent / 1e9,
        forward_ms=1e3 * compute.forward.total,
        backward_ms=1e3 * compute.backward.total,
        optimizer_ms=1e3 * compute.optimizer.total,
        compute_ms=1e3 * compute.total,
        communication_ms=1e3 * plan.communication_s,
        exposed_ms=1e3 * plan.exposed_s,
        launch_ms=1e3 * plan.launch_s or None,
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
    flops, own = cluster.machine.matmul_flops[step.precision], request.subject.tokens
    if own is None:
        return
    tokens = cluster.gpus * own
    connections = [("within a node", cluster.machine.link.bus_bytes_per_s)] if cluster.gpus_per_node > 1 else []
    if cluster.nodes > 1:
        connections.append(("across nodes", cluster.gpus_per_node * cluster.network_bytes_per_s))
    for connection, rate in connections:
        at_data, at_fsdp = request.subject.least_tokens(cluster.machine, rate)
        least: dict[str, float | None] = {"data (gradients as kept)": at_data, "fsdp": at_fsdp}
        narrow = width = 0.0
        if with_tensor and request.model is not None:
            narrow = limits.intensity(flops, rate, PRECISIONS[step.precision].computed_bytes)
            width = limits.width_between_collectives(request.model)
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
                tokens_per_gpu=own,
            )


def _scaling_rows(request: PlanRequest, layouts: Sequence[Layout]) -> Iterator[PlanScalingRow]:
    """Throughput with the same batch on every GPU, up to `MOST_GPUS`: a row per number of GPUs and strategy."""
    for gpus in gpu_counts():
        cluster = scaled(request.cluster, gpus)
        for layout in layouts:
            if gpus % layout.tensor or (layout.strategy == "single") != (gpus == 1):
                continue
            placed = dataclasses.replace(layout, data=gpus // layout.tensor).placed_on(cluster)
            if layout.strategy == "hsdp":
                if (replicas := _replicas(request, cluster)) is None:
                    continue
                placed = dataclasses.replace(placed, replicas=replicas)
            plan = request.subject.plan(cluster, placed)
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
