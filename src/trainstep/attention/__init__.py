"""Attention: one function, many implementations.

`attention(q, k, v, is_causal=…, scale=…, impl=…)` is the way in; `IMPLEMENTATIONS` lists the names `impl` takes.
Every name is imported on first use, so the oracle and PyTorch's own kernels work where Triton is not installed.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainstep.attention.api import IMPLEMENTATIONS, attention
    from trainstep.attention.choice import choose
    from trainstep.attention.flash_reference import FlashAttentionReference
    from trainstep.attention.triton.function import FlashAttentionTriton, flash_attention

__all__ = [
    "IMPLEMENTATIONS",
    "FlashAttentionReference",
    "FlashAttentionTriton",
    "attention",
    "choose",
    "flash_attention",
]

_HOME = {
    "IMPLEMENTATIONS": "trainstep.attention.api",
    "attention": "trainstep.attention.api",
    "choose": "trainstep.attention.choice",
    "FlashAttentionReference": "trainstep.attention.flash_reference",
    "FlashAttentionTriton": "trainstep.attention.triton.function",
    "flash_attention": "trainstep.attention.triton.function",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value  # the next look-up does not come here
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
