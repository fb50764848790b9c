"""`trainstep memory --checkpointing`: a step's peak and time under each policy, predicted and measured."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from functools import partial

import torch

from trainstep.bench.outcome import Failure, attempt
from trainstep.bench.step import StepMeasurement, case_columns, measure_step
from trainstep.blocks import find_blocks
from trainstep.config import StepConfig
from trainstep.errors import UnsupportedError
from trainstep.kinds import row_of
from trainstep.measure.environment import describe
from trainstep.measure.memory import GIB
from trainstep.plan.memory import PeakBytes, best_blocks_per_checkpoint, peak_bytes
from trainstep.records import Row, Scalar
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
            best = best_blocks_per_checkpoint(source.model, config, on_cuda=_on_cuda(config))
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
) -> Iterator[Row]:
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
        predicted = _predict(source, each)
        values: dict[str, Scalar] = {"memory_gib": memory_gib}
        if predicted is not None:
            values |= {"predicted_gib": predicted.peak / GIB, "predicted_moment": predicted.moment}
        found = attempt(partial(measure_step, source, each, "step", warmup, steps))
        if isinstance(found, Failure):
            yield row_of("checkpointing", case, values, {}, found.status, found.reason, describe(device))
            continue
        samples = {"step": [sample.wall_ms for sample in found.timing.samples]}
        values |= _measured(found, predicted, samples["step"])
        yield row_of("checkpointing", case, values, samples, environment=describe(device))


def _predict(source: WorkloadSource, config: StepConfig) -> PeakBytes | None:
    """The predicted peak, where there is a formula."""
    if source.model is None:
        return None
    try:
        return peak_bytes(source.model, config, on_cuda=_on_cuda(config))
    except UnsupportedError:
        return None


def _on_cuda(config: StepConfig) -> bool:
    return resolve_device(config.device).type == "cuda"


def _measured(found: StepMeasurement, predicted: PeakBytes | None, step_ms: Sequence[float]) -> dict[str, Scalar]:
    values: dict[str, Scalar] = {**summarize(step_ms).columns("step")}
    if found.memory is not None:
        peaks = found.memory.by_phase
        values |= {"peak_gib": found.memory.peak / GIB, "peak_phase": max(peaks, key=peaks.__getitem__)}
        if predicted is not None:
            values["prediction_error"] = predicted.peak / found.memory.peak - 1
    return values
