"""RMSNorm, and RMSNorm of a sum, by our kernels."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from trainstep.errors import UnsupportedError, UsageError
from trainstep.fused.operators import described, operator, require, rows_of
from trainstep.fused.triton import resident_programs, warps_for
from trainstep.fused.triton.norm import launch_backward, launch_forward

WIDEST = 32_768
"""Features that one program holds in its registers."""


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`eager.rms_norm`: x (..., D), weight (D,) → (..., D) in x's dtype; gradients of both.

    Saved for backward: x, the weight and a float32 number of each row.

    Raises TypeError, UsageError (shapes) or UnsupportedError (device, D above 32,768) before anything is launched.
    """
    _check(x, weight)
    return cast(Tensor, _Norm.apply(x, weight, float(eps)))  # type: ignore[no-untyped-call]


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """`eager.add_rms_norm`: x, residual (..., D) → their sum, in the wider of their dtypes, and its norm.

    Saved for backward: the sum, the weight and a float32 number of each row. Raises as `rms_norm` does.
    """
    _check(x, weight, residual)
    return cast(tuple[Tensor, Tensor], _AddNorm.apply(x, residual, weight, float(eps)))  # type: ignore[no-untyped-call]


def _check(x: Tensor, weight: Tensor, residual: Tensor | None = None) -> None:
    given = {"x": x, "weight": weight, **({} if residual is None else {"residual": residual})}
    require("fused RMSNorm", **given)
    if weight.ndim != 1 or x.ndim < 1 or x.shape[-1] != len(weight) or not x.numel():
        raise UsageError(f"fused RMSNorm takes x (..., D) and weight (D,), none empty: got {described(**given)}")
    if residual is not None and residual.shape != x.shape:
        raise UsageError(f"fused RMSNorm takes x and residual of one shape: got {described(**given)}")
    if len(weight) > WIDEST:
        raise UnsupportedError(f"fused RMSNorm takes up to {WIDEST} features: got {described(**given)}")


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        y, rstd = forward_op(x, weight, eps)
        ctx.save_for_backward(x, weight, rstd)
        return cast(Tensor, y)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, rstd = ctx.saved_tensors
        dx, dw = backward_op(x, weight, rstd, grads[0], None)
        return dx, dw, None


class _AddNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        h, y, rstd = add_forward_op(x, residual, weight, eps)
        ctx.dtypes = x.dtype, residual.dtype
        ctx.save_for_backward(h, weight, rstd)
        return h, y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        h, weight, rstd = ctx.saved_tensors
        dh, dw = backward_op(h, weight, rstd, grads[1], grads[0])
        return dh.to(ctx.dtypes[0]), dh.to(ctx.dtypes[1]), dw, None


def _forward(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    with torch.cuda.device_of(x):  # Triton launches on the current device
        rows = rows_of(x)
        y, rstd = torch.empty(x.shape, dtype=x.dtype, device=x.device), _statistic(x)
        launch_forward((rows, rows, weight.contiguous(), rows, y.view(rows.shape), rstd), eps, False)
    return y, rstd


def _add_forward(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    with torch.cuda.device_of(x):
        rows, others = rows_of(x), rows_of(residual)
        dtype = torch.promote_types(x.dtype, residual.dtype)
        h, y = (torch.empty(x.shape, dtype=dtype, device=x.device) for _ in range(2))
        rstd = _statistic(x)
        tensors = rows, others, weight.contiguous(), h.view(rows.shape), y.view(rows.shape), rstd
        launch_forward(tensors, eps, True)
    return h, y, rstd


def _backward(x: Tensor, weight: Tensor, rstd: Tensor, dy: Tensor, dh: Tensor | None) -> tuple[Tensor, Tensor]:
    """dx in x's dtype, the gradient dh of the sum added; dw in the weight's, its parts added up in float32."""
    with torch.cuda.device_of(x):
        rows, dy_rows = rows_of(x), rows_of(dy)
        dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        programs = min(len(rows), resident_programs(x.device, warps_for(rows.shape[1])))
        parts = torch.empty((programs, rows.shape[1]), dtype=torch.float32, device=x.device)
        added = dy_rows if dh is None else rows_of(dh)
        tensors = rows, weight.contiguous(), rstd, dy_rows, added, dx.view(rows.shape), parts
        launch_backward(tensors, dh is not None)
    return dx, parts.sum(0).to(weight.dtype)


def _statistic(x: Tensor) -> Tensor:
    return torch.empty(x.shape[:-1].numel(), dtype=torch.float32, device=x.device)


def _forward_fake(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device), _statistic(x)


def _add_forward_fake(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    h = torch.empty(x.shape, dtype=torch.promote_types(x.dtype, residual.dtype), device=x.device)
    return h, torch.empty_like(h), _statistic(x)


def _backward_fake(x: Tensor, weight: Tensor, rstd: Tensor, dy: Tensor, dh: Tensor | None) -> tuple[Tensor, Tensor]:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device), weight.new_empty(weight.shape)


forward_op = operator("rms_norm_forward", _forward, _forward_fake)
add_forward_op = operator("add_rms_norm_forward", _add_forward, _add_forward_fake)
backward_op = operator("rms_norm_backward", _backward, _backward_fake)
