"""Liger-Kernel's operators, as its own modules call them: `bench fused` holds ours against them.

Not a dependency: `pip install liger-kernel`. Functions are taken from `liger_kernel.ops`, which chooses the
implementation for the device by itself (its docstring). Settings, read from version 0.8.5:

- RoPE: cos and sin of the full head_dim, each half the same, as transformers' Llama makes them; written in place.
- The head joined with its loss: `accum_dtype=torch.float32` for the sum of the weight's gradient, which the function's
  docstring recommends where the default, the weight's own dtype, is too coarse; `float32_sum=False` is that default.

Not used: its modules and patches of transformers' models, which add nothing to the operators' time.
"""

from __future__ import annotations

import importlib.metadata
from functools import cache, lru_cache, partial
from typing import Any, cast

import torch
from torch import Tensor

from trainstep.base.errors import UnsupportedError


@cache
def installed() -> tuple[str, Any]:
    """`liger-kernel 0.8.5`, and its module of operators. UnsupportedError: it cannot be imported."""
    try:
        import liger_kernel.ops as ops  # type: ignore[import-not-found,unused-ignore]
    except ImportError as error:
        raise UnsupportedError(f"this needs Liger-Kernel (pip install liger-kernel): {error}") from error
    return f"liger-kernel {importlib.metadata.version('liger-kernel')}", ops


def rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate as `fused.eager.rope` does, over q and k."""
    return cast(tuple[Tensor, Tensor], installed()[1].LigerRopeFunction.apply(q, k, *rope_tables(cos, sin)))


@lru_cache(maxsize=1)
def rope_tables(cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin (S, K/2) as the operator takes them, (1, S, K): made once, outside of the timed passes."""
    whole = [torch.cat((each, each), -1)[None].contiguous() for each in (cos, sin)]
    return whole[0], whole[1]


def linear_cross_entropy(hidden: Tensor, weight: Tensor, targets: Tensor, *, float32_sum: bool = True) -> Tensor:
    """Compute `fused.eager.linear_cross_entropy`, of hidden (N, D) and targets (N,)."""
    function = installed()[1].LigerFusedLinearCrossEntropyFunction
    # input, weight, target, bias, ce_weight, ignore_index, lse_square_scale, label_smoothing, reduction, softcap,
    # return_z_loss, accum_dtype
    given = (None, None, -100, 0.0, 0.0, "mean", None, False, torch.float32 if float32_sum else None)
    return cast(Tensor, function.apply(hidden, weight, targets, *given)[0])


linear_cross_entropy_of_16_bits = partial(linear_cross_entropy, float32_sum=False)
