"""Attention: one function, many implementations.

`attention(q, k, v, is_causal=…, scale=…, impl=…)` is the way in; `IMPLEMENTATIONS` lists the names `impl` takes.
Every name is imported on first use, so the oracle and PyTorch's own kernels work where Triton is not installed.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainstep.attention.api import IMPLEMENTATIONS, attention, choose
    from trainstep.attention.flash import FlashAttentionTriton, flash_attention
    from trainstep.attention.reference import FlashAttentionReference

__all__ = [
    "IMPLEMENTATIONS",
    "FlashAttentionReference",
    "FlashAttentionTriton",
    "attention",
    "choose",
    "flash_attention",
]

_HOME = {"FlashAttentionReference": "reference", "FlashAttentionTriton": "flash", "flash_attention": "flash"}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOME.get(name, 'api')}"), name)
    globals()[name] = value  # the next look-up does not come here
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
