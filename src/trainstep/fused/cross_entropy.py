"""Cross-entropy joined with the head: logits exist for one chunk of tokens at a time, and no product is computed twice.

Forward computes a chunk's logits, their losses and, where gradients are wanted, at once the gradients: the kernel
writes softmax - onehot, of a mean over the number of targets, over the logits, and two products take that to the
gradients of the hidden states and of the weight. Backward multiplies both by the gradient of the loss. So a step
computes three products with the head, as the plain one does and the chunked one, which computes its logits twice, does
not.

Kept from forward to backward: the gradient of the hidden states, and that of the weight in float32, in which the
chunks' parts are added up. Where one chunk has all tokens, `one_piece` keeps what the kernel wrote instead.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from trainstep.base.errors import UnsupportedError, UsageError, refuse_create_graph
from trainstep.fused.logits import add_by_weight, by_states, logits_of, width_of
from trainstep.fused.one_piece import WORDS, LossInOnePiece
from trainstep.fused.operators import described, operator, require
from trainstep.fused.scaling import scaled
from trainstep.fused.targets import require_targets, scales_of
from trainstep.fused.triton.cross_entropy import launch_loss

Reduction = Literal["mean", "sum"]
LOGITS_BYTES = 5 * 2**28
"""Most that the logits of a chunk take: 1.25 GiB, 4,352 tokens with a vocabulary of 151,936 in 16 bits. Each chunk
reads and writes the sum of the weight's gradient, float32, and has smaller products; so small vocabularies go in one.
"""
MULTIPLE = 128
"""Factor of the tokens in a chunk, where there are several: rows of a product's tiles."""


def linear_cross_entropy(
    hidden: Tensor,
    head: nn.Module,
    targets: Tensor,
    *,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    chunk_tokens: int | None = None,
) -> Tensor:
    """`eager.linear_cross_entropy` of hidden (..., D), the head's weight and ids (...), and its gradients.

    The weight is read in the head's own forward, so what gathers it there (FSDP's hooks) does so; torch.compile breaks
    its graph around it. Under autocast hidden states and weight are cast as products' operands are; the gradient of a
    weight in float32 stays in float32. NaN in either makes the loss NaN. Where all targets are `ignore_index`, the mean
    is NaN and every gradient 0, as torch's.

    Ids that are out of range raise a UsageError on a CPU. On a GPU, where asking would make the host wait, they fail a
    device-side assertion as in torch's own loss, and make the loss NaN.

    Args:
        hidden: what the head takes.
        head: an `nn.Linear` without bias, or a module that has such a weight (V, D) and computes as one.
        targets: int64, one for each row of hidden.
        ignore_index: targets that count for nothing.
        reduction: "mean" of the other targets' losses, or their "sum".
        chunk_tokens: tokens whose logits exist at once; None for as few chunks, as equal in size, as `LOGITS_BYTES`
            and a `MULTIPLE` allow.

    Raises:
        TypeError: dtypes.
        UsageError: shapes, another reduction, a chunk of no tokens, ids out of range on a CPU.
        UnsupportedError: a head with a bias or without a weight, another device.
    """
    if getattr(head, "bias", None) is not None or not isinstance(getattr(head, "weight", None), Tensor):
        raise UnsupportedError(
            f"the fused loss takes a head that multiplies by its weight alone, an nn.Linear without bias; got {head}"
        )

    def loss_in_head(states: Tensor) -> Tensor:
        weight = cast(Tensor, head.weight)  # in the module's forward, where it is whole
        return weight_cross_entropy(
            states, weight, targets, ignore_index=ignore_index, reduction=reduction, chunk_tokens=chunk_tokens
        )

    return _in_its_forward(head, loss_in_head, hidden)


@torch.compiler.disable  # type: ignore[untyped-decorator]  # it cannot trace a method that is replaced for one call
def _in_its_forward(head: nn.Module, computed: Callable[[Tensor], Tensor], hidden: Tensor) -> Tensor:
    forward = vars(head).get("forward")
    head.forward = computed  # hooks stand around it
    try:
        return cast(Tensor, head(hidden))
    finally:
        if forward is None:
            del head.forward
        else:
            head.forward = forward


