"""The joined loss where the logits of all tokens may exist at once: what autograd would do, with one array for both.

The kernel writes softmax - onehot, over the number of targets, over the logits in forward. That is kept, and backward
multiplies it by the weight and by the hidden states: no gradient of the weight is set to zero or added to, as chunks
have to, and none is multiplied where the gradient of the loss is 1.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from trainstep.base.errors import refuse_create_graph
from trainstep.fused.logits import by_states, by_weight, empty_logits, logits_of
from trainstep.fused.operators import operator
from trainstep.fused.scaling import scaled
from trainstep.fused.targets import scales_of
from trainstep.fused.triton.cross_entropy import launch_loss

WORDS = "the fused loss", "eager.linear_cross_entropy"
"""Name of the operator, and of the function that has gradients of gradients."""


class LossInOnePiece(torch.autograd.Function):
    """Hidden states (N, D), weight (V, D), ids (N,), the dtype of products, what is ignored, mean or sum → the loss."""

    @staticmethod
    def forward(
        ctx: Any, states: Tensor, weight: Tensor, ids: Tensor, dtype: torch.dtype, ignore_index: int, is_mean: bool
    ) -> Tensor:
        """Keeps what the kernel leaves, and both factors in the dtype of products."""
        ctx.dtypes = states.dtype, weight.dtype
        states, weight = states.to(dtype), weight.to(dtype)
        loss, scales, d_logits = d_logits_op(states, weight, ids, ignore_index, is_mean)
        ctx.save_for_backward(states, weight, d_logits, scales)
        return loss

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Both products."""
        refuse_create_graph(*WORDS)
        states, weight, d_logits, scales = ctx.saved_tensors
        of_states, of_weight = ctx.needs_input_grad[:2]
        factor = grads[0] * scales[2]
        d_states = by_states(d_logits, weight, states.new_empty(states.shape)) if of_states else None
        d_weight = _of_weight(d_logits, states, ctx.dtypes[1]) if of_weight else None
        found = zip((d_states, d_weight), ctx.dtypes, strict=True)
        given = [None if each is None else scaled(each, factor).to(dtype) for each, dtype in found]
        return *given, None, None, None, None


def _of_weight(d_logits: Tensor, states: Tensor, dtype: torch.dtype) -> Tensor:
    """d_logitsᵀ states, rounded to the dtype of products only where the weight has that dtype and it has the range."""
    is_rounded = states.dtype != torch.float16 and states.dtype == dtype
    return by_weight(d_logits, states, states.dtype if is_rounded else torch.float32)


def _d_logits(
    states: Tensor, weight: Tensor, ids: Tensor, ignore_index: int, is_mean: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The loss, the scales (3,) of each target's part in it, and its gradient by the logits (N, V)."""
    losses = torch.empty(len(ids), dtype=torch.float32, device=states.device)
    ids = ids.contiguous()
    with torch.cuda.device_of(states):  # Triton launches on the current device
        logits = logits_of(states, weight)
        scales = scales_of(ids, len(weight), ignore_index, is_mean, logits.dtype)
        launch_loss((logits, ids, losses, scales), ignore_index, True)
    return losses.sum(), scales, logits


def _d_logits_fake(
    states: Tensor, weight: Tensor, ids: Tensor, ignore_index: int, is_mean: bool
) -> tuple[Tensor, Tensor, Tensor]:
    loss, scales = (states.new_empty(shape, dtype=torch.float32) for shape in ((), (3,)))
    return loss, scales, empty_logits(states, len(weight))


d_logits_op = operator("linear_cross_entropy_d_logits", _d_logits, _d_logits_fake)
