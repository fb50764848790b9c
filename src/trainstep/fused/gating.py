"""SwiGLU by our kernels: silu(gate) · up, its inputs kept for backward or computed again there."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from trainstep.errors import UsageError
from trainstep.fused.operators import described, operator, require, rows_of
from trainstep.fused.triton.gating import launch_backward, launch_forward


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """`eager.swiglu`: gate, up (..., F) of one dtype → (..., F); gradients of both.

    Saved for backward: gate and up, and not silu(gate), which the eager formula saves too.

    Raises TypeError, UsageError (shapes, dtypes) or UnsupportedError (device) before anything is launched.
    """
    require("fused SwiGLU", gate=gate, up=up)
    if gate.shape != up.shape or gate.dtype != up.dtype or not gate.numel() or not gate.ndim:
        what = "fused SwiGLU takes gate and up of one shape and dtype, neither empty"
        raise UsageError(f"{what}: got {described(gate=gate, up=up)}")
    return cast(Tensor, _SwiGLU.apply(gate, up))  # type: ignore[no-untyped-call]


def swiglu_of(x: Tensor, gate: nn.Module, up: nn.Module, *, recompute: bool = False) -> Tensor:
    """silu(gate(x)) · up(x) of two linear modules.

    With `recompute` only x is kept, and backward computes both products once more: 4 · tokens · D · F FLOPs for
    2 · tokens · F numbers less.
    """

    def both(inputs: Tensor) -> Tensor:
        return swiglu(gate(inputs), up(inputs))

    if not recompute:
        return both(x)
    return cast(Tensor, checkpoint(both, x, use_reentrant=False, preserve_rng_state=False))


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return cast(Tensor, forward_op(gate, up))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        return cast(tuple[Tensor, Tensor], backward_op(*ctx.saved_tensors, grads[0]))


def _forward(gate: Tensor, up: Tensor) -> Tensor:
    with torch.cuda.device_of(gate):  # Triton launches on the current device
        y = _alike(gate)
        launch_forward((rows_of(gate), rows_of(up), rows_of(y)))
    return y


def _backward(gate: Tensor, up: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
    with torch.cuda.device_of(gate):
        dgate, dup = _alike(gate), _alike(gate)
        launch_backward((rows_of(gate), rows_of(up), rows_of(dy), rows_of(dgate), rows_of(dup)))
    return dgate, dup


def _alike(gate: Tensor) -> Tensor:
    """Contiguous, with the gate's shape."""
    return torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)


def _forward_fake(gate: Tensor, up: Tensor) -> Tensor:
    return _alike(gate)


def _backward_fake(gate: Tensor, up: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
    return _alike(gate), _alike(gate)


forward_op = operator("swiglu_forward", _forward, _forward_fake)
backward_op = operator("swiglu_backward", _backward, _backward_fake)
