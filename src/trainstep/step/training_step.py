"""A training step of a workload under a `StepConfig`: the precision, checkpointing, compilation and optimizer.

All of it is applied from outside, so it works on any module; the phases are announced to whatever instrument listens.
"""

from __future__ import annotations

import functools
import inspect
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from trainstep.base.config import PhaseContext, StepConfig, StepMode, no_phases
from trainstep.base.errors import UnsupportedError, UsageError
from trainstep.base.precision import PRECISIONS
from trainstep.checkpointing.policies import INSTEAD
from trainstep.checkpointing.recomputing import Checkpointing
from trainstep.checkpointing.updating import UpdatesInBackward
from trainstep.step.batches import map_tensors
from trainstep.step.blocks import find_blocks
from trainstep.step.casting import (
    autocast,
    cast_parameters,
    check_precision,
    matmul_precision,
    stored_dtype,
    widen,
    widened,
)
from trainstep.step.graph import REFUSED, StepGraph
from trainstep.step.weights import load_buffers
from trainstep.step.workload import Workload, WorkloadSource, has_bf16_weights, resolve_device

ACTIVATION_BUDGET = 0.8
"""Share of a compiled block's saved tensors that is kept, where "blocks-recompute" is asked for (torch's
`activation_memory_budget`). Norms and a SwiGLU's product are a third of it, and are computed again below 1; below 0.7
or so products would be, too, which a policy of checkpointing chooses better."""

MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


@dataclass(frozen=True)
class Replica:
    """A module and its optimizer, as one rank trains them."""

    module: nn.Module  # what forward calls: the module, or a wrapper around it
    optimizer: torch.optim.Optimizer
    finish_gradient_synchronization: Callable[[], object] | None = None
    """Called after backward, before the optimizer, as a phase of its own: then every gradient is the mean over the
    ranks. None where there is nothing to wait for."""
    no_sync: Callable[[], AbstractContextManager[Any]] = nullcontext
    """Around every backward of a step but the last: gradients are added up without being sent."""
    clip_gradients: Callable[[float], Tensor] | None = None
    """Scales all gradients to at most this norm and returns the norm before, where a rank has only a part of them."""


Parallelize = Callable[[nn.Module, MakeOptimizer], Replica]
"""Spreads a module over ranks, and makes its optimizer when it is time to."""


def alone(module: nn.Module, make_optimizer: MakeOptimizer) -> Replica:
    """A replica of one process, without ranks."""
    return Replica(module, make_optimizer(module.parameters()))


