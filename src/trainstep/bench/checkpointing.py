"""`trainstep memory --checkpointing`: a step's peak and time under each policy, predicted and measured."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from functools import partial

import torch

from trainstep.bench.outcome import Failure, attempt
from trainstep.bench.peaks import peak_values, predicted_peak
from trainstep.bench.step import case_columns, measure_step
from trainstep.blocks import find_blocks
from trainstep.config import StepConfig
from trainstep.errors import UnsupportedError
from trainstep.kinds import CheckpointingRow
from trainstep.measure.environment import describe
from trainstep.measure.memory import GIB
from trainstep.plan.memory import best_blocks_per_checkpoint
from trainstep.records import Scalar, make_row
from trainstep.stats import summarize
from trainstep.workload import WorkloadSource, resolve_device


def default_policies(source: WorkloadSource, config: StepConfig) -> list[str]:
    """none, every-K for K = 1, 2, 4 … and for the predicted best K with its neighbours, selective and recursive."""
    layers = source.model.num_layers if source.model is not None else len(find_blocks(source.build(config).module))
    if layers == 0:
        raise UnsupportedError(f"{source.name} has no blocks in an nn.ModuleList, so nothing to checkpoint by block")
    sizes = {1 << power for power in range(layers.bit_length())} | {layers}
    if source.model is not None:
        with contextlib.suppress(UnsupportedError):  # where there is no formula
            best = best_blocks_per_checkpoint(
                source.model, config, on_cuda=resolve_device(config.device).type == "cuda"
            )
            sizes |= {best - 1, best, best + 1} & set(range(1, layers + 1))
    return ["none", *(f"every-{size}" for size in sorted(sizes)), "selective", "recursive"]


def checkpointing_records(
    source: WorkloadSource,
    config: StepConfig,
    names: Sequence[str],
    *,
    memory_gib: float | None = None,
    warmup: int = 2,
    steps: int = 10,
) -> Iterator[CheckpointingRow]:
    """One row per policy, in the order given.

    Args:
        memory_gib: what the step may take, for naming the best policy; None: the GPU's memory, on a CPU no limit.
    """
    device = resolve_device(config.device)
    if memory_gib is None and device.type == "cuda":
        memory_gib = torch.cuda.get_device_properties(device).total_memory / GIB
    configs = [dataclasses.replace(config, checkpointing=name) for name in names]  # so that a wrong name costs no run
    for each in configs:
        case = case_columns(source, each) | {"checkpointing": each.checkpointing}
        predicted = predicted_peak(source, each)
        values: dict[str, Scalar] = {"memory_gib": memory_gib}
        values["predicted_moment"] = predicted.moment if predicted is not None else None
        found = attempt(partial(measure_step, source, each, "step", warmup, steps))
        if isinstance(found, Failure):
            values |= peak_values(predicted, None)
            outcome = {"status": found.status, "reason": found.reason}
            yield make_row(CheckpointingRow, case, values, environment=describe(device), **outcome)
            continue
        step_ms = [sample.wall_ms for sample in found.timing.samples]
        values |= summarize(step_ms).columns("step") | peak_values(predicted, found.memory)
        yield make_row(CheckpointingRow, case, values, samples={"step": step_ms}, environment=describe(device))
