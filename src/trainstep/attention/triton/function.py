"""FlashAttention in Triton as PyTorch sees it: two custom operators, their gradient, and the functions people call.

The operators carry shapes for tracing (`register_fake`) and the gradient (their implementation for autograd), which is
what torch.compile, activation checkpointing and CUDA graphs need. The kernels save q, k, v, o and the log-sum-exp only.
"""

from typing import Any, cast

import torch
from torch import Tensor

from trainstep.attention.inputs import Sizes, as_autocast, check_inputs, describe, resolve_scale
from trainstep.attention.triton.dispatch import launch_backward, launch_forward
from trainstep.attention.triton.schedule import four_dims
from trainstep.errors import UnsupportedError

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
HEAD_DIMS = range(8, 257)


def flash_attention(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool = False, scale: float | None = None) -> Tensor:
    """softmax(scale · QKᵀ + mask) V by our Triton kernels, with no fallback; shapes as `trainstep.attention.attention`.

    float32, float16 or bfloat16 on an NVIDIA GPU of compute capability 8.0 or newer; head_dim from 8 to 256; any
    lengths and strides. Copied first are a last dimension that is not contiguous, leading dimensions beyond (batch,
    heads) that do not merge and, for the kernels that Hopper runs on 16-bit inputs, rows that are not 16-byte aligned
    or that share memory (expanded tensors). float32 is multiplied as `torch.set_float32_matmul_precision` says.
    Forward and backward are deterministic: the same inputs give the same bits.

    Raises TypeError or UsageError, before anything is launched, for inputs outside of this.
    """
    q, k, v = as_autocast(q, k, v)
    factor = resolve_scale(scale, check_supported(q, k, v).head_dim)
    o, _ = forward_op(q, k, v, is_causal, factor)
    return cast(Tensor, o)


class FlashAttentionTriton(torch.autograd.Function):
    """`FlashAttentionTriton.apply(q, k, v, is_causal=False, scale=None)`: `flash_attention` as an autograd.Function.

    Its node's saved tensors are q, k, v, o and the log-sum-exp (float32, shape q.shape[:-1]).
    """

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False, scale: float | None = None
    ) -> Tensor:
        factor = resolve_scale(scale, check_supported(q, k, v).head_dim)
        o, lse = forward_op(q, k, v, is_causal, factor)
        _save(ctx, (q, k, v, is_causal, factor), (o, lse))
        return cast(Tensor, o)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return _backward(ctx, grads[0], None)


def check_supported(q: Tensor, k: Tensor, v: Tensor) -> Sizes:
    """`check_inputs`, and what these kernels need besides: dtype, head_dim and a GPU that can run them."""
    sizes = check_inputs(q, k, v)
    if q.dtype not in DTYPES:
        raise TypeError(f"the Triton kernels take float32, float16 or bfloat16: got {describe(q, k, v)}")
    if sizes.head_dim not in HEAD_DIMS:
        raise UnsupportedError(f"the Triton kernels take a head_dim from 8 to 256: got {describe(q, k, v)}")
    if q.device.type != "cuda" or torch.version.hip is not None:
        raise UnsupportedError(
            f"the Triton kernels run on NVIDIA GPUs: got {describe(q, k, v)}. "
            "Move the tensors to one, or use impl='sdpa' or impl='flash-reference'"
        )
    if torch.cuda.get_device_capability(q.device) < (8, 0):
        raise UnsupportedError(
            f"the Triton kernels need compute capability 8.0 (Ampere) or newer, {q.device} has "
            f"{torch.cuda.get_device_capability(q.device)}; use impl='sdpa' there"
        )
    return sizes


def _forward(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """o in q's shape and dtype, and the log-sum-exp of the scores (float32, q.shape[:-1])."""
    sign, magnitude = _split_scale(scale)
    with torch.cuda.device(q.device):  # Triton launches on the current device
        return launch_forward(q if sign == 1 else q * sign, k, v, is_causal, magnitude)


def _gradients(
    q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, do: Tensor, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv from what the forward saved and the gradient of o."""
    sign, magnitude = _split_scale(scale)
    with torch.cuda.device(q.device):
        dq, dk, dv = launch_backward(q if sign == 1 else q * sign, k, v, o, lse, do, is_causal, magnitude)
    return (dq if sign == 1 else dq * sign), dk, dv


def _forward_fake(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    return torch.empty_like(four_dims(q)).reshape(q.shape), q.new_empty(q.shape[:-1], dtype=torch.float32)


def _gradients_fake(
    q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, do: Tensor, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = (torch.empty_like(four_dims(t)).reshape(t.shape) for t in (q, k, v))
    return dq, dk, dv


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, ctx.is_causal, ctx.scale = inputs
    o, lse = output
    ctx.save_for_backward(q, k, v, o, lse)
    ctx.mark_non_differentiable(lse)


def _backward(ctx: Any, do: Tensor, _dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    dq, dk, dv = backward_op(*ctx.saved_tensors, do, ctx.is_causal, ctx.scale)
    return dq, dk, dv, None, None


def _below_autograd(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    with torch._C._AutoDispatchBelowAutograd():
        return cast(tuple[Tensor, Tensor], forward_op(q, k, v, is_causal, scale))


class _Differentiable(torch.autograd.Function):
    """The forward operator recorded for backward, with both of its results."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        results = _below_autograd(q, k, v, is_causal, scale)
        _save(ctx, (q, k, v, is_causal, scale), results)
        return results

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return _backward(ctx, *grads)


def _autograd(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """What the forward operator does where gradients may be wanted."""
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        return cast(tuple[Tensor, Tensor], _Differentiable.apply(q, k, v, is_causal, scale))  # type: ignore[no-untyped-call]
    return _below_autograd(q, k, v, is_causal, scale)


def _split_scale(scale: float) -> tuple[int, float]:
    """scale = sign · magnitude with a positive magnitude: the kernels scale the row maximum, which needs that."""
    if scale > 0:
        return 1, scale
    return (-1, -scale) if scale < 0 else (0, 1.0)


# Defined piece by piece: `torch.library.custom_op` and `register_autograd` do the same, but the one checks every call
# for aliased outputs and the other wraps every backward, which took longer than both kernels on short sequences.
_tags = (torch.Tag.pt2_compliant_tag,)
_forward_name, _backward_name = "trainstep::flash_attention_forward", "trainstep::flash_attention_backward"
torch.library.define(
    _forward_name, "(Tensor q, Tensor k, Tensor v, bool is_causal, float scale) -> (Tensor, Tensor)", tags=_tags
)
torch.library.define(
    _backward_name,
    "(Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse, Tensor do, bool is_causal, float scale)"
    " -> (Tensor, Tensor, Tensor)",
    tags=_tags,
)
torch.library.impl(_forward_name, "cuda", _forward)
torch.library.impl(_backward_name, "cuda", _gradients)
torch.library.register_fake(_forward_name, _forward_fake)
torch.library.register_fake(_backward_name, _gradients_fake)
torch.library.impl(_forward_name, "Autograd", _autograd)
forward_op = torch.ops.trainstep.flash_attention_forward.default
backward_op = torch.ops.trainstep.flash_attention_backward.default
