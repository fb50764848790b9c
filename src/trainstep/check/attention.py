"""Is an attention implementation right? Its output and gradients against float64, in every head and row, at any length.

Four statistics of each of o, dq, dk and dv: the error in all, of the worst head, of the worst row, and the scale, which
is the error's component along the reference. Rounding has no direction, so the scale averages it away: in bfloat16
an o too large by 1 % is within the allowance of the norm (0.015), and far beyond that of the scale (0.002).

*What an error is relative to.* A row is a sum of terms, and each is rounded, so the size of a row is the root of the
sum of its terms' squares: of o `Σ_j p_ij² |v_j|²`, of dv `Σ_i p_ij² |do_i|²`; of dq and dk likewise, where the term
ds_ij = p_ij (dp_ij - δ_i) is a difference of two dot products over head_dim, of sizes |do_i| |v_j| and |do_i| · size of
o_i, both over √head_dim. For independent inputs the squared size is the row's expected squared norm, except where terms
cancel (dq of the first causal row is 0, and what an implementation leaves there is a rounding of its terms). A row's
error is divided by its norm or its size, the larger; what is summed over rows by their norm, but by no less than half
of their size, which matters below about ten tokens. The scale is that of the rows divided by their sizes, so that each
counts alike: under a causal mask a tenth of them would otherwise hold most of the norm.

*What is allowed.* Twice what the plain eager formula has in the same dtype at the same length, plus one rounding
(`allowed_error`). The plain run has as many heads as the implementation and 4,096 rows at least, so that its worst row
and head are the extremes of no fewer draws. A row's error is the norm of head_dim nearly Gaussian numbers: the largest
of n is within 1 + √(2 ln n / head_dim) of the typical one (Gaussian concentration of the norm), and the largest of 2n
within 2 % of that of n for n ≥ 4,096. So the factor of two is left for another order of roundings.

- The scale has half a unit roundoff u in place of one rounding (2u): rounding the result moves an element by at most
  u, in no direction, so the mean over even a single row of 16 by less than u/2. No less than one rounding of float32:
  the factors 1/√head_dim and log2(e) are rounded once, and do not average away.
- float32: the plain error depends on the order in which products sum, which cuBLAS chooses by shape: on an H200 eight
  heads of 4,096 tokens exceed twice the error of one head. So no less is allowed than the float32 roundings of the
  longest sum add up to, over the keys or head_dim. In the worst head and row, than all those that a term of dq goes
  through (of its score, its dp and the sum over keys: seq + 2 head_dim), times the factor above; a head counts as one
  row there, as its error may lie in few rows.
- Beyond 32,768 tokens, or where the eager formula does not fit, a shorter length sets the budget.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from trainstep.attention.eager import attention_eager
from trainstep.attention.scoring import Scoring
from trainstep.base.precision import PRECISIONS
from trainstep.base.tolerance import accumulated_rounding, allowed_error, one_rounding
from trainstep.check.verdict import Part, Verdict

NAMES = ("o", "dq", "dk", "dv")
STATISTICS = {"all": "in all", "head": "in the worst head", "row": "in the worst row", "scale": "in scale"}
MOVED = "not the same bits twice under torch.use_deterministic_algorithms"
SCORES = 2**25
"""Scores that exist at once in the oracle, in float64: 256 MiB for each of the few matrices of that size."""
BUDGET_LENGTH = 32768
"""Tokens up to which the eager formula itself is run to set the budget."""
BUDGET_ROWS = 4096
"""Rows that the eager formula is run on at least."""

Implementation = Callable[[Tensor, Tensor, Tensor], Tensor]
Four = tuple[Tensor, Tensor, Tensor, Tensor]
Found = dict[tuple[str, str], float]
"""(one of NAMES, one of STATISTICS) → error."""


def random_inputs(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, seed: int, kv_heads: int | None = None
) -> Four:
    """q, k, v (with gradients) and the gradient of o, standard normal; with `kv_heads`, so many in k and v."""
    generator = torch.Generator(device).manual_seed(seed)
    of_keys = shape if kv_heads is None else (*shape[:-3], kv_heads, *shape[-2:])
    shapes = (shape, of_keys, of_keys, shape)
    tensors = [torch.randn(each, dtype=torch.float32, device=device, generator=generator) for each in shapes]
    q, k, v, do = (tensor.to(dtype) for tensor in tensors)
    return q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), do


def check(
    implementation: Implementation,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    *,
    is_causal: bool,
    kv_heads: int | None = None,
    window: int | None = None,
    is_deterministic: bool = False,
) -> Verdict:
    """Run `implementation` forward and backward on fresh inputs of `shape` (..., heads, seq, head_dim) and compare.

    Args:
        implementation: of q, k, v; called once, or twice.
        shape: of q, and of k and v unless they have fewer heads.
        dtype, device: of the inputs.
        is_causal: whether query i sees only the keys up to i.
        kv_heads: heads of k and v where they are fewer than those of q (grouped-query attention).
        window: with is_causal, how many keys a query sees, its own the last, fewer than seq; None for all.
        is_deterministic: run it under `torch.use_deterministic_algorithms`, twice: the bits must be the same.
    """
    seq, head_dim = shape[-2:]
    group = shape[-3] // kv_heads if kv_heads else 1
    heads = math.prod(shape[:-2]) // group
    q, k, v, do = random_inputs(shape, dtype, device, seed=1, kv_heads=kv_heads)
    moved: tuple[str, ...] = ()
    with deterministic(is_deterministic):
        o, dq, dk, dv = results = _differentiate(implementation, q, k, v, do)
        if is_deterministic:
            again = _differentiate(implementation, q, k, v, do)
            moved = tuple(name for at, name in enumerate(NAMES) if not _has_same_bits(results[at], again[at]))
    q, dq, o, do = (_in_groups(tensor, group) for tensor in (q, dq, o, do))
    k, dk, v, dv = (_in_groups(tensor, 1) for tensor in (k, dk, v, dv))
    found = _errors((q, k, v, do), lambda chunk: (o[chunk], dq[chunk], dk[chunk], dv[chunk]), is_causal, window)

    rows = max(heads, -(-BUDGET_ROWS // seq)), group, seq, head_dim
    plain = _plain_errors(rows, dtype, device, is_causal, window)
    single = PRECISIONS["fp32"].unit_roundoff  # all implementations sum in float32
    terms = seq if window is None else window  # of the longest sum over keys or queries
    summation = accumulated_rounding(single, max(terms, head_dim))
    chain = accumulated_rounding(single, terms + 2 * head_dim)
    floors = {
        "all": summation,
        "head": chain * _extreme(heads * group, head_dim),
        "row": chain * _extreme(heads * group * seq, head_dim),
        "scale": summation,
    }
    whole = one_rounding(dtype)
    roundings = dict.fromkeys(STATISTICS, whole) | {"scale": max(whole / 4, one_rounding("fp32"))}
    parts = {}
    for (name, statistic), error in found.items():
        allowed = allowed_error(plain[name, statistic], roundings[statistic], floor=floors[statistic])
        parts[f"{name} {statistic}"] = Part(error, allowed, f"{name} {STATISTICS[statistic]}")
    faults = (f"{', '.join(moved)} {MOVED}",) if moved else ()
    return Verdict(parts=parts, faults=faults)


@contextmanager
def deterministic(is_asked: bool) -> Iterator[None]:
    """Inside, PyTorch is asked for the same bits every time, or for whatever is fastest.

    What `torch.empty` returns is not filled, as it would be for users: that makes up for kernels that read it.
    """
    memory: Any = torch.utils.deterministic
    before, fills = torch.are_deterministic_algorithms_enabled(), memory.fill_uninitialized_memory
    only_warns = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(is_asked)
    memory.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=only_warns)
        memory.fill_uninitialized_memory = fills


def _has_same_bits(x: Tensor, y: Tensor) -> bool:
    return torch.equal(x.contiguous().view(torch.uint8), y.contiguous().view(torch.uint8))  # NaN too


def _extreme(count: int, dimensions: int) -> float:
    """The largest of `count` norms of Gaussian vectors, relative to the typical norm."""
    return 1 + math.sqrt(2 * math.log(count) / dimensions)


@functools.cache
def _plain_errors(
    shape: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device, is_causal: bool, window: int | None
) -> Found:
    """The errors of the eager formula on inputs of `shape` (heads of keys, group, seq, head_dim), chunk by chunk, at
    half the length while that does not fit."""
    heads, group, seq, head_dim = shape

    def eager(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention_eager(q, k, v, Scoring(is_causal, 1 / math.sqrt(head_dim), window))

    def of_chunk(chunk: slice) -> Four:
        q, k, v, do = (tensor[chunk].detach().requires_grad_() for tensor in inputs)
        return _differentiate(eager, q, k, v, do)

    if seq <= BUDGET_LENGTH:
        try:
            inputs = random_inputs(shape, dtype, device, seed=1, kv_heads=1)
            return _errors(inputs, of_chunk, is_causal, window)
        except torch.OutOfMemoryError:
            pass  # leave the handler first, so that what the failed attempt allocated is free
    shorter = heads, group, min(seq // 2, BUDGET_LENGTH), head_dim
    return _plain_errors(shorter, dtype, device, is_causal, window)


def _differentiate(implementation: Implementation, q: Tensor, k: Tensor, v: Tensor, do: Tensor) -> Four:
    """o and the gradients of q, k, v for the gradient `do` of o."""
    o = implementation(q, k, v)
    dq, dk, dv = torch.autograd.grad(o, (q, k, v), do)
    return o.detach(), dq, dk, dv


def _in_groups(tensor: Tensor, group: int) -> Tensor:
    """View as (key heads of all sequences, query heads for each, seq, head_dim)."""
    return tensor.detach().reshape(-1, group, *tensor.shape[-2:])


def _errors(inputs: Four, results_of: Callable[[slice], Four], is_causal: bool, window: int | None) -> Found:
    """All statistics of all results; `results_of` a chunk of the heads answers for (heads, group, seq, head_dim)."""
    heads, group, seq, _ = inputs[0].shape
    sums: dict[str, list[Tensor]] = {name: [] for name in NAMES}  # (5, query or key heads) of each chunk
    step = max(1, SCORES // (group * seq * seq))
    for start in range(0, heads, step):
        chunk = slice(start, min(start + step, heads))
        own = results_of(chunk)
        exact = (tensor[chunk].detach().double() for tensor in inputs)
        expected, sizes = oracle(*exact, is_causal=is_causal, window=window)
        for name, result, reference, size in zip(NAMES, own, expected, sizes, strict=True):
            sums[name].append(_sums(result.double(), reference, size))
    return {(name, each): value for name in NAMES for each, value in _statistics(torch.cat(sums[name], 1))}


def _sums(own: Tensor, reference: Tensor, size: Tensor) -> Tensor:
    """Sums of each head: squared norm of the error, of the denominator; worst row; the scale's numerator,
    denominator."""
    off, norm = own - reference, reference.square().sum(-1)  # size: the squares of the rows' sizes
    error, along = off.square().sum(-1), (off * reference).sum(-1)
    sums = (
        error.sum(-1),
        torch.maximum(norm.sum(-1), size.sum(-1) / 4),
        (error / torch.maximum(norm, size)).amax(-1),
        (along / size).sum(-1),
        torch.maximum((norm / size).sum(-1), torch.full_like(norm[..., 0], size.shape[-1] / 4)),
    )
    return torch.stack([each.flatten() for each in sums])


def _statistics(sums: Tensor) -> Iterator[tuple[str, float]]:
    """The statistics of one result from the sums (5, heads)."""
    error, norm, worst_row, along, scale_norm = sums
    yield "all", float((error.sum() / norm.sum()).sqrt())
    yield "head", float((error / norm).amax().sqrt())
    yield "row", float(worst_row.amax().sqrt())
    yield "scale", float((along / scale_norm).abs().amax())


def oracle(
    q: Tensor, k: Tensor, v: Tensor, do: Tensor, *, is_causal: bool, window: int | None = None
) -> tuple[Four, Four]:
    """o, dq, dk, dv, and of each the squares of its rows' sizes, by the formulas of the softmax and its derivative.

    q and do are (heads, group, n, head_dim), k and v (heads, 1, m, head_dim): the query heads of a group share keys.
    """
    head_dim = q.shape[-1]
    scale = 1 / math.sqrt(head_dim)
    o, dq, dk, dv = (torch.zeros_like(tensor) for tensor in (q, q, k, v))
    sizes = tuple(torch.zeros_like(tensor[..., 0]) for tensor in (o, dq, dk, dv))
    o_size, dq_size, dk_size, dv_size = sizes
    q2, k2, v2, do2 = (tensor.square().sum(-1) for tensor in (q, k, v, do))
    keys = torch.arange(k.shape[-2], device=k.device)
    n = q.shape[-2]
    step = max(1, SCORES // (q.shape[0] * q.shape[1] * k.shape[-2]))
    for start in range(0, n, step):
        rows = slice(start, min(start + step, n))
        seen = slice(0, rows.stop if is_causal else k.shape[-2])
        q_i, do_i, k_j, v_j = q[..., rows, :], do[..., rows, :], k[..., seen, :], v[..., seen, :]
        p = q_i @ k_j.mT * scale  # (heads, group, rows, seen)
        if is_causal:
            own = torch.arange(rows.start, rows.stop, device=k.device)[:, None]
            p.masked_fill_(keys[seen] > own, -math.inf)
            if window is not None:
                p.masked_fill_(keys[seen] <= own - window, -math.inf)
        p = p.softmax(-1)
        o[..., rows, :] = o_i = p @ v_j
        dv[..., seen, :] += (p.mT @ do_i).sum(1, keepdim=True)
        ds = (do_i @ v_j.mT).sub_((do_i * o_i).sum(-1, keepdim=True)).mul_(p).mul_(scale)
        dq[..., rows, :] = ds @ k_j
        dk[..., seen, :] += (ds.mT @ q_i).sum(1, keepdim=True)
        p2 = p.square_()
        of_v, of_kv, of_k = (p2 @ torch.stack((v2, k2 * v2, k2), -1)[..., seen, :]).unbind(-1)
        o_size[..., rows] = of_v
        dq_size[..., rows] = scale**2 / head_dim * do2[..., rows] * (of_kv + of_v * of_k)
        of_do, of_doq, of_all = do2[..., rows], do2[..., rows] * q2[..., rows], do2[..., rows] * q2[..., rows] * of_v
        columns = (p2.mT @ torch.stack((of_do, of_doq, of_all), -1)).sum(1, keepdim=True)
        dv_size[..., seen] += columns[..., 0]
        dk_size[..., seen] += scale**2 / head_dim * (columns[..., 1] * v2[..., seen] + columns[..., 2])
    return (o, dq, dk, dv), sizes  # type: ignore[return-value]
