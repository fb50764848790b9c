"""Attention: one function, many implementations.

`attention(q, k, v, is_causal=…, scale=…, impl=…)` is the way in; `IMPLEMENTATIONS` lists the names `impl` takes.
Every name is imported on first use, so the oracle and PyTorch's own kernels work where Triton is not installed.
"""

from typing import TYPE_CHECKING

from trainstep.base.lazy import on_first_use

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

_HOME = dict.fromkeys(("IMPLEMENTATIONS", "attention", "choose"), "api")
_HOME |= {"FlashAttentionReference": "reference", "FlashAttentionTriton": "flash", "flash_attention": "flash"}
__getattr__, __dir__ = on_first_use(__name__, _HOME)
