"""Attention that is wrong on purpose, and right attention of many forms, for the check of `bench attention`.

`WRONG` and `RIGHT` map a name to a `Planted`; `cases` lists what to check them on. The wrong ones are the eager formula
with one fault, in the dtype of its inputs; `is_causal` is whether the reference is causal.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from tools.trust.planted import table
from trainstep.attention import FlashAttentionReference, attention
from trainstep.attention.eager import attention_eager
from trainstep.attention.scoring import Scoring
from trainstep.check.attention import Implementation, check
from trainstep.check.verdict import Verdict

SHAPE = (2, 4, 128, 16)  # batch, heads, seq, head_dim
PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Planted:
    """An implementation, and one shape to check it on."""

    implementation: Implementation
    is_causal: bool = True
    shape: tuple[int, ...] = SHAPE
    kv_heads: int | None = None

    def check(self, dtype: torch.dtype) -> Verdict:
        """What `bench attention` finds of it on the CPU."""
        cpu = torch.device("cpu")
        return check(self.implementation, self.shape, dtype, cpu, is_causal=self.is_causal, kv_heads=self.kv_heads)


def scale_of(q: Tensor) -> float:
    """The usual factor of the scores."""
    return 1 / math.sqrt(q.shape[-1])


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The right formula, causal."""
    return attention_eager(q, k, v, Scoring(True, scale_of(q)))


