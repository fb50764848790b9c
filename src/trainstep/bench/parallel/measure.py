"""One scheme measured: on each rank the time of its steps, its memory at three moments, its collectives; and its row.

In the row, what `plan.communication` says of memory and traffic stands beside what was measured.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from trainstep.bench.check.parallel import Agreement
from trainstep.bench.outcome import Failure, failed_row
from trainstep.bench.parallel_case import ParallelCase
from trainstep.bench.step import count_tokens, phase_samples
from trainstep.config import ModelConfig, OptimizerImpl, PhaseContext
from trainstep.kinds import ParallelRow
from trainstep.measure.collectives import Collective, recorded_collectives
from trainstep.measure.environment import describe, gpu_state
from trainstep.measure.memory import GIB
from trainstep.measure.timing import Timing, device_clock, time_steps
from trainstep.parallel.process import Process
from trainstep.plan.communication import COLLECTIVES, RankBytes, bytes_sent, rank_bytes
from trainstep.plan.strategies import largest_group
from trainstep.precision import PRECISIONS, PrecisionName
from trainstep.records import Scalar, Times, make_row
from trainstep.replicas import local_gradients, local_state, uncounted_bytes
from trainstep.schemes import Scheme
from trainstep.stats import summarize
from trainstep.training_step import TrainingStep


@dataclass(frozen=True)
class RankMeasurement:
    """What one rank measured."""

    timing: Timing
    memory: Mapping[str, int]
    """Bytes, at the moments start, before_step and after_step: `MOMENT_weights`, `MOMENT_gradients` and
    `MOMENT_optimizer_state`; on a GPU also `MOMENT`, all that is allocated, and `peak`, the most of it in a step."""
    collectives: Sequence[Collective]
    """Of one step."""
    tokens: int | None
    """In this rank's batch; None where it is not known."""


def measure(case: ParallelCase, process: Process) -> RankMeasurement:
    """Build the case's step, time it, and take one more step for memory and collectives. All ranks call it."""
    on_gpu = process.device.type == "cuda"
    step = case.build(process)
    memory = _held("start", step, process.device)
    batch = step.next_batch()

    def run(phase: PhaseContext) -> None:
        step(batch, phase=phase)

    warmup = max(case.warmup, 1)  # the optimizer's state is there from the second step on
    timing = time_steps(run, device=device_clock(process.device), warmup=warmup, steps=case.steps)
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(process.device)
    hooks = [
        step.optimizer.register_step_pre_hook(lambda *_: memory.update(_held("before_step", step, process.device))),
        step.optimizer.register_step_post_hook(lambda *_: memory.update(_held("after_step", step, process.device))),
    ]
    with recorded_collectives() as collectives:
        step(batch)
    for hook in hooks:
        hook.remove()
    if on_gpu:
        memory["peak"] = torch.cuda.max_memory_allocated(process.device) + uncounted_bytes(step.replica)
    return RankMeasurement(timing, memory, collectives, count_tokens(batch))


def _held(moment: str, step: TrainingStep, device: torch.device) -> dict[str, int]:
    """Bytes on this rank now: by kind, and on a GPU all that is held."""
    kinds = {
        "weights": [*step.replica.module.parameters(), *step.replica.module.buffers()],
        "gradients": local_gradients(step.replica),
        "optimizer_state": local_state(step.replica),
    }
    found = {f"{moment}_{kind}": sum(_local_bytes(tensor) for tensor in tensors) for kind, tensors in kinds.items()}
    if device.type == "cuda":
        found[moment] = torch.cuda.memory_allocated(device) + uncounted_bytes(step.replica)
    return found


def _local_bytes(tensor: Tensor) -> int:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).nbytes


@dataclass(frozen=True)
class Timed:
    """A scheme that was measured."""

    ranks: Sequence[RankMeasurement]
    """By rank."""
    agreement: Agreement | None
    """None for single, which has nothing to agree with."""


Result = Timed | Agreement | Failure
"""A scheme's measurement; or how far it is from one process, where that is too far; or why it failed."""


