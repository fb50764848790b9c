"""A step of any workload traced without running it: built and stepped with fake tensors, which have shapes and no data.

What fake tensors cannot do (control flow that depends on values, such as how many tokens an expert gets) is traced on
real ones instead, and `TracedStep.basis` says so. Compiled code has no operators to trace.
"""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._pytree import tree_leaves

from trainstep.base.config import StepConfig, StepMode
from trainstep.base.errors import UnsupportedError, UsageError, one_line
from trainstep.base.precision import PRECISIONS
from trainstep.checkpointing.policies import policy_of
from trainstep.measure.as_on_gpu import as_on_gpu
from trainstep.measure.flops import counted_flops
from trainstep.measure.outcome import Failure, attempt
from trainstep.measure.step import WARMUP
from trainstep.measure.tracing import GRADIENTS, OTHER, STATE, WEIGHTS, StepTracer
from trainstep.plan.traced import TracedCase, TracedStep
from trainstep.step.batches import count_tokens, map_tensors, tensors_of
from trainstep.step.blocks import find_blocks
from trainstep.step.training_step import TrainingStep
from trainstep.step.weights import optimizer_state_tensors
from trainstep.step.workload import Workload, WorkloadSource, resolve_device

REAL_BYTES_SHARE = 0.5
"""Share of the free memory that weights, gradients and two moments may take where a step is traced on real tensors."""


