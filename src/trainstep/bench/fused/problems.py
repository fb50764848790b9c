"""Problems of the fused operators: what each computes, on which tensors, and by whom: the oracle, plain torch,
Liger-Kernel and ours.

A problem makes fresh inputs for any number of tokens; an implementation is a function of them, differentiated by those
that require it.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from trainstep.base.errors import UnsupportedError
from trainstep.bench.cases import FusedCase, FusedOperator, FusedSizes
from trainstep.bench.turns import is_interpreted, require_interpretable
from trainstep.check.fused import Operator
from trainstep.fused import eager, liger
from trainstep.step.model.transformer import RotaryEmbedding, chunked_cross_entropy

Draw = Callable[..., Tensor]
"""Function of a shape: standard normal numbers that take a gradient."""
THETA = 10_000.0


@dataclass(frozen=True)
class Problem:
    """An operator with its inputs."""

    inputs: Callable[[FusedSizes, int, Draw], tuple[Tensor, ...]]
    """Inputs, by the sizes and a number of tokens."""
    oracle: Operator
    names: tuple[str, ...]
    """Names of the results, then of the gradients."""
    by_token: Mapping[int, int]
    """Input → its dimension that tokens are along, where results of a token depend on that token's inputs alone."""
    mean_of_tokens: bool = False
    """True if the result is a mean over tokens, rather than a result for each."""


def _rope_inputs(sizes: FusedSizes, tokens: int, draw: Draw) -> tuple[Tensor, ...]:
    """q, k as the products leave them, (1, tokens, heads, head_dim) in memory."""
    head_dim = sizes.d_model // sizes.heads
    q, k = (draw(1, tokens, sizes.heads, head_dim).detach().transpose(1, 2).requires_grad_() for _ in range(2))
    rotary = RotaryEmbedding(head_dim, THETA, tokens).to(q.device)
    rotary.init_weights()
    return q, k, rotary.cos, rotary.sin


def _loss_inputs(sizes: FusedSizes, tokens: int, draw: Draw) -> tuple[Tensor, ...]:
    """Weights with the variance of a head's at its start."""
    weight = (draw(sizes.vocab_size, sizes.d_model).detach() * sizes.d_model**-0.5).requires_grad_()
    hidden = draw(tokens, sizes.d_model)
    generator = torch.Generator(hidden.device).manual_seed(3)
    return hidden, weight, torch.randint(sizes.vocab_size, (tokens,), device=hidden.device, generator=generator)


_ROPE = Problem(_rope_inputs, eager.rope, ("q", "k", "dq", "dk"), {0: 2, 1: 2, 2: 0, 3: 0})
PROBLEMS: Mapping[FusedOperator, Problem] = {
    "rope": _ROPE,
    "rope-in-place": _ROPE,
    "linear-cross-entropy": Problem(
        _loss_inputs, eager.linear_cross_entropy, ("loss", "dhidden", "dweight"), {0: 0, 2: 0}, mean_of_tokens=True
    ),
}


def implementation_of(case: FusedCase, device: torch.device) -> Operator:
    """The function that a case runs.

    Raises:
        UnsupportedError: it does not run here: no Liger-Kernel, no GPU, or a CPU and more than the interpreter can do.
    """
    if case.impl in ("liger", "liger-float32") and device.type != "cuda":
        raise UnsupportedError(f"Liger-Kernel's operators run on a GPU, and this is {device}")
    if case.impl == "ours":
        require_small(case, device)
        return _ours(case.operator)
    if case.impl == "chunked":
        return lambda hidden, weight, targets: chunked_cross_entropy(hidden, HeadOf(weight), targets)
    oracle = PROBLEMS[case.operator].oracle
    if case.impl == "compiled":
        return torch.compile(oracle, dynamic=False)
    return oracle if case.impl == "eager" else _ligers(case)


def require_small(case: FusedCase, device: torch.device) -> None:
    """Raise `UnsupportedError` where our kernels do not run, or would take hours."""
    from trainstep.fused.operators import require_device  # here: it loads Triton

    require_device("bench fused's own implementation", device)
    if is_interpreted(device):
        require_interpretable(case.dtype)
        if case.shape != "tiny":
            raise UnsupportedError(
                f"in Triton's interpreter a pass over the shape {case.shape} takes hours; there, choose --shape tiny"
            )


def _ours(operator: FusedOperator) -> Operator:
    fused = importlib.import_module("trainstep.fused")
    functions: dict[str, Callable[..., Any]] = {
        "rope": fused.rope,
        "rope-in-place": lambda q, k, *tables: fused.rope(q.view_as(q), k.view_as(k), *tables, in_place=True),
        "linear-cross-entropy": lambda hidden, weight, ids: fused.linear_cross_entropy(hidden, HeadOf(weight), ids),
    }
    return functions[operator]


def _ligers(case: FusedCase) -> Operator:
    liger.installed()
    functions: dict[str, Callable[..., Any]] = {
        "rope": _LigersRope(),
        "rope-in-place": _LigersRope(),
        "linear-cross-entropy": partial(liger.linear_cross_entropy, float32_sum=case.impl == "liger-float32"),
    }
    return functions[case.operator]


class _LigersRope:
    """Liger's rotary positions, whose tables are made once, outside of what is timed, as a model's are."""

    def __init__(self) -> None:
        self._of: tuple[Tensor, tuple[Tensor, Tensor]] | None = None

    def __call__(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        if self._of is None or self._of[0] is not cos:
            self._of = cos, liger.rope_tables(cos, sin)
        return liger.rope(q, k, *self._of[1])


class HeadOf(nn.Module):
    """A head without a bias whose weight is the tensor given: a leaf of the benchmark's own, and no parameter."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        object.__setattr__(self, "weight", weight)

    def forward(self, hidden: Tensor) -> Tensor:
        """(..., D) → (..., V)."""
        return hidden @ cast(Tensor, self.weight).T
