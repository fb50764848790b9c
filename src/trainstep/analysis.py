"""The main job: facts of a workload, its step taken apart, the warm-up's effect, ceilings, the ladder, kernels."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from trainstep.bench.allocations import allocation_records
from trainstep.bench.check.step import first_form, plain_form
from trainstep.bench.ladder import climb
from trainstep.bench.profile import ceiling_records, profile_records
from trainstep.bench.step import StepCase, case_columns, run_cases
from trainstep.blocks import find_blocks
from trainstep.config import StepConfig
from trainstep.errors import UsageError
from trainstep.kinds import WorkloadRow
from trainstep.measure.environment import describe
from trainstep.measure.memory import GIB, parameter_bytes
from trainstep.plan.flops import OMISSIONS, forward_flops
from trainstep.randomness import seed_everything
from trainstep.records import Row
from trainstep.report.page import Report
from trainstep.workload import Workload, WorkloadSource, resolve_device

WARMUPS = (0, 1, 2, 5)
"""The warm-up study: means as they would have been after so many steps left out."""

PROFILED_AGAINST = 5
"""Steps without the profiler that the profiled ones are held against."""


def analyze(
    workload: WorkloadSource | Callable[[], Workload],
    config: StepConfig | None = None,
    *,
    steps: int = 10,
    on_record: Callable[[Row], object] | None = None,
) -> Report:
    """Analyse a workload and return the report; `.write(folder)` puts it on disk.

    Args:
        workload: a source, or a function without arguments that returns a `Workload` (it is called once per rung of the
            ladder, and must build the same weights from the same seed of torch, numpy and `random`).
        config: how the analysed step is taken; by default eager, in fp32, or with bf16 weights as they come. The ladder
            starts from the plain step.
        steps: timed steps per measurement, after warm-up; at least 7, below which ratios have no interval.
        on_record: called with every record as soon as it is known.
    """
    source = workload if isinstance(workload, WorkloadSource) else _source_of(workload)
    records: list[Row] = []
    for record in analysis_records(source, config or StepConfig(precision=source.own_precision), steps=steps):
        records.append(record)
        if on_record is not None:
            on_record(record)
    return Report(records)


def _source_of(factory: Callable[[], Workload]) -> WorkloadSource:
    if not callable(factory):
        raise UsageError(
            f"analyze takes a function that returns a Workload, not a {type(factory).__name__}: it builds the workload "
            "anew for every setting, so that all start from the same weights"
        )

    def build(step: StepConfig) -> Workload:
        seed_everything(step.seed)
        return factory()

    return WorkloadSource(getattr(factory, "__name__", "workload"), build)


def analysis_records(
    source: WorkloadSource, config: StepConfig, *, steps: int, trace: Path | None = None
) -> Iterator[Row]:
    """All records of an analysis, in order, each yielded when it is known; the profiler's trace is kept at `trace`."""
    if steps < 1:
        raise UsageError(f"steps is {steps}; expected at least 1")
    device = resolve_device(config.device)
    yield _facts(source, config)
    cases = [StepCase(source, config, "step", warmup, steps) for warmup in WARMUPS]
    yield from run_cases(cases, check=config != plain_form(config))  # what is plain has nothing plainer beside it
    yield from allocation_records(source, config)
    yield from ceiling_records(device)
    yield from climb(source, first_form(source, config), steps=steps)
    # Last: on a GPU the profiler's library stays in the process, and every launch after it takes 1.4 times as long.
    yield from profile_records(source, config, warmup=2, steps=PROFILED_AGAINST, profiled_steps=2, trace=trace)


def _facts(source: WorkloadSource, config: StepConfig) -> WorkloadRow:
    workload = source.build(config)
    parameters = list(workload.module.parameters())  # tied ones once
    facts = WorkloadRow(
        **case_columns(source, config),
        parameters=sum(parameter.numel() for parameter in parameters),
        trainable_parameters=sum(parameter.numel() for parameter in parameters if parameter.requires_grad),
        parameters_gib=parameter_bytes(workload.module) / GIB,
        blocks=len(find_blocks(workload.module)),
        environment=describe(resolve_device(config.device)),
    )
    if source.model is None:
        return facts
    flops = forward_flops(source.model, config.batch, config.context)
    tflop: dict[str, Any] = {f"{part}_tflop": count / 1e12 for part, count in vars(flops).items()}
    tflop["forward_tflop"] = flops.total / 1e12
    return dataclasses.replace(facts, tokens=config.batch * config.context, **tflop, flops_counted=OMISSIONS)