def full(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The right formula without a mask."""
    return attention_eager(q, k, v, Scoring(False, scale_of(q)))


class _Gradient(torch.autograd.Function):
    """Identity whose gradient is changed."""

    @staticmethod
    def forward(ctx, x, change):
        ctx.change = change
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return ctx.change(gradient), None


def _with_gradient(of: str, change: Callable[[Tensor], Tensor]) -> Implementation:
    """The right forward; the gradient of q, k or v is changed."""

    def implementation(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        inputs = {"q": q, "k": k, "v": v}
        inputs[of] = _Gradient.apply(inputs[of], change)
        return causal(*inputs.values())

    return implementation


def _with_output(change: Callable[[Tensor], Tensor], right: Implementation = causal) -> Implementation:
    """The right result, changed; the gradients are those of what was changed."""
    return lambda q, k, v: change(right(q, k, v))


def _forward_only(change: Callable[[Tensor], Tensor]) -> Implementation:
    """A changed result with the gradients of the right one."""

    def implementation(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        o = causal(q, k, v)
        return o + (change(o) - o).detach()

    return implementation


def _masked(visible: Callable[[Tensor, Tensor, int], Tensor]) -> Implementation:
    """Query i sees key j where `visible` of i, j and the length says so, in every head."""

    def implementation(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        seq = q.shape[-2]
        i = torch.arange(seq)
        scores = (q @ k.mT * scale_of(q)).masked_fill(~visible(i[:, None], i[None, :], seq), -math.inf)
        return scores.softmax(-1) @ v

    return implementation


def _scaled(factor: float) -> Implementation:
    return lambda q, k, v: attention_eager(q, k, v, Scoring(True, factor * scale_of(q)))


def _set(where: tuple, value: float | Callable[[Tensor], Tensor] = 0.0) -> Callable[[Tensor], Tensor]:
    """A copy with the elements at `where` set to a value, or to what a function makes of them."""

    def change(x: Tensor) -> Tensor:
        mask = torch.zeros(x.shape, dtype=torch.bool)
        mask[where] = True
        return torch.where(mask, value(x) if callable(value) else torch.full_like(x, value), x)

    return change


def _times(factor: float) -> Callable[[Tensor], Tensor]:
    return lambda x: x * factor


ALL = slice(None)
MIDDLE_HEADS = (ALL, slice(1, -1))
HEAD = (1, 2)  # one head of one item of the batch


def _later(seq: int) -> Tensor:
    """Where key j comes after query i."""
    return torch.ones(seq, seq, dtype=torch.bool).triu(1)


def _no_diagonal_in_one_row(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Row 40 of one head lacks its own key."""
    return _set((*HEAD, 40, 40), -math.inf)(_causal_scores(q, k)).softmax(-1) @ v


def _causal_scores(q: Tensor, k: Tensor) -> Tensor:
    return (q @ k.mT * scale_of(q)).masked_fill(_later(q.shape[-2]), -math.inf)


def _no_delta(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The softmax's derivative without its second term: a right forward, ds = p · dp."""
    scores = _causal_scores(q, k)
    finite = scores.masked_fill(scores == -math.inf, 0)
    return scores.softmax(-1).detach() * (1 + finite - finite.detach()) @ v


def _in_tiles(q: Tensor, k: Tensor, v: Tensor, rescale: bool = True, size: int = 48) -> Tensor:
    """Causal, key tile by key tile, with a running maximum; wrong without rescaling what was summed before."""
    seq = q.shape[-2]
    later = _later(seq)
    total, weighted = torch.zeros(q.shape[:-1]), torch.zeros(q.shape)
    highest = torch.full(q.shape[:-1], -1e30)
    for start in range(0, seq, size):
        tile = slice(start, start + size)
        scores = (q.float() @ k[..., tile, :].float().mT * scale_of(q)).masked_fill(later[:, tile], -math.inf)
        new = torch.maximum(highest, scores.amax(-1)).detach()
        p = (scores - new[..., None]).exp()
        shrink = (highest - new).exp() if rescale else torch.ones_like(new)
        total, weighted = total * shrink + p.sum(-1), weighted * shrink[..., None] + p @ v[..., tile, :].float()
        highest = new
    return (weighted / total[..., None]).to(q.dtype)


def _one_item(change: Implementation) -> Implementation:
    """The last item of the batch is wrong."""
    return lambda q, k, v: torch.cat((causal(q[:-1], k[:-1], v[:-1]), change(q[-1:], k[-1:], v[-1:])))


def _head_of(x: Tensor) -> Tensor:
    return x.roll(1, 1)  # each head's neighbour


def _rounded_scores(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Scores rounded to eighths, which their gradients do not see."""
    scores = _causal_scores(q, k)
    finite = scores.detach().masked_fill(scores == -math.inf, 0)
    return (scores + (finite * 8).round() / 8 - finite).softmax(-1) @ v


def _first_of_group(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The second query head of each group gives its key head no gradient."""
    return causal(q, torch.stack((k, k.detach()), 2).flatten(1, 2), v)


WRONG: dict[str, Planted] = table(globals(), "WRONG")
"""All of them are to be caught in both precisions."""


def _reference(is_causal: bool) -> Implementation:
    return lambda q, k, v: FlashAttentionReference.apply(q, k, v, is_causal)


def _named(impl: str, is_causal: bool) -> Implementation:
    return lambda q, k, v: attention(q, k, v, is_causal=is_causal, impl=impl)


def _math(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def _in(dtype: torch.dtype, right: Implementation = causal) -> Implementation:
    """Inputs converted, the result converted back."""
    return lambda q, k, v: right(q.to(dtype), k.to(dtype), v.to(dtype)).to(q.dtype)


def _laid_out(right: Implementation) -> Implementation:
    """Heads and rows exchanged in memory, of the inputs and of the result."""

    def implementation(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v))
        return right(q, k, v).transpose(1, 2).contiguous().transpose(1, 2)

    return implementation


def _columns_first(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Each head's matrix transposed in memory."""
    q, k, v = (x.mT.contiguous().mT for x in (q, k, v))
    return causal(q, k, v).mT.contiguous().mT


def _head_by_head(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.stack([causal(*(x[:, head] for x in (q, k, v))) for head in range(q.shape[1])], 1)


def _heads_in_batch(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return causal(*(x.flatten(0, 1) for x in (q, k, v))).view_as(q)


def _scaled_before(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attention_eager(q * scale_of(q), k, v, Scoring(True, 1.0))


def _base_two(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """No maximum taken off, powers of two, the sum divided by at the end."""
    scores = (q @ k.mT).float() * (scale_of(q) * math.log2(math.e))
    p = scores.exp2().tril()
    return ((p.to(v.dtype) @ v).float() / p.sum(-1, keepdim=True)).to(q.dtype)


def _keys_reversed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return full(q, k.flip(-2), v.flip(-2))


def _queries_in_parts(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.cat([full(part, k, v) for part in q.split(50, -2)], -2)


def _features_in_parts(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Scores summed over quarters of head_dim, the last first."""
    quarters = zip(q.chunk(4, -1), k.chunk(4, -1), strict=True)
    scores = sum(a @ b.mT for a, b in reversed(list(quarters))) * scale_of(q)
    return scores.masked_fill(_later(q.shape[-2]), -math.inf).softmax(-1) @ v


def _bias_mask(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    bias = torch.zeros(q.shape[-2], q.shape[-2], dtype=q.dtype).masked_fill(_later(q.shape[-2]), -math.inf)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias)


def _expanded_groups(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    group = q.shape[1] // k.shape[1]
    return F.scaled_dot_product_attention(
        q, k.repeat_interleave(group, 1), v.repeat_interleave(group, 1), is_causal=True
    )


RIGHT = {
    "eager, causal": Planted(causal),
    "eager, full": Planted(full, is_causal=False),
    "sdpa math": Planted(_math),
    "sdpa, causal": Planted(_named("sdpa", True)),
    "sdpa, full": Planted(_named("sdpa", False), is_causal=False),
    "flash reference, causal": Planted(_reference(True)),
    "flash reference, full": Planted(_reference(False), is_causal=False),
    "tiles of 48 keys": Planted(_in_tiles),
    "tiles of 7 keys": Planted(lambda q, k, v: _in_tiles(q, k, v, size=7)),
    "in float32": Planted(_in(torch.float32)),
    "in float64": Planted(_in(torch.float64)),
    "sdpa in float32": Planted(_in(torch.float32, _named("sdpa", True))),
    "heads and rows exchanged in memory": Planted(_laid_out(causal)),
    "heads and rows exchanged in memory, sdpa": Planted(_laid_out(_named("sdpa", True))),
    "columns first in memory": Planted(_columns_first),
    "head by head": Planted(_head_by_head),
    "heads in the batch": Planted(_heads_in_batch),
    "q scaled before the product": Planted(_scaled_before),
    "powers of two, no maximum": Planted(_base_two),
    "keys in reverse": Planted(_keys_reversed, is_causal=False),
    "queries in parts": Planted(_queries_in_parts, is_causal=False),
    "head_dim in parts": Planted(_features_in_parts),
    "mask added": Planted(_bias_mask),
    "groups expanded": Planted(_expanded_groups, kv_heads=2),
    "groups, eager": Planted(causal, kv_heads=1),
    "groups, flash reference": Planted(_reference(True), kv_heads=2),
    **{
        f"{name}, {seq} tokens of {head_dim}": Planted(implementation, shape=(2, 3, seq, head_dim))
        for name, implementation in {"sdpa": _named("sdpa", True), "flash reference": _reference(True)}.items()
        for seq, head_dim in ((1, 64), (2, 16), (3, 128), (127, 16), (129, 64), (96, 128))
    },
    "no head dimension": Planted(causal, shape=(5, 64, 16)),
    "one head": Planted(_named("sdpa", True), shape=(1, 1, 200, 64)),
    "64 heads": Planted(_named("sdpa", True), shape=(4, 16, 64, 32)),
}


def cases() -> Iterator[tuple[str, Planted, str, bool]]:
    """All that there is to check: its name, what it is, in which precision, and whether it is wrong."""
    for precision in PRECISIONS:
        for kind in (WRONG, RIGHT):
            yield from ((name, planted, precision, kind is WRONG) for name, planted in kind.items())