class TrainingStep:
    """A workload made ready to step: on its device, in its precision, compiled, spread over ranks, with its optimizer.

    Raises:
        UnsupportedError: this machine or this module cannot do what the configuration asks.
    """

    def __init__(self, workload: Workload, config: StepConfig, parallelize: Parallelize = alone) -> None:
        self.config, self._in_graph = config, config.graph != "off"
        self._graphs_before = _graphs_so_far()
        self.on_outputs: Callable[[Any], object] = lambda outputs: (
            None
        )  # called with what forward returns, to look at it
        self.device = resolve_device(config.device)
        check_precision(config.precision, self.device)
        if not any(parameter.requires_grad for parameter in workload.module.parameters()):
            raise UsageError("the workload's module has no parameter that takes a gradient: nothing to train")
        self.module = workload.module.to(self.device)
        self._stored_dtype = stored_dtype(config.precision)
        self._forward, self._loss = workload.forward, workload.loss
        if has_bf16_weights(self.module):
            if self._stored_dtype is None:
                self._widen(workload)
            self._stored_dtype = None  # the batches are what the model's author gives it
        elif self._stored_dtype is not None:
            cast_parameters(self.module, self._stored_dtype)
        if config.compile != "off":
            _compile(self.module, config)
        self._checkpointing = Checkpointing(self.module, config.checkpointing)

        def make_optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
            optimizer = workload.optimizer(parameters)
            asked = config.optimizer == "adamw-fused" or (self._in_graph and "capturable" not in optimizer.defaults)
            return _fused(optimizer) if asked and not optimizer.defaults.get("fused") else optimizer

        self.replica = parallelize(self.module, make_optimizer)
        self.optimizer = self.replica.optimizer
        self.scaler = torch.amp.GradScaler(self.device.type) if PRECISIONS[config.precision].needs_scaler else None
        policy = self._checkpointing.policy
        self.updates_in_backward = self._in_backward() if policy is not None and policy.update_in_backward else None
        self.graph = self._graphed() if self._in_graph else None
        """The step's CUDA graph; None where it has none."""
        self._batches = batches_of(workload)

    def _graphed(self) -> StepGraph:
        if self.updates_in_backward is not None or not self._is_alone:
            whose = "its checkpointing updates in backward" if self._is_alone else "it is spread over ranks"
            raise UnsupportedError(f"{REFUSED}: {whose}; leave --graph off")
        if self.scaler is not None and not self.optimizer.defaults.get("fused"):
            raise UnsupportedError(f"{REFUSED}: fp16's scaler reads a value on the host; add --optimizer adamw-fused")
        return StepGraph(self.module, self.optimizer, self.device)

    @property
    def _is_alone(self) -> bool:
        """True if gradients are of this process alone."""
        return self.replica.module is self.module and self.replica.finish_gradient_synchronization is None

    def _in_backward(self) -> UpdatesInBackward:
        """Raise UnsupportedError where gradients are not what the optimizer updates from when they are there."""
        if self.scaler is not None or not self._is_alone:
            whose = "a gradient scaler looks at all of them" if self.scaler is not None else "ranks average them"
            raise UnsupportedError(
                f"the checkpointing policy {self.config.checkpointing} updates in backward, and {whose} before the "
                f"update; {INSTEAD}"
            )
        return UpdatesInBackward(self.module, self.optimizer)

    def _widen(self, workload: Workload) -> None:
        """Train a float32 copy of weights that come in bf16, on float32 copies of what batches have in bf16."""
        widen(self.module)
        self._forward = lambda module, batch: workload.forward(module, map_tensors(batch, widened))
        self._loss = lambda outputs, batch: workload.loss(outputs, map_tensors(batch, widened))

    @property
    def compiles_by_itself(self) -> bool:
        """True if the workload has compiled code of its own since this step was built, nobody having asked for it."""
        return self.config.compile == "off" and _graphs_so_far() > self._graphs_before

    def next_batch(self) -> Any:
        """The next batch, on the device (the copy is waited for by the stopwatch's first synchronisation)."""
        return self.place(next(self._batches))

    def place(self, batch: Any) -> Any:
        """`batch` with its tensors on the device, floating-point ones in the 16 bits that weights were cast to.

        The host waits for a copy only if it is from pinned memory, which the loader may write to again. What comes from
        other memory was copied by the driver when the call returns.
        """

        def placed(tensor: Tensor) -> Tensor:
            dtype = self._stored_dtype if tensor.is_floating_point() else None
            waits = self.device.type != "cuda" or tensor.is_pinned()
            return tensor.to(self.device, dtype, non_blocking=not waits)

        return map_tensors(batch, placed)

    def __call__(self, batch: Any, *, mode: StepMode = "step", phase: PhaseContext = no_phases) -> Tensor | None:
        """Take one step; return the detached loss (None in mode "forward", which runs without gradients)."""
        with matmul_precision(self.config.precision):
            if mode == "forward":
                if self.graph is not None:
                    raise UnsupportedError(f"{REFUSED}: it is of a forward pass alone; leave --graph off")
                with torch.no_grad(), autocast(self.config.precision, self.device), phase("forward"):
                    self._forward(self.replica.module, batch)
                return None
            in_backward = self.updates_in_backward if mode == "step" else None
            with nullcontext() if in_backward is None else in_backward.on():
                loss = self._differentiate(batch, phase)
            if self.replica.finish_gradient_synchronization is not None:
                with phase("communication"):
                    self.replica.finish_gradient_synchronization()
            if mode == "step" and in_backward is None:
                self.update(phase)
            elif mode == "step":
                with phase("optimizer"):
                    pass  # each was updated in backward
            self.optimizer.zero_grad(set_to_none=True)
            return loss

    def accumulate(self, parts: Sequence[Any], max_norm: float | None = None) -> tuple[Tensor, Tensor | None]:
        """Take a step on a batch that comes in parts of one size, one after another.

        Args:
            parts: batches; only the last one's backward communicates.
            max_norm: all gradients together are scaled to at most this norm (inf: not at all); None: not computed.

        Returns:
            This rank's detached mean loss, and with `max_norm` the norm of the mean gradient over all ranks before it
            was scaled.
        """
        assert max_norm is None or self.scaler is None, "scaled gradients would have to be unscaled first"
        if self.updates_in_backward is not None:
            return self._accumulate_in_backward(self.updates_in_backward, parts, max_norm)
        losses = []
        with matmul_precision(self.config.precision):
            for number, part in enumerate(parts, start=1):
                with self.replica.no_sync() if number < len(parts) else nullcontext():
                    losses.append(self._differentiate(part, no_phases, len(parts)))
            if self.replica.finish_gradient_synchronization is not None:
                self.replica.finish_gradient_synchronization()
            mean = torch.stack(losses).sum()
            norm = self.update(no_phases, max_norm)
            self.optimizer.zero_grad(set_to_none=True)
        return mean, norm

    def _accumulate_in_backward(
        self, updates: UpdatesInBackward, parts: Sequence[Any], max_norm: float | None
    ) -> tuple[Tensor, Tensor | None]:
        if len(parts) > 1 or (max_norm is not None and max_norm < math.inf):
            what = (
                f"a step in {len(parts)} parts adds them up" if len(parts) > 1 else f"clipping to {max_norm} needs all"
            )
            raise UsageError(
                f"the checkpointing policy {self.config.checkpointing} updates in backward, which frees gradients as "
                f"they come, and {what}; {INSTEAD}, or take a step in one part and clip nothing (clip_norm inf)"
            )
        norms: list[Tensor] = []

        def update(parameters: Sequence[nn.Parameter]) -> None:
            norms.append(nn.utils.get_total_norm([each.grad for each in parameters if each.grad is not None]))
            updates.update(parameters)

        with matmul_precision(self.config.precision), updates.on(None if max_norm is None else update):
            loss = self._differentiate(parts[0], no_phases)
        return loss, None if max_norm is None else nn.utils.get_total_norm(norms)

    def gradients(self, batch: Any) -> Tensor:
        """Forward and backward only, leaving unscaled gradients in `.grad`; returns the detached loss.

        In fp16 the scale is lowered until nothing overflows, as the scaler does over the first steps of training. What
        a pass that overflowed made of the module's buffers is undone.
        """
        buffers = {} if self.scaler is None else {name: each.clone() for name, each in self.module.named_buffers()}
        with matmul_precision(self.config.precision):
            loss = self._differentiate(batch, no_phases)
            while self.scaler is not None and self._overflows(self.scaler):
                self.optimizer.zero_grad(set_to_none=True)
                load_buffers(self.module, buffers)
                loss = self._differentiate(batch, no_phases)
        if self.graph is not None:  # the next pass writes into its gradients
            for parameter in self.module.parameters():
                parameter.grad = None if parameter.grad is None else parameter.grad.clone()
        return loss

    def _overflows(self, scaler: torch.amp.GradScaler) -> bool:
        """Unscale the gradients; if one is infinite and a smaller scale is left to try, adopt it and say so."""
        scale = scaler.get_scale()
        scaler.unscale_(self.optimizer)
        gradients = [parameter.grad for parameter in self.module.parameters() if parameter.grad is not None]
        values = [each if each.layout == torch.strided else each.coalesce().values() for each in gradients]
        if scale <= 1 or all(bool(each.isfinite().all()) for each in values):
            scaler.update(scale)  # it forgets that these are unscaled: those of the next pass are not
            return False
        scaler.update(scale / 2)
        return True

    def evaluate(self, parts: Sequence[Any]) -> Tensor:
        """The mean loss over parts of one size, without gradients."""
        with matmul_precision(self.config.precision), torch.no_grad():
            return torch.stack([self._loss_of(part, no_phases) for part in parts]).mean()

    def differentiable_loss(self, batch: Any) -> Tensor:
        """Forward and loss alone: the unscaled loss with its graph, for instruments that look at what forward keeps."""
        with matmul_precision(self.config.precision):
            return self._loss_of(batch, no_phases)

    def _loss_of(self, batch: Any, phase: PhaseContext) -> Tensor:
        with autocast(self.config.precision, self.device):
            with phase("forward"):
                outputs = self._forward(self.replica.module, batch)
                self.on_outputs(outputs)
            with phase("loss"):
                loss = self._loss(outputs, batch)
                del outputs  # so that backward frees what it no longer needs
        return loss

    def _differentiate(self, batch: Any, phase: PhaseContext, parts: int = 1) -> Tensor:
        """Forward, loss and backward of one of so many parts; returns its detached share of the mean loss."""

        def run(batch: Any, phase: PhaseContext) -> Tensor:
            loss = _checked(self._loss_of(batch, phase))
            with phase("backward"):
                share = loss / parts if parts > 1 else loss
                with self._checkpointing.named_errors():
                    (share if self.scaler is None else self.scaler.scale(share)).backward()
            return share.detach()

        if self.graph is None:
            return run(batch, phase)
        return self.graph.differentiate(run, batch, phase, (parts,))

    def update(self, phase: PhaseContext = no_phases, max_norm: float | None = None) -> Tensor | None:
        """Update the weights from the gradients that are there.

        Args:
            max_norm: as in `accumulate`.

        Returns:
            The norm before gradients were scaled, with `max_norm`.
        """

        def run(phase: PhaseContext) -> Tensor | None:
            with phase("optimizer"):
                norm = None
                if max_norm is not None:
                    whole = functools.partial(nn.utils.clip_grad_norm_, list(self.module.parameters()))
                    norm = (self.replica.clip_gradients or whole)(max_norm)
                if self.scaler is None:
                    self.optimizer.step()
                else:
                    self.scaler.step(self.optimizer)
                    self.scaler.update()
                if self.graph is None:  # which writes the same gradients in each step
                    self.optimizer.zero_grad(set_to_none=True)
            return norm

        return run(phase) if self.graph is None else self.graph.update(run, phase, (max_norm,))


