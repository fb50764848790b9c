"""Rotary positions of queries and keys in one pass, by our kernel; features are paired as the model pairs them."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from trainstep.base.errors import UsageError
from trainstep.fused.operators import described, operator, require
from trainstep.fused.triton.rotary import launch_rope

MOST_SEQUENCES = 65_535
"""Along the second axis of a grid of CUDA's."""


def rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, in_place: bool = False) -> tuple[Tensor, Tensor]:
    """`eager.rope`: q (B, H, S, K), k (B, H', S, K) of one dtype, cos and sin (S, K/2) or longer → both turned.
    B is at most `MOST_SEQUENCES`.

    Any strides whose last is 1; others are copied. The backward turns the gradients back; nothing of q and k is saved.

    Args:
        in_place: write the results over q and k and return them as new tensors. q and k themselves must not be used
            again: what an earlier operator saved of them for its backward is an error there, and using them in later
            ones would leave the turn out of their gradients.

    Raises TypeError, UsageError (shapes, a leaf that takes a gradient in place) or UnsupportedError (device) before
    anything is launched.
    """
    given = {"q": q, "k": k, "cos": cos, "sin": sin}
    require("fused RoPE", **given)
    _check_shapes(**given)
    if in_place:
        _check_in_place(**given)
    return cast(tuple[Tensor, Tensor], _Rope.apply(q, k, cos, sin, in_place))  # type: ignore[no-untyped-call]


def rope_over_views(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """`rope` in place of tensors that may be leaves, as `bench fused` has them."""
    return rope(q.view_as(q), k.view_as(k), cos, sin, in_place=True)


def _check_shapes(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> None:
    what = None
    if not (q.ndim == k.ndim == 4 and q.numel() and k.numel()):
        what = "q (B, H, S, K) and k (B, H', S, K), neither empty"
    elif q.dtype != k.dtype or q.shape[0] != k.shape[0] or q.shape[2:] != k.shape[2:] or q.shape[3] % 2:
        what = "q and k of one dtype, batch, length and even head_dim"
    elif cos.shape != sin.shape or cos.ndim != 2 or cos.shape[1] != q.shape[3] // 2 or len(cos) < q.shape[2]:
        what = "cos and sin (S, K/2) with a row for each position"
    elif cos.requires_grad or sin.requires_grad:
        what = "cos and sin that take no gradient"
    elif q.shape[0] > MOST_SEQUENCES:
        what = f"at most {MOST_SEQUENCES:,} sequences, which is how far CUDA's grids reach"
    if what:
        raise UsageError(f"fused RoPE takes {what}: got {described(q=q, k=k, cos=cos, sin=sin)}")


def _check_in_place(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> None:
    for name, each in {"q": q, "k": k}.items():
        if each.stride(-1) != 1 or 0 in each.stride():
            why = f"strides {each.stride()}, where the last must be 1 and none 0"
            raise UsageError(f"fused RoPE cannot write over {name} with {why}; leave out in_place")
        if each.is_leaf and each.requires_grad and torch.is_grad_enabled():
            raise UsageError(
                f"fused RoPE cannot write over {name}, a leaf that takes a gradient, as PyTorch's own operators cannot"
            )
    if q.untyped_storage().data_ptr() == k.untyped_storage().data_ptr() and q.data_ptr() == k.data_ptr():
        raise UsageError("fused RoPE cannot write over q and k that are the same memory; leave out in_place")


class _Rope(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, in_place: bool) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        if not in_place:
            return cast(tuple[Tensor, Tensor], turn_op(q, k, cos, sin, 1.0))
        q, k = q.detach(), k.detach()  # the same memory; autograd is told of the results alone
        turn_in_place_op(q, k, cos, sin, 1.0)
        torch.autograd.graph.increment_version([q, k])  # so that what was saved of them before is an error
        return q, k

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        if torch.is_grad_enabled():  # create_graph=True: these gradients have gradients of their own
            return *_Rope.apply(*grads, cos, -sin, False), None, None, None  # type: ignore[no-untyped-call]
        return *turn_op(*grads, cos, sin, -1.0), None, None, None


def _turn(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, sign: float) -> tuple[Tensor, Tensor]:
    with torch.cuda.device_of(q):  # Triton launches on the current device
        q, k, cos, sin = map(_with_neighbours, (q, k, cos, sin))
        turned_q, turned_k = torch.empty_like(q), torch.empty_like(k)
        launch_rope((q, k, cos, sin, turned_q, turned_k), sign)
    return turned_q, turned_k


def _turn_in_place(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, sign: float) -> None:
    with torch.cuda.device_of(q):
        launch_rope((q, k, _with_neighbours(cos), _with_neighbours(sin), q, k), sign)


def _with_neighbours(x: Tensor) -> Tensor:
    """x, or a copy where its last dimension is not contiguous or memory is shared by a stride of 0."""
    return x if x.stride(-1) == 1 and 0 not in x.stride() else x.contiguous()


def _turn_fake(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, sign: float) -> tuple[Tensor, Tensor]:
    return torch.empty_like(_with_neighbours(q)), torch.empty_like(_with_neighbours(k))


def _turn_in_place_fake(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, sign: float) -> None:
    return None


turn_op = operator("rope", _turn, _turn_fake)
turn_in_place_op = operator("rope_in_place", _turn_in_place, _turn_in_place_fake, mutates=("q", "k"))
