"""The main job: facts of a workload, its step taken apart, the warm-up's effect, ceilings, the ladder, kernels."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from trainstep.base.config import StepConfig
from trainstep.base.errors import UsageError
from trainstep.bench.allocations import allocation_records
from trainstep.bench.profile import ceiling_records, profile_records
from trainstep.bench.step import StepCase, plainest, run_cases
from trainstep.check.step import StepCheck, first_form, plain_form
from trainstep.ladder.change import changes_of_step, chosen
from trainstep.ladder.steps import climb
from trainstep.measure.environment import describe
from trainstep.measure.memory import GIB, parameter_bytes
from trainstep.measure.step import case_columns
from trainstep.plan.flops import OMISSIONS, forward_flops
from trainstep.report.page import Report
from trainstep.rows import WorkloadRow
from trainstep.rows.records import Row
from trainstep.step.blocks import find_blocks
from trainstep.step.rebuilding import Factory
from trainstep.step.workload import Workload, WorkloadSource, resolve_device

WARMUPS = (0, 1, 2, 5)
"""The warm-up study: means as they would have been after so many steps left out."""

QUICK_WARMUPS = (0, 1)
"""The warm-up study of a quick analysis."""
STEPS, QUICK_STEPS = 10, 6
"""Timed steps of an analysis, and of a quick one: six are the fewest that have an interval."""

PROFILED_AGAINST = 5
"""Steps without the profiler that the profiled ones are held against."""


def analyze(
    workload: WorkloadSource | Callable[[], Workload],
    config: StepConfig | None = None,
    *,
    steps: int | None = None,
    quick: bool = False,
    changes: str | None = None,
    on_record: Callable[[Row], object] | None = None,
    on_part: Callable[[str], object] = lambda part: None,
) -> Report:
    """Analyse a workload and return the report; `.write(folder)` puts it on disk.

    Args:
        workload: a source, or a function without arguments that returns a `Workload` (it is called once per change
            of the ladder, and must build the same weights from the same seed of torch, numpy and `random`).
        config: how the analysed step is taken; by default eager, in fp32, or with bf16 weights as they come. The ladder
            starts from the plain step.
        steps: timed steps per measurement, after warm-up. By default `STEPS`, or `QUICK_STEPS` with `quick`. Ratios
            have intervals from 7 up.
        quick: stop at the facts, the phases, the memory and the kernels: nothing is compiled or checked, and there is
            no ladder.
        changes: names of what the ladder tries, divided by commas; by default all that may help.
        on_record: called with every record as soon as it is known.
        on_part: called with the name of each part before it is measured.
    """
    source = workload if isinstance(workload, WorkloadSource) else _source_of(workload)
    records: list[Row] = []
    own = config or StepConfig(precision=source.own_precision)
    for record in analysis_records(source, own, steps=steps, quick=quick, changes=changes, on_part=on_part):
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

    build = Factory(factory)
    return WorkloadSource(getattr(factory, "__name__", "workload"), lambda step: build(step.seed))


def analysis_records(
    source: WorkloadSource,
    config: StepConfig,
    *,
    steps: int | None = None,
    quick: bool = False,
    changes: str | None = None,
    trace: Path | None = None,
    on_part: Callable[[str], object] = lambda part: None,
) -> Iterator[Row]:
    """All records of an analysis, in order, each yielded when it is known; the profiler's trace is kept at `trace`.

    `quick`, `changes` and `on_part` are as in `analyze`.
    """
    steps = (QUICK_STEPS if quick else STEPS) if steps is None else steps
    if steps < 1:
        raise UsageError(f"steps is {steps}; expected at least 1")
    device, base = resolve_device(config.device), first_form(source, config)
    tried = chosen(changes_of_step(source, device.type, base), changes)  # before minutes go by
    facts = _facts(source, config)  # where a mistake shows, which then is the only line
    on_part("facts")
    yield facts
    is_checked = not quick and config != plain_form(config)  # what is plain has nothing plainer beside it
    on_part("phases of the step and its warm-up" + (", checked beside the plain step" if is_checked else ""))
    cases = [StepCase(source, config, "step", each, steps) for each in (QUICK_WARMUPS if quick else WARMUPS)]
    judge = None if quick else StepCheck(source, plainest(config))  # it takes the plain step once for all it judges
    yield from run_cases(cases, check=is_checked, judge=judge)
    on_part("memory: every allocation of a step")
    seen = dataclasses.replace(config, graph="off")  # the same kernels, one by one
    yield from allocation_records(source, seen)
    on_part("what the device reaches")
    yield from ceiling_records(device)
    if not quick:
        yield from climb(source, base, steps=steps, changes=tried, judge=judge, is_named=bool(changes), on_part=on_part)
    # Last: on a GPU the profiler's library stays in the process, and every launch after it takes 1.4 times as long.
    on_part("kernels: a step under the profiler")
    against, profiled = (2, 1) if quick else (PROFILED_AGAINST, 2)
    yield from profile_records(source, seen, warmup=2, steps=against, profiled_steps=profiled, trace=trace)


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