def _checked(loss: Any) -> Tensor:
    if not isinstance(loss, Tensor):
        raise UsageError(f"the workload's loss returned a {type(loss).__name__}; expected a tensor of one element")
    if loss.numel() != 1:
        shape = tuple(loss.shape)
        raise UsageError(f"the workload's loss returned a tensor of shape {shape}; expected one element, as its mean")
    if not loss.requires_grad:
        why = "its graph was detached, or all parameters are frozen"
        raise UsageError(f"the workload's loss depends on no parameter that takes a gradient: {why}")
    return loss


@contextmanager
def uncompiled() -> Iterator[None]:
    """Inside, code that a workload compiles by itself runs eagerly.

    torch compiles nothing under a mode that sees every operator, as instruments of memory, FLOPs and rounding do, and
    code that insists on it (`fullgraph=True`) raises there.
    """
    if "torch._dynamo" not in sys.modules:  # which is slow to import, and whoever compiles has done so
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield


def _graphs_so_far() -> int:
    """Number of graphs that torch has compiled in this process."""
    utils = sys.modules.get("torch._dynamo.utils")
    return 0 if utils is None else int(utils.counters["stats"]["unique_graphs"])


def build_step(source: WorkloadSource, config: StepConfig) -> TrainingStep:
    return TrainingStep(source.build(config), config)


