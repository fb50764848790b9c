"""torch.nn.attention.varlen: PyTorch's FlashAttention-2 on packed documents and windows, which SDPA does not pass on.

`sdpa-flash` runs it for those; the kernels are the same as behind `scaled_dot_product_attention`
(aten::_flash_attention_forward). Its window_size, (keys before the own, keys after it), says what is causal too.
"""

from __future__ import annotations

import inspect
from typing import Any, cast

import torch
from torch import Tensor

from trainstep.attention.documents import heads_first, token_first
from trainstep.attention.inputs import describe
from trainstep.attention.scoring import Scoring
from trainstep.base.errors import UnsupportedError


def unsupported_here(q: Tensor, k: Tensor) -> bool:
    """True if torch's kernels do not take these; with two lengths they would count a mask from the end of the keys."""
    return q.device.type != "cuda" or q.dtype not in (torch.float16, torch.bfloat16) or q.shape[-2] != k.shape[-2]


def attention_varlen(q: Tensor, k: Tensor, v: Tensor, scoring: Scoring) -> Tensor:
    """Documents or a window by PyTorch's FlashAttention-2. The host waits for the length of the longest document.

    UsageError: not on an NVIDIA GPU in 16 bits, two lengths, a softcap, or grouped heads where this torch's varlen has
    none.
    """
    if scoring.softcap is not None:
        raise UnsupportedError("impl='sdpa-flash' takes no softcap; use impl='flex' or impl='flash-triton'")
    if unsupported_here(q, k):
        raise UnsupportedError(
            "impl='sdpa-flash' has windows and documents on NVIDIA GPUs in float16 and bfloat16, with as many keys as "
            f"queries; got {describe(q, k, v)}"
        )
    from torch.nn.attention.varlen import varlen_attn

    takes = inspect.signature(varlen_attn).parameters
    before = -1 if scoring.window is None else scoring.window - 1
    settings: dict[str, Any] = {"scale": scoring.scale, "window_size": (before, 0)}
    if not scoring.is_causal:
        settings["window_size"] = (-1, -1)
    tokens_q, tokens_k, tokens_v, offsets, longest = token_first(q, k, v, scoring.cu_seqlens)
    if tokens_q.shape[1] != tokens_k.shape[1]:
        settings["enable_gqa"] = True
    if missing := settings.keys() - takes.keys():
        raise UnsupportedError(
            f"torch {torch.__version__}'s varlen_attn takes no {', '.join(sorted(missing))}, which impl='sdpa-flash' "
            f"needs here: {describe(q, k, v)}; use impl='flex' or impl='flash-triton'"
        )
    out = varlen_attn(tokens_q, tokens_k, tokens_v, offsets, offsets, longest, longest, **settings)
    return heads_first(cast(Tensor, out), q)
