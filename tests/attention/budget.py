"""The error budget every implementation is held to, and inputs to spend it on.

Error is ‖x − ref‖ / ‖ref‖ against the float64 oracle; allowed is twice the error that plain PyTorch (the oracle run in
the same dtype) makes on the same inputs, plus one rounding of that dtype.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trainstep.attention.eager import attention_eager, attention_scores
from trainstep.attention.scoring import Scoring

Function = Callable[[Tensor, Tensor, Tensor], Tensor]


def log_sum_exp(q: Tensor, k: Tensor, scoring: Scoring) -> Tensor:
    """log Σ_j exp(scores_ij), shape (..., heads, n_queries): what flash attention saves for its backward."""
    return attention_scores(q, k, scoring).logsumexp(dim=-1)


@dataclass(frozen=True)
class Case:
    """Shapes of one call: q (batch, heads, n_queries, head_dim), k and v (batch, kv_heads, n_keys, head_dim)."""

    n_queries: int
    n_keys: int
    head_dim: int
    heads: int = 2
    kv_heads: int = 2
    batch: int = 1
    magnitude: float = 1.0  # of q: scores grow with it

    def inputs(self, dtype: torch.dtype, device: str = "cpu", seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Fresh q, k, v and the gradient of o."""
        random = torch.Generator().manual_seed(seed)

        def normal(heads: int, length: int) -> Tensor:
            return torch.randn(self.batch, heads, length, self.head_dim, generator=random, dtype=torch.float64)

        q = normal(self.heads, self.n_queries) * self.magnitude
        k, v = normal(self.kv_heads, self.n_keys), normal(self.kv_heads, self.n_keys)
        do = normal(self.heads, self.n_queries)
        q, k, v, do = (t.to(device, dtype) for t in (q, k, v, do))
        return q, k, v, do


def relative_error(x: Tensor, reference: Tensor) -> float:
    return float((x.detach().double() - reference.detach()).norm() / reference.detach().norm())


def value_and_gradients(function: Function, q: Tensor, k: Tensor, v: Tensor, do: Tensor) -> dict[str, Tensor]:
    """o, dq, dk and dv of `function` for leaves that share the inputs' values."""
    leaves = [t.detach().requires_grad_() for t in (q, k, v)]
    o = function(*leaves)
    return {"o": o.detach()} | dict(zip(("dq", "dk", "dv"), torch.autograd.grad(o, leaves, do), strict=True))


def references(
    q: Tensor, k: Tensor, v: Tensor, do: Tensor, is_causal: bool, scale: float, *band: Any
) -> tuple[dict[str, Tensor], dict[str, float]]:
    """What is exact, from the float64 oracle, and the error allowed to each of o, lse, dq, dk and dv.

    band: the further fields of a Scoring.
    """
    scoring = Scoring(is_causal, scale, *band)
    exact = value_and_gradients(lambda *t: attention_eager(*t, scoring), *(t.double() for t in (q, k, v, do))) | {
        "lse": log_sum_exp(q.double(), k.double(), scoring)
    }
    plain = value_and_gradients(lambda *t: attention_eager(*t, scoring), q, k, v, do) | {
        "lse": log_sum_exp(q, k, scoring)
    }
    rounding = torch.finfo(q.dtype).eps
    return exact, {name: 2 * relative_error(plain[name], exact[name]) + rounding for name in exact}


def assert_one_nan_and_infinity_go_where_they_do_in_plain_attention(
    function: Function, allowed: float, device: str = "cpu"
) -> None:
    """Key 5 holds -inf where all queries are positive, so it gets no weight; query 3 holds the NaN of all ones.

    allowed: of other rows' largest difference, relative to the largest value. `function` is full attention, scale 0.2.
    """
    q, k, v, _ = Case(40, 40, 40, heads=1, kv_heads=1).inputs(torch.float32, device)
    q[..., 0] = q[..., 0].abs()
    k[0, 0, 5, 0] = -float("inf")
    q[0, 0, 3, 7] = torch.tensor(0x7FFFFFFF, dtype=torch.int32).view(torch.float32)
    o, expected = function(q, k, v), attention_eager(q, k, v, Scoring(False, 0.2))
    assert expected.isnan().any(-1).nonzero().tolist() == [[0, 0, 3]]
    assert torch.equal(o.isnan(), expected.isnan())
    finite = expected.isfinite()
    assert (o - expected)[finite].abs().max() <= allowed * expected[finite].abs().max()


def assert_within_budget(
    actual: dict[str, Tensor], q: Tensor, k: Tensor, v: Tensor, do: Tensor, is_causal: bool, scale: float, *band: Any
) -> None:
    """Every tensor in `actual` (any of o, lse, dq, dk, dv) is finite and within the budget."""
    exact, allowed = references(q, k, v, do, is_causal, scale, *band)
    for name, x in actual.items():
        assert x.shape == exact[name].shape, f"{name} has shape {tuple(x.shape)}, expected {tuple(exact[name].shape)}"
        assert x.isfinite().all(), f"{name} is not finite"
        if (
            exact[name].norm() < 1e-12 * do.double().norm()
        ):  # one visible key: softmax is constant and the gradient exactly 0
            size = abs(scale) * float(
                do.double().norm() * v.double().norm() * max(k.double().norm(), q.double().norm())
            )
            assert float(x.double().norm()) <= torch.finfo(x.dtype).eps * size, f"{name} should be 0, is {x.norm()}"
            continue
        error = relative_error(x, exact[name])
        assert error <= allowed[name], f"{name} is off by {error:.2e}, allowed {allowed[name]:.2e}"
