"""`trainstep dtypes`: the dtypes of a training step, precision by precision, as rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from trainstep.base.config import StepConfig
from trainstep.base.errors import UnsupportedError
from trainstep.bench.step import case_columns
from trainstep.measure.dtypes import DtypeWatch, ModuleDtypes, StepDtypes, accumulate
from trainstep.measure.environment import describe
from trainstep.measure.outcome import Failure, attempt, failed_row
from trainstep.rows import AccumulationRow, DtypeRow
from trainstep.step.blocks import without_numbers
from trainstep.step.training_step import TrainingStep, uncompiled
from trainstep.step.workload import WorkloadSource, resolve_device

RESULT, LOSS = "(forward's result)", "(loss)"
"""Names of the two rows that belong to no module."""


def observe_dtypes(source: WorkloadSource, config: StepConfig) -> StepDtypes:
    """Build the workload, run one forward and backward pass of it, and say which dtypes were seen.

    Raises:
        UnsupportedError: the precision is not this device's, or compilation is asked for: compiled code keeps the
            dtypes that eager code shows, but has no modules left to show them.
    """
    if config.compile != "off":
        raise UnsupportedError(f"compile={config.compile} leaves no modules to watch; use --compile off")
    workload = source.build(config)
    watch = DtypeWatch(workload.module)
    watched = dataclasses.replace(
        workload, forward=watch.result_of(workload.forward), loss=watch.loss_of(workload.loss)
    )
    step = TrainingStep(watched, config)
    with uncompiled(), watch:  # hooks in what the workload compiles would break its graphs
        step.gradients(step.next_batch())
    return watch.found()


def dtype_records(source: WorkloadSource, configs: Iterable[StepConfig]) -> Iterator[DtypeRow]:
    """One row for every module, or group of alike modules, under every configuration; then the result and the loss."""
    for config in configs:
        case, environment = case_columns(source, config), describe(resolve_device(config.device))
        found = attempt(partial(observe_dtypes, source, config))
        if isinstance(found, Failure):
            yield failed_row(DtypeRow, case | {"module": "all"}, found, environment)
            continue
        yield from module_rows(found.modules, {**case, "environment": environment})
        for name, dtypes in ((RESULT, found.result), (LOSS, found.loss)):
            yield DtypeRow(**case, module=name, outputs=dtypes or None, environment=environment)


def module_rows(modules: Sequence[ModuleDtypes], own: Mapping[str, Any]) -> Iterator[DtypeRow]:
    """One row for every module, or group of alike modules, each with `own` columns."""
    for module, count in alike(modules):
        yield DtypeRow(
            **own,
            module=module.name or "(root)",
            class_name=module.kind,
            modules=count,
            parameters=module.parameters or None,
            inputs=module.inputs or None,
            outputs=module.outputs or None,
            gradients=module.gradients or None,
        )


def alike(modules: Sequence[ModuleDtypes]) -> list[tuple[ModuleDtypes, int]]:
    """Modules whose names differ in numbers only and whose dtypes are the same, as one, with their count.

    `blocks.0.norm` and `blocks.1.norm` become `blocks.*.norm`, ×2; a single module keeps its name.
    """
    groups: dict[ModuleDtypes, list[ModuleDtypes]] = {}
    for module in modules:
        groups.setdefault(dataclasses.replace(module, name=without_numbers(module.name)), []).append(module)
    return [(group if len(members) > 1 else members[0], len(members)) for group, members in groups.items()]


def accumulation_records() -> Iterator[AccumulationRow]:
    """0.01 added a thousand times: one row for each mixture of dtypes, computed here and now on the CPU."""
    environment = describe(torch.device("cpu"))
    for each in accumulate():
        yield AccumulationRow(**vars(each), environment=environment)