class ShapesAlone(FakeTensorMode):
    """Tensors have no data, but for whole numbers and booleans that come of no such tensor.

    Positions, labels and masks are few bytes, and code looks at them.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        if not any(isinstance(each, FakeTensor) for each in given):
            is_asked = "Tensor" not in str(func._schema).rpartition("->")[2]  # such as whether two are equal
            is_known = bool(given) and (is_asked or not any(map(_has_fractions, given)))  # else it may be large
            made = func(*args, **kwargs) if is_known else super().__torch_dispatch__(func, types, args, kwargs)
            if not any(_has_fractions(each) for each in tree_leaves(made) if isinstance(each, Tensor)):
                return made if is_known else func(*args, **kwargs)
        return super().__torch_dispatch__(func, types, args, kwargs)


def _has_fractions(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def trace_step(
    source: WorkloadSource,
    config: StepConfig,
    mode: StepMode = "step",
    *,
    only_shapes: bool = False,
    for_gpu: bool = False,
) -> TracedStep:
    """Trace one step, its optimizer's state in place, on the kind of device that the configuration names.

    Args:
        for_gpu: with the operators of CUDA, if there are tensors without data (`TracedStep.basis` says whose).
        only_shapes: the model may be larger than this machine's memory, and is then built of fake tensors too. That
            leaves them behind where a factory keeps what it made for the next call, so nothing may be measured after.

    Raises:
        UnsupportedError: compiled code; activations in host memory; a step that fake tensors cannot trace, and that is
            too large for real ones.
    """
    if config.compile != "off":
        raise UnsupportedError("compiled code has no operators to trace; use --compile off")
    policy = policy_of(config.checkpointing)
    if policy is not None and any(block.host for block in policy.blocks.values()):
        raise UnsupportedError("what goes to host memory cannot be traced; measure it (trainstep memory --peaks)")
    fakes = ShapesAlone(allow_non_fake_inputs=True)
    large = _without_room(source, config, fakes) if only_shapes else None
    try:
        if large is not None:
            return _traced(large, config, mode, fakes, _LARGE, for_gpu)
        return _traced(source.build(config), config, mode, ShapesAlone(allow_non_fake_inputs=True), _FAKE, for_gpu)
    except Exception as error:  # whatever the model's own code raises when its tensors have no data
        of = "" if isinstance(error, UsageError) else f"{type(error).__name__}: "
        why = f"{of}{one_line(error, 120)}"
    workload = large or source.build(config)
    if not _has_room(workload.module):
        raise UnsupportedError(f"the step is too large to be run here, and cannot be traced on shapes alone ({why})")
    return _traced(workload, config, mode, None, f"{_REAL} ({why})", False)


def traced_cases(source: WorkloadSource, config: StepConfig, policies: Sequence[str] = ()) -> dict[str, TracedCase]:
    """The step on a GPU under the policy of `config`, which comes first, and others: by default none and, as far as
    they can be traced, every-1 and selective.

    Raises:
        UnsupportedError: a step that cannot be traced; of the policies by default those that cannot be are left out.
    """
    trace = partial(trace_step, source, only_shapes=True, for_gpu=True)
    cases: dict[str, TracedCase] = {}
    for policy in dict.fromkeys([config.checkpointing, *(policies or ("none", "every-1", "selective"))]):
        each = dataclasses.replace(config, checkpointing=policy)
        if policies or policy == config.checkpointing:
            step = trace(each)
        else:
            found = attempt(partial(trace, each))
            if isinstance(found, Failure):
                continue
            step = found
        sharded: TracedStep | Failure = step
        if PRECISIONS[config.precision].is_autocast:
            sharded = attempt(partial(trace, dataclasses.replace(each, precision="bf16-pure")))
        cases[policy] = TracedCase(step, config.precision, step if isinstance(sharded, Failure) else sharded)
    return cases


def _without_room(source: WorkloadSource, config: StepConfig, fakes: FakeTensorMode) -> Workload | None:
    """The workload built of fake tensors, if real ones would have no room."""
    try:
        with fakes:
            workload = source.build(config)
    except Exception:  # a mistake in the factory comes up again where it is built as it is
        logging.getLogger(__name__).debug("the factory does not work on fake tensors", exc_info=True)
        return None
    return None if _has_room(workload.module) else workload


def _has_room(module: nn.Module) -> bool:
    """True if weights, gradients and two moments take at most `REAL_BYTES_SHARE` of the free memory."""
    needed = 4 * sum(parameter.nbytes for parameter in module.parameters())
    return needed <= REAL_BYTES_SHARE * os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


_WORKSPACES = {"aten::mkldnn_rnn_layer", "aten::_cudnn_rnn", "aten::miopen_rnn"}
"""Operators that keep what their shape functions leave out."""
_FAKE = "one step was traced on tensors without data"
_LARGE = f"{_FAKE}, attention under a mask taken for causal"
_REAL = "one step was run and traced, as it cannot be traced without data"


def _traced(
    workload: Workload, config: StepConfig, mode: StepMode, fakes: FakeTensorMode | None, basis: str, for_gpu: bool
) -> TracedStep:
    with torch.compiler.set_stance("force_eager"):  # what the model's author compiled: fake tensors would crash it
        return _traced_eagerly(workload, config, mode, fakes, basis, for_gpu)


def _traced_eagerly(
    workload: Workload, config: StepConfig, mode: StepMode, fakes: FakeTensorMode | None, basis: str, for_gpu: bool
) -> TracedStep:
    device, is_large = resolve_device(config.device), basis == _LARGE
    if fakes is not None:
        make_fake(workload.module, fakes, device)
    stays_here = device.type == "cuda" or not for_gpu
    basis += f", with {device.type.upper() if stays_here else 'CUDA'} kernels"

    @contextmanager
    def inside() -> Iterator[None]:
        with fakes or nullcontext(), nullcontext() if stays_here else as_on_gpu():
            yield

    with inside():
        step = TrainingStep(workload, config)
        for group in [] if stays_here else step.optimizer.param_groups:
            if group.get("foreach", False) is None and not group.get("fused"):
                group["foreach"] = True  # torch's default on a GPU
    step.scaler = None if fakes is not None else step.scaler  # it looks at values: whether a gradient is infinite
    warmup = WARMUP if fakes is None else 1  # with random depths, the step that `memory --peaks` would measure
    batches = [map_tensors(step.next_batch(), lambda each: as_fake(each, fakes, device)) for _ in range(warmup + 1)]
    module, batch = step.module, batches.pop()
    with inside():
        for each in batches:
            step(each, mode=mode)
        state = list(optimizer_state_tensors(step.optimizer))
        tensors = tensors_of(batch)
        trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        owned = {WEIGHTS: [*module.parameters(), *module.buffers()], STATE: state, OTHER: tensors}
        with StepTracer(owned, trained) as tracer:
            step(batch, mode=mode, phase=tracer.phase)
        if fakes is not None and (unknown := {each.name for each in tracer.operators()} & _WORKSPACES):
            raise UnsupportedError(f"the workspace of {unknown.pop()} is not known without running it")
        flops = None
        if config.checkpointing == "none":
            with counted_flops(masks_are_known=not is_large) as count:
                step(batch, mode="forward" if mode == "forward" else "forward-backward")
            flops = count() or None
    groups = _groups(module)
    return TracedStep(
        parameters=sum(parameter.numel() for parameter in module.parameters()),
        parameter_bytes=sum(parameter.nbytes for parameter in module.parameters()),
        trained_bytes=sum(parameter.nbytes for parameter in trained),
        weights=tracer.owned_bytes(WEIGHTS),
        gradients=tracer.owned_bytes(GRADIENTS),
        optimizer_state=tracer.owned_bytes(STATE),
        batch=tracer.owned_bytes(OTHER),
        largest_group=max(groups, default=0),
        largest_gradient=max((parameter.nbytes for parameter in trained), default=0),
        groups=len(groups),
        kept_groups=sum(groups[-_KEPT_GROUPS:]),
        moments={name: tuple(moments) for name, moments in tracer.moments().items()},
        operators=tracer.operators(),
        flops=flops,
        tokens=count_tokens(batch),
        basis=basis,
    )


_KEPT_GROUPS = 3
"""The last groups of forward are the first of backward: the one it begins with, and two that are gathered ahead."""


def _groups(module: nn.Module) -> list[int]:
    """Bytes of the parameters that FSDP would gather together, in order of definition: each block's, and those of each
    other module's own. A tied weight counts where it comes last."""
    blocks = set(find_blocks(module))
    inside = {each for block in blocks for each in block.modules()} - blocks
    owners = [each for each in module.modules() if each not in inside]
    owner_of = {each: number for number, one in enumerate(owners) for each in one.parameters(recurse=one in blocks)}
    sizes = [0] * len(owners)
    for parameter, number in owner_of.items():
        sizes[number] += parameter.nbytes
    return [size for size in sizes if size]


