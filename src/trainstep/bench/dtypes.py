"""`trainstep dtypes`: the dtypes of a training step, precision by precision, as rows."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._pytree import tree_map

from trainstep.base.config import StepConfig
from trainstep.base.errors import UnsupportedError, one_line
from trainstep.bench.tracing import as_fake, make_fake
from trainstep.measure.dtypes import DtypeWatch, StepDtypes, module_rows
from trainstep.measure.environment import describe
from trainstep.measure.outcome import Failure, attempt, failed_row
from trainstep.measure.step import case_columns
from trainstep.rows import DtypeRow
from trainstep.step.batches import map_tensors
from trainstep.step.training_step import TrainingStep, uncompiled
from trainstep.step.workload import WorkloadSource, resolve_device

RESULT, LOSS = "(forward's result)", "(loss)"
"""Names of the two rows that belong to no module."""


def observe_dtypes(source: WorkloadSource, config: StepConfig) -> StepDtypes:
    """Build the workload, run one forward and backward pass of it, and say which dtypes were seen.

    On a CPU also which dtypes forward and loss would have on CUDA, where autocast has other rules.

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
    batch = step.next_batch()
    with uncompiled(), watch:  # hooks in what the workload compiles would break its graphs
        step.gradients(batch)
    found = watch.found()
    if step.device.type == "cuda":
        return found
    try:
        return found.with_cuda(_computed_on_cuda(step, watch, batch))
    except Exception as error:  # whatever the model's own code raises when its tensors have no data
        return dataclasses.replace(found, not_computed=f"{type(error).__name__}: {one_line(error)}")


def _computed_on_cuda(step: TrainingStep, watch: DtypeWatch, batch: Any) -> StepDtypes:
    """The dtypes of the step's forward and loss by autocast's rules for CUDA, on a machine that may have no GPU.

    The rules are kernels of torch's dispatcher, which a tensor's device selects. So the module and the batch become
    tensors without data on a CUDA device, in place. Gradients have their parameters' dtypes on every device.
    """
    step.module.requires_grad_(False)  # what autograd records asks for the device, and would end the process
    step.device, fakes = torch.device("cuda", 0), FakeTensorMode(allow_non_fake_inputs=True)
    make_fake(step.module, fakes, step.device)
    batch = map_tensors(batch, lambda tensor: as_fake(tensor, fakes, step.device))
    with uncompiled(), fakes, torch.no_grad(), _without_cuda(), watch, warnings.catch_warnings():
        warnings.filterwarnings("error", ".*Disabling autocast")  # the model's own torch.autocast, without a GPU
        step.differentiable_loss(batch)
    return watch.found()


@contextmanager
def _without_cuda() -> Iterator[None]:
    """Inside, functions that set the current device and cast nothing run where torch is built without CUDA, too.

    They run as on the CPU, and what they return is on CUDA again. Whoever has gradients recorded gets UnsupportedError.
    """
    setting = torch._C._set_grad_enabled

    def set_grad_enabled(is_enabled: bool) -> None:
        if is_enabled:
            raise UnsupportedError("forward differentiates by itself, which needs the GPU")
        setting(is_enabled)

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(torch._C, "_set_grad_enabled", set_grad_enabled))
        for owner, names in _SET_THE_DEVICE.items():
            for name in names:
                stack.enter_context(mock.patch.object(owner, name, _or_on_cpu(getattr(owner, name))))
        yield


_SET_THE_DEVICE: Mapping[Any, Sequence[str]] = {
    FakeTensor: ("__getitem__", "__setitem__", "__invert__", "contiguous", "copy_", "new", "new_tensor", "to", "cuda"),
    torch: ("tensor", "as_tensor", "batch_norm"),
}
"""Functions that set the device, of all that is common in models; autocast's rules for CUDA name none of them."""


def _or_on_cpu(function: Any) -> Any:
    """The function, run as on the CPU where it asks for CUDA and torch has none."""

    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except RuntimeError as error:
            if "not linked with support for cuda" not in str(error):
                raise
        args, kwargs = tree_map(partial(_moved, "cuda", "cpu"), (args, kwargs))
        return tree_map(partial(_moved, "cpu", "cuda:0"), function(*args, **kwargs))

    return run


def _moved(there: str, here: str, value: Any) -> Any:
    """A tensor without data, or what names a device, on another kind of device."""
    if isinstance(value, torch.Tensor):
        is_there = value.device.type == there
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=here) if is_there else value
    is_device = isinstance(value, (str, torch.device)) and str(value).partition(":")[0] == there
    return torch.device(here) if is_device else value


def dtype_records(source: WorkloadSource, configs: Iterable[StepConfig]) -> Iterator[DtypeRow]:
    """A row for every module, or group of alike modules, under every configuration; then the result and the loss."""
    for config in configs:
        case, environment = case_columns(source, config), describe(resolve_device(config.device))
        found = attempt(partial(observe_dtypes, source, config))
        if isinstance(found, Failure):
            yield failed_row(DtypeRow, case | {"module": "all"}, found, environment)
            continue
        own = {**case, "environment": environment}
        yield from module_rows(found.modules, own)
        result, loss = (found.result, found.cuda_result), (found.loss, found.cuda_loss)
        for name, (here, on_cuda), why in ((RESULT, result, found.not_computed), (LOSS, loss, None)):
            yield DtypeRow(**own, module=name, outputs=here or None, cuda_outputs=on_cuda or None, not_computed=why)
