"""One scheme measured on one rank: the time of its steps, its memory at three moments, its collectives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from trainstep.bench.parallel.case import ParallelCase
from trainstep.bench.step import count_tokens
from trainstep.measure.collectives import Collective, recorded_collectives
from trainstep.measure.timing import Timing, device_clock, time_steps
from trainstep.parallel.process import Process
from trainstep.phases import PhaseContext
from trainstep.replicas import local_gradients, local_state, uncounted_bytes
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
    memory = _memory("start", step, process.device)
    batch = step.next_batch()

    def run(phase: PhaseContext) -> None:
        step(batch, phase=phase)

    warmup = max(case.warmup, 1)  # the optimizer's state is there from the second step on
    timing = time_steps(run, device=device_clock(process.device), warmup=warmup, steps=case.steps)
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(process.device)
    hooks = [
        step.optimizer.register_step_pre_hook(lambda *_: memory.update(_memory("before_step", step, process.device))),
        step.optimizer.register_step_post_hook(lambda *_: memory.update(_memory("after_step", step, process.device))),
    ]
    with recorded_collectives() as collectives:
        step(batch)
    for hook in hooks:
        hook.remove()
    if on_gpu:
        memory["peak"] = torch.cuda.max_memory_allocated(process.device) + uncounted_bytes(step.replica)
    return RankMeasurement(timing, memory, collectives, count_tokens(batch))


def _memory(moment: str, step: TrainingStep, device: torch.device) -> dict[str, int]:
    """Bytes on this rank now: by kind, and on a GPU all that is held."""
    held = {
        "weights": [*step.replica.module.parameters(), *step.replica.module.buffers()],
        "gradients": local_gradients(step.replica),
        "optimizer_state": local_state(step.replica),
    }
    found = {f"{moment}_{kind}": sum(_local_bytes(tensor) for tensor in tensors) for kind, tensors in held.items()}
    if device.type == "cuda":
        found[moment] = torch.cuda.memory_allocated(device) + uncounted_bytes(step.replica)
    return found


def _local_bytes(tensor: Tensor) -> int:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).nbytes