def as_fake(tensor: Tensor, fakes: FakeTensorMode | None, device: torch.device) -> Tensor:
    """The tensor without its data, on the device."""
    if fakes is None or (isinstance(tensor, FakeTensor) and tensor.device.type == device.type):
        return tensor
    if isinstance(fakes, ShapesAlone) and not _has_fractions(tensor):
        return tensor.to(device)
    if tensor.device.type == device.type:
        return fakes.from_tensor(tensor)
    with fakes:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)


def make_fake(module: nn.Module, fakes: FakeTensorMode, device: torch.device) -> None:
    """Put fake tensors in the place of a module's parameters and buffers; those that are shared stay shared."""
    made: dict[int, Any] = {}
    for each in module.modules():
        for own in (each._parameters, each._buffers):
            for name, tensor in own.items():
                if tensor is None:
                    continue
                if id(tensor) not in made:
                    fake: Tensor = as_fake(
                        tensor.detach() if isinstance(tensor, nn.Parameter) else tensor, fakes, device
                    )
                    if isinstance(tensor, nn.Parameter):
                        fake = nn.Parameter(fake, requires_grad=tensor.requires_grad)
                    made[id(tensor)] = fake
                own[name] = made[id(tensor)]
    object.__setattr__(module, "to", lambda *_, **__: module)  # it is there, and fake tensors cannot be moved