def batches_of(workload: Workload) -> Iterator[Any]:
    """Batches of the workload, from the start again where they end."""
    while True:
        empty = True
        for batch in workload.batches:
            empty = False
            yield batch
        if empty:
            raise UsageError("the workload's batches are empty, or an iterator that was used up; give a list or loader")


def recipe(optimizer: torch.optim.Optimizer) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The parameter groups and options from which another optimizer of the same class is made like this one."""
    accepted = inspect.signature(type(optimizer)).parameters
    options = {name: value for name, value in optimizer.defaults.items() if name in accepted}
    return [dict(group) for group in optimizer.param_groups], options


def _fused(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    if "fused" not in inspect.signature(type(optimizer)).parameters:
        raise UnsupportedError(f"{type(optimizer).__name__} has no fused implementation")
    groups, options = recipe(optimizer)
    groups = [{name: value for name, value in group.items() if name not in ("fused", "foreach")} for group in groups]
    return type(optimizer)(groups, **(options | {"fused": True, "foreach": False}))


def _compile(module: nn.Module, config: StepConfig) -> None:
    parts = [module] if config.compile == "model" else find_blocks(module)
    if not parts:
        missing = "needs blocks in an nn.ModuleList, and this module has none; use --compile model"
        raise UnsupportedError(f"compile={config.compile} {missing}")
    options = {"backend": _recomputing} if config.compile == "blocks-recompute" else {}
    for part in parts:
        part.compile(**options)


def _recomputing(graph: Any, inputs: Any) -> Any:
    """Inductor, keeping less for backward: what costs no product is computed again there (`ACTIVATION_BUDGET`)."""
    from torch._dynamo import lookup_backend
    from torch._functorch import config as functorch

    with functorch.patch(activation_memory_budget=ACTIVATION_BUDGET):
        return lookup_backend("inductor")(graph, inputs)
