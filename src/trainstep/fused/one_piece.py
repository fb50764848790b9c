"""The joined loss where the logits of all tokens may exist at once: what autograd would do, with one array for both.

The kernel writes softmax - onehot over the logits in forward. That is kept, and backward multiplies it by the weight
and by the hidden states: no gradient of the weight is set to zero, added to, or scaled, as chunks have to. The gradient
of the loss, over the number of targets, scales hidden states and their gradient, which are small beside a weight.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from trainstep.errors import refuse_create_graph
from trainstep.fused.operators import operator
from trainstep.fused.triton.cross_entropy import launch_loss

WORDS = "the fused loss", "eager.linear_cross_entropy"
"""Its name, and what has gradients of gradients."""


class LossInOnePiece(torch.autograd.Function):
    """Hidden states (N, D), weight (V, D), ids (N,), the dtype of products, what is ignored, mean or sum → the loss."""

    @staticmethod
    def forward(
        ctx: Any, states: Tensor, weight: Tensor, ids: Tensor, dtype: torch.dtype, ignore_index: int, is_mean: bool
    ) -> Tensor:
        """Keeps what the kernel leaves, and both factors in the dtype of products."""
        ctx.dtypes = states.dtype, weight.dtype
        states, weight = states.to(dtype), weight.to(dtype)
        total, errors = errors_op(states, weight, ids, ignore_index)
        count = (ids != ignore_index).sum() if is_mean else torch.ones_like(total)
        ctx.save_for_backward(states, weight, errors, count)
        return total / count

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Both products."""
        refuse_create_graph(*WORDS)
        states, weight, errors, count = ctx.saved_tensors
        factor = grads[0] / count.clamp(min=1)  # without targets the gradients are 0, not NaN
        d_states = d_weight = None
        if ctx.needs_input_grad[0]:
            d_states = (errors @ weight).mul_(factor).to(ctx.dtypes[0])
        if ctx.needs_input_grad[1]:
            d_weight = _of_weight(errors, states, factor, ctx.dtypes[1])
        return d_states, d_weight, None, None, None, None


def _of_weight(errors: Tensor, states: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    if states.dtype == torch.float16:  # neither a sum over all tokens nor states over their number stay in its range
        return _in_float32(errors.T, states).mul_(factor).to(dtype)
    states = states * factor
    return errors.T @ states if dtype == states.dtype else _in_float32(errors.T, states).to(dtype)


def _in_float32(a: Tensor, b: Tensor) -> Tensor:
    """a b in float32, which matrix units sum in."""
    if a.device.type == "cuda" and a.dtype != torch.float32:
        return torch.mm(a, b, out_dtype=torch.float32)
    return a.float() @ b.float()


def _errors(states: Tensor, weight: Tensor, ids: Tensor, ignore_index: int) -> tuple[Tensor, Tensor]:
    """The sum of the losses, and softmax - onehot (N, V)."""
    losses = torch.empty(len(ids), dtype=torch.float32, device=states.device)
    with torch.cuda.device_of(states):  # Triton launches on the current device
        logits = states @ weight.T
        launch_loss((logits, ids.contiguous(), losses), ignore_index, True)
    return losses.sum(), logits


def _errors_fake(states: Tensor, weight: Tensor, ids: Tensor, ignore_index: int) -> tuple[Tensor, Tensor]:
    return states.new_empty((), dtype=torch.float32), states.new_empty((len(states), len(weight)))


errors_op = operator("linear_cross_entropy_errors", _errors, _errors_fake)
