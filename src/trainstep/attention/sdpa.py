"""PyTorch's own attention: the backends of scaled_dot_product_attention, and the oracle compiled.

Each function takes checked inputs and runs the one kernel it is named after, or raises UsageError: a backend that
cannot run these inputs on this device is never replaced by another. The backends have nothing to set: cuDNN's
heuristics and FlashAttention-2's own choices are what their authors ship.
"""

from collections.abc import Callable
from functools import cache, partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from trainstep.attention.eager import attention_eager
from trainstep.attention.inputs import describe, four_dims
from trainstep.attention.scoring import Scoring
from trainstep.attention.varlen import attention_varlen
from trainstep.base.errors import UnsupportedError

BACKENDS = {
    "sdpa-flash": SDPBackend.FLASH_ATTENTION,
    "sdpa-cudnn": SDPBackend.CUDNN_ATTENTION,
    "sdpa-efficient": SDPBackend.EFFICIENT_ATTENTION,
    "sdpa-math": SDPBackend.MATH,
}

# One compiled version per shape: a benchmark walks through more shapes than torch.compile's default of 8, beyond which
# it would run the uncompiled function under the compiled one's name (fullgraph turns even that into an error).
_SHAPES = 4096


def attention_sdpa(q: Tensor, k: Tensor, v: Tensor, scoring: Scoring) -> Tensor:
    """scaled_dot_product_attention with the backend PyTorch picks, of a plain scoring alone."""
    assert scoring.is_plain
    q4, k4, v4, grouped = four_dims(q, k, v)
    out = F.scaled_dot_product_attention(
        q4, k4, v4, is_causal=scoring.is_causal, scale=scoring.scale, enable_gqa=grouped
    )
    return out.reshape(q.shape)


def attention_sdpa_backend(q: Tensor, k: Tensor, v: Tensor, scoring: Scoring, *, impl: str) -> Tensor:
    """scaled_dot_product_attention with the one backend that `impl` (a key of BACKENDS) names."""
    try:
        with sdpa_kernel(BACKENDS[impl]):
            return attention_sdpa(q, k, v, scoring)
    except RuntimeError as error:
        # Raised by PyTorch's own choice of backend, before anything is launched.
        if "No available kernel" in str(error) or "No viable backend" in str(error):
            why = "PyTorch's warnings say why" if q.is_cuda else "PyTorch has no such kernel for them"
            raise UnsupportedError(
                f"impl={impl!r} cannot run these inputs here: {describe(q, k, v)}, is_causal={scoring.is_causal}. "
                f"{why}; impl='sdpa' lets PyTorch pick a backend that can"
            ) from error
        raise


attention_sdpa_cudnn = partial(attention_sdpa_backend, impl="sdpa-cudnn")
attention_sdpa_efficient = partial(attention_sdpa_backend, impl="sdpa-efficient")
attention_sdpa_math = partial(attention_sdpa_backend, impl="sdpa-math")


def attention_sdpa_flash(q: Tensor, k: Tensor, v: Tensor, scoring: Scoring) -> Tensor:
    """PyTorch's FlashAttention-2; windows and documents by another way to the same kernels (`varlen`)."""
    if scoring.is_plain:
        return attention_sdpa_backend(q, k, v, scoring, impl="sdpa-flash")
    return attention_varlen(q, k, v, scoring)


def attention_eager_compiled(q: Tensor, k: Tensor, v: Tensor, scoring: Scoring) -> Tensor:
    """The oracle through torch.compile, compiled for this shape and scoring."""
    return cast(Tensor, call_compiled(attention_eager, q, k, v, scoring))


def call_compiled(function: Callable[..., Any], *arguments: Any, mode: str | None = None, **options: Any) -> Any:
    """The function's result, compiled for these shapes, in a mode of torch.compile."""
    with torch._dynamo.config.patch(recompile_limit=_SHAPES):
        return _compiled(function, mode)(*arguments, **options)


@cache
def _compiled(function: Callable[..., Any], mode: str | None) -> Callable[..., Any]:
    return torch.compile(function, dynamic=False, fullgraph=True, mode=mode)