def tokens_at_once(tokens: int, n_vocab: int, item_bytes: int) -> int:
    """Tokens in a chunk, of so many in all, where a logit has `item_bytes`: at least 1, whatever the vocabulary."""
    most = max(1, LOGITS_BYTES // (width_of(n_vocab) * item_bytes))
    if tokens <= most or most < MULTIPLE:
        return min(tokens, most)
    most -= most % MULTIPLE
    equal = -(-tokens // -(-tokens // most))  # rounded up, as most is
    return -(-equal // MULTIPLE) * MULTIPLE


def weight_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    chunk_tokens: int | None = None,
) -> Tensor:
    """`linear_cross_entropy` of a head's weight (V, D) that is whole where this is called."""
    if chunk_tokens is not None and chunk_tokens < 1:
        raise UsageError(f"chunk_tokens is {chunk_tokens}; expected at least 1")
    if reduction not in ("mean", "sum"):
        raise UsageError(f'reduction is {reduction!r}; the fused loss has "mean" and "sum"')
    given = {"hidden": hidden, "weight": weight}
    require("the fused loss", **given)
    if targets.dtype != torch.int64 or targets.device != hidden.device:
        raise TypeError(
            f"the fused loss takes targets as int64 beside hidden: got {described(targets=targets, **given)}"
        )
    states, ids = hidden.reshape(-1, hidden.shape[-1]), targets.reshape(-1)
    fits = weight.ndim == 2 and weight.shape[1] == states.shape[1] and len(ids) == len(states)
    if not fits or not hidden.numel() or not weight.numel():
        what = "the fused loss takes hidden (..., D), weight (V, D) and a target for each row of hidden, none empty"
        raise UsageError(f"{what}: got {described(**given, targets=targets)}")
    kind = hidden.device.type
    if kind == "cpu" and not torch.compiler.is_compiling():
        require_targets(ids, len(weight), ignore_index)
    if torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
    elif hidden.dtype == weight.dtype:
        dtype = hidden.dtype
    else:
        raise TypeError(f"the fused loss takes hidden and weight of one dtype: got {described(**given)}")
    chunk = chunk_tokens or tokens_at_once(len(states), len(weight), dtype.itemsize)
    is_mean = reduction == "mean"
    with torch.autocast(kind, enabled=False):
        if chunk >= len(states) and torch.is_grad_enabled() and (states.requires_grad or weight.requires_grad):
            loss = LossInOnePiece.apply(states, weight, ids, dtype, ignore_index, is_mean)  # type: ignore[no-untyped-call]
        else:
            loss = _Loss.apply(states, weight, ids, dtype, ignore_index, chunk, is_mean)  # type: ignore[no-untyped-call]
    return cast(Tensor, loss)


class _Loss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        states: Tensor,
        weight: Tensor,
        ids: Tensor,
        dtype: torch.dtype,
        ignore_index: int,
        chunk: int,
        is_mean: bool,
    ) -> Tensor:
        wanted = ctx.needs_input_grad[:2]
        loss, scales, d_states, d_weight = loss_op(
            states.to(dtype), weight.to(dtype), ids, ignore_index, chunk, is_mean, *wanted
        )
        ctx.save_for_backward(d_states, d_weight, scales)
        ctx.dtypes = states.dtype, weight.dtype
        return loss

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        refuse_create_graph(*WORDS)
        # In place, as the weight's gradient is large. Asked for it a second time, autograd notices and raises.
        d_states, d_weight, scales = ctx.saved_tensors
        factor = grads[0] * scales[2]
        torch.autograd.graph.increment_version([d_states, d_weight])
        found = zip((d_states, d_weight), ctx.dtypes, strict=True)
        given = [scaled(each, factor).to(dtype) if each.numel() else None for each, dtype in found]
        return *given, None, None, None, None, None


def _loss(
    states: Tensor, weight: Tensor, ids: Tensor, ignore_index: int, chunk: int, is_mean: bool, of_states: bool,
    of_weight: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The loss, the scales (3,) of each target's part in it, and its gradients by states and by the weight.

    The weight's is in float32. Those that are not wanted are empty.
    """
    d_states, d_weight = _gradients_like(states, weight, of_states, of_weight)
    d_weight.zero_()
    losses = torch.empty(len(ids), dtype=torch.float32, device=states.device)
    ids = ids.contiguous()
    with torch.cuda.device_of(states):  # Triton launches on the current device
        scales = scales_of(ids, len(weight), ignore_index, is_mean, states.dtype)
        for start in range(0, len(ids), chunk):
            part = slice(start, start + chunk)
            logits = logits_of(states[part], weight)  # (chunk, V)
            launch_loss((logits, ids[part], losses[part], scales), ignore_index, of_states or of_weight)
            if of_states:
                by_states(logits, weight, d_states[part])
            if of_weight:
                add_by_weight(d_weight, logits, states[part])
    return losses.sum(), scales, d_states, d_weight


def _gradients_like(states: Tensor, weight: Tensor, of_states: bool, of_weight: bool) -> tuple[Tensor, Tensor]:
    d_states = states.new_empty(states.shape if of_states else (0,))
    return d_states, weight.new_empty(weight.shape if of_weight else (0,), dtype=torch.float32)


def _loss_fake(states: Tensor, weight: Tensor, *settings: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    loss, scales = (states.new_empty(shape, dtype=torch.float32) for shape in ((), (3,)))
    return loss, scales, *_gradients_like(states, weight, *settings[-2:])


loss_op = operator("linear_cross_entropy", _loss, _loss_fake)