def parallel_row(
    case: ParallelCase, process: Process, result: Result, *, num_parameters: int, single_ms: float | None
) -> ParallelRow:
    """The row of a scheme. One that does not agree shows by how much, and no speed.

    Args:
        case: the scheme.
        process: rank 0.
        result: its outcome.
        num_parameters: of the model.
        single_ms: the step without communication, where it was timed before.
    """
    columns, environment = case.columns(process.world_size), describe(process.device)
    if isinstance(result, Failure):
        return failed_row(ParallelRow, columns, result, environment)
    if isinstance(result, Agreement):
        reason = (
            f"after a few steps its loss is off by {result.loss_error:.3g} ({result.loss_allowed:.3g} allowed) and its "
            f"parameters by {result.update_error:.3g} of their movement ({result.update_allowed:.3g} allowed)"
        )
        values = dataclasses.asdict(result)
        return make_row(ParallelRow, columns, values, status="wrong", reason=reason, environment=environment)
    samples = phase_samples(_slowest(result.ranks).timing)
    times = {name: Times.of(summarize(milliseconds), spread=False) for name, milliseconds in samples.items()}
    step, tokens = times["step"].median, [each.tokens for each in result.ranks if each.tokens is not None]
    plan = planned_bytes(
        case.scheme,
        num_parameters,
        process.world_size,
        precision=case.config.precision,
        optimizer=case.config.optimizer,
        model=case.source.model,
        peer_copies=case.scheme.takes_peer_copies and process.device.type == "cuda",
    )
    values = {
        **({} if result.agreement is None else dataclasses.asdict(result.agreement)),
        "n": len(samples["step"]),
        "exposed_ms": None if single_ms is None or not case.scheme.communicates else step - single_ms,
        "tokens_per_s": 1e3 * sum(tokens) / step if tokens else None,
        **_traffic(case, result.ranks[0].collectives, plan, process.world_size),
        **_memory(result.ranks),
        **(moments(plan) if case.source.is_builtin else {}),  # a user's own optimizer may keep any state
        **gpu_state(process.device),
    }
    row = make_row(ParallelRow, columns, values, samples=samples, environment=environment)
    return dataclasses.replace(row, times=times)


def _slowest(ranks: Sequence[RankMeasurement]) -> RankMeasurement:
    """The rank that a step lasts as long as."""
    return max(ranks, key=lambda each: summarize([sample.wall_ms for sample in each.timing.samples]).median)


def _traffic(
    case: ParallelCase, collectives: Sequence[Collective], plan: RankBytes, world_size: int
) -> dict[str, Scalar]:
    """Collectives of one step, and bytes that a rank sends for them over a ring, beside those that are planned."""
    sent = sum(_sent(call, world_size) for call in collectives)
    return {
        "collectives": len(collectives),
        "sent_gib": sent / world_size / GIB,
        "sent_floor_gib": plan.sent / GIB if case.scheme.communicates else 0.0,
    }


def _sent(call: Collective, world_size: int) -> int:
    """By all ranks together."""
    name = "reduce-scatter" if call.name == "all-to-all" else call.name  # of each buffer, all but the own share
    return bytes_sent(name, call.bytes, world_size) if name in COLLECTIVES else 0


def planned_bytes(
    scheme: Scheme,
    num_parameters: int,
    world_size: int,
    *,
    precision: PrecisionName,
    optimizer: OptimizerImpl,
    model: ModelConfig | None = None,
    peer_copies: bool = False,
) -> RankBytes:
    """Memory and traffic of a rank.

    Args:
        scheme: whose.
        num_parameters: of the model.
        world_size: ranks.
        precision: of the step; under autocast FSDP gathers and sends in 16 bits.
        optimizer: its state is two moments per parameter, or nothing.
        model: the built-in model's shape, for the size of its largest group; None for a user's.
        peer_copies: FSDP's transport.
    """
    entry = PRECISIONS[precision]
    narrow = entry.computed_bytes if scheme.shards_weights and entry.is_autocast else None
    return rank_bytes(
        scheme.planned_as or "ddp",
        num_parameters,
        world_size,
        state_per_parameter=0 if optimizer == "sgd" else 8,
        compute_bytes=narrow,
        reduce_bytes=narrow,
        largest_group=0 if model is None else largest_group(model),
        scattered=not scheme.copies_gradients,
        copies=scheme.copies_gradients,
        peer_copies=peer_copies,
    )


def moments(plan: RankBytes) -> dict[str, Scalar]:
    """The three moments at which a rank's memory is measured, as columns."""
    return {
        "predicted_start_gib": plan.start / GIB,
        "predicted_before_step_gib": plan.before_step / GIB,
        "predicted_after_step_gib": plan.after_step / GIB,
    }


def _memory(ranks: Sequence[RankMeasurement]) -> dict[str, Scalar]:
    """On the rank that holds most."""
    names = dict.fromkeys(name for each in ranks for name in each.memory)
    return {f"{name}_gib": max(each.memory[name] for each in ranks) / GIB for name in names}
