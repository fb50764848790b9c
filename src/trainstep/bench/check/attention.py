"""Is an attention implementation right? Its output and gradients against float64, at any length, in linear memory.

The oracle is evaluated in float64 for slices of queries, so that only slice × keys scores exist at once. One or two
heads of the batch are checked: heads do not mix.

The plain computation of the error budget is the eager formula in the same dtype at the same length. Its error depends
on the order in which its matrix products sum, which cuBLAS chooses by shape: on an H200 eight heads of 4,096 tokens in
float32 exceed twice the error of one head. So no less is allowed than the float32 roundings of a sum over all keys add
up to. Beyond 32,768 tokens, or where the eager formula does not fit, a shorter length sets the budget.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from trainstep.attention.eager import attention_eager
from trainstep.bench.check import accumulated_rounding, allowed_error, one_rounding
from trainstep.precision import PRECISIONS

NAMES = ("o", "dq", "dk", "dv")
SLICE = 1024
"""Queries whose scores exist at once in the oracle."""
BUDGET_LENGTH = 32768
"""Tokens up to which the eager formula itself is run to set the budget."""

Implementation = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Errors:
    """‖x − reference‖ / ‖reference‖ of output and gradients, and what is allowed."""

    found: dict[str, float]
    allowed: dict[str, float]

    @property
    def within_budget(self) -> bool:
        """Whether every error is allowed; NaN never is."""
        return all(self.found[name] <= self.allowed[name] for name in NAMES)


def random_inputs(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, seed: int) -> tuple[Tensor, ...]:
    """q, k, v (with gradients) and the gradient of o, standard normal."""
    generator = torch.Generator(device).manual_seed(seed)
    tensors = [torch.randn(shape, dtype=torch.float32, device=device, generator=generator) for _ in range(4)]
    q, k, v, do = (tensor.to(dtype) for tensor in tensors)
    return q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), do


def check(
    implementation: Implementation, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, *, is_causal: bool
) -> Errors:
    """Run `implementation` forward and backward on fresh inputs of `shape` (..., seq, head_dim) and compare."""
    found = _errors(implementation, shape, dtype, device, is_causal)
    plain = _plain_errors(min(shape[-2], BUDGET_LENGTH), shape[-1], dtype, device, is_causal)
    summation = accumulated_rounding(PRECISIONS["fp32"].unit_roundoff, shape[-2])  # all implementations sum in float32
    return Errors(found, {name: allowed_error(plain[name], one_rounding(dtype), floor=summation) for name in NAMES})


@functools.cache
def _plain_errors(
    seq: int, head_dim: int, dtype: torch.dtype, device: torch.device, is_causal: bool
) -> dict[str, float]:
    """The errors of the eager formula on one head of `seq` tokens, or of half as many while that does not fit."""

    def eager(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention_eager(q, k, v, is_causal, 1 / math.sqrt(head_dim))

    try:
        return _errors(eager, (1, seq, head_dim), dtype, device, is_causal)
    except torch.OutOfMemoryError:
        pass  # leave the handler first, so that what the failed attempt allocated is free
    return _plain_errors(seq // 2, head_dim, dtype, device, is_causal)


def _errors(
    implementation: Implementation, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, is_causal: bool
) -> dict[str, float]:
    q, k, v, do = random_inputs(shape, dtype, device, seed=1)
    o = implementation(q, k, v)
    results = (o, *torch.autograd.grad(o, (q, k, v), do))
    inputs = [tensor.detach().reshape(-1, *shape[-2:]) for tensor in (q, k, v, do)]
    square, norm = dict.fromkeys(NAMES, 0.0), dict.fromkeys(NAMES, 0.0)
    for head in {0, inputs[0].shape[0] - 1}:
        expected = oracle(*(tensor[head].double() for tensor in inputs), is_causal=is_causal)
        for name, result, reference in zip(NAMES, results, expected, strict=True):
            own = result.detach().reshape(-1, *shape[-2:])[head].double()
            square[name] += float((own - reference).square().sum())
            norm[name] += float(reference.square().sum())
    return {name: math.sqrt(square[name] / norm[name]) for name in NAMES}


def oracle(q: Tensor, k: Tensor, v: Tensor, do: Tensor, *, is_causal: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """o, dq, dk, dv of one head, all (seq, head_dim) float64, by the formulas of the softmax and its derivative."""
    scale = 1 / math.sqrt(q.shape[-1])
    o, dq, dk, dv = (torch.zeros_like(tensor) for tensor in (q, q, k, v))
    keys = torch.arange(k.shape[0], device=k.device)
    for start in range(0, q.shape[0], SLICE):
        rows = slice(start, min(start + SLICE, q.shape[0]))
        seen = slice(0, rows.stop if is_causal else k.shape[0])
        scores = q[rows] @ k[seen].T * scale  # (slice, seen)
        if is_causal:
            hidden = keys[seen] > torch.arange(rows.start, rows.stop, device=k.device)[:, None]
            scores.masked_fill_(hidden, -math.inf)
        p = scores.softmax(-1)
        o[rows] = p @ v[seen]
        dv[seen] += p.T @ do[rows]
        dp = do[rows] @ v[seen].T
        ds = p * (dp - (do[rows] * o[rows]).sum(-1, keepdim=True)) * scale
        dq[rows] = ds @ k[seen]
        dk[seen] += ds.T @ q[rows]
    return o, dq, dk, dv
