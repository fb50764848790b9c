"""Entries beyond the border, for deep sessions: copies to the device, collectives, and the parts of an update that are
no optimizer's step. Some need a call's arguments, so frames of ours are around calls."""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.optimizer import Optimizer

from trainstep.observe.hooks import Hooks
from trainstep.observe.steps import COMMUNICATION, COPIES, OPTIMIZER

COLLECTIVES = (
    *("allgather", "_allgather_base", "allgather_into_tensor_coalesced", "allreduce", "allreduce_coalesced"),
    *("alltoall", "alltoall_base", "barrier", "broadcast", "gather", "reduce", "reduce_scatter"),
    *("_reduce_scatter_base", "reduce_scatter_tensor_coalesced", "scatter"),
)
"""Methods of a process group, which the functions of torch.distributed call."""


class Beyond:
    """Installs them beside the entries of hooks."""

    def __init__(self, hooks: Hooks) -> None:
        self._hooks = hooks

    def install(self) -> None:
        """Change torch, until the hooks are removed."""
        border, within = self._hooks.border, self._hooks.within
        border.method(Optimizer, "zero_grad", within(OPTIMIZER))
        for name in ("unscale_", "update"):
            border.method(torch.amp.GradScaler, name, within(OPTIMIZER))
        border.put(torch.amp.GradScaler, "step", self._scaled_step(torch.amp.GradScaler.step))
        if dist.is_available():
            for name in COLLECTIVES:
                border.method(dist.ProcessGroup, name, within(COMMUNICATION))
            border.method(dist.Work, "wait", within(COMMUNICATION))
        if torch.version.cuda is not None or torch.version.hip is not None:
            for name in ("to", "cuda", "copy_"):
                border.put(torch.Tensor, name, self.moving(name, getattr(torch.Tensor, name)))

    def _scaled_step(self, original: Callable[..., Any]) -> Callable[..., Any]:
        hooks, finder = self._hooks, self._hooks.finder

        def step(scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            if not finder.enter(OPTIMIZER):
                return original(scaler, optimizer, *args, **kwargs)
            before = finder.steps_taken
            try:
                result = original(scaler, optimizer, *args, **kwargs)
            finally:
                finder.leave()
            if finder.steps_taken == before and scaler.is_enabled():
                finder.optimizer_ended(id(optimizer), hooks.name_of(optimizer), is_skipped=True)
            return result

        return step

    def moving(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        """The method of tensors that copies them, with copies to the device as a phase and those to the host as
        waits."""
        hooks, finder = self._hooks, self._hooks.finder

        def moving(tensor: Any, *args: Any, **kwargs: Any) -> Any:
            if not hooks.on_gpu or hooks.is_reading or not finder.is_mine():
                return original(tensor, *args, **kwargs)
            source = args[0] if name == "copy_" and args else tensor
            if getattr(source, "is_cuda", False):
                if name == "copy_" and tensor.is_cuda:
                    return original(tensor, *args, **kwargs)
                start = time.perf_counter()
                moved = original(tensor, *args, **kwargs)
                if not moved.is_cuda and not kwargs.get("non_blocking"):
                    finder.waited(hooks.lines.number(name, sys._getframe(1)), (time.perf_counter() - start) * 1e3)
                return moved
            if not finder.enter(COPIES):
                return original(tensor, *args, **kwargs)
            try:
                return original(tensor, *args, **kwargs)
            finally:
                finder.leave()

        return functools.wraps(original)(moving)
