"""FlexAttention, torch.nn.attention.flex_attention: `flex` and `flex-max-autotune`.

Both are compiled, as its page says it must be to be fast, for one shape at a time. The mask of causal attention is a
BlockMask, made once per length and window, outside of what is timed; that of documents
is made at every call.

`flex`: what a first call gives. torch.compile's default mode takes the kernels' tiles from a table for the GPU.

`flex-max-autotune`: as its authors tune it.
mode="max-autotune-no-cudagraphs": tiles, warps and stages of the forward and backward kernels are measured for each
shape (page of torch.compile). That is more than ours gets, whose tiles were measured once for each GPU, dtype, head_dim
and mask (Hopper's forward has one of its own for short rows). CUDA graphs, which max-autotune would add, replay a whole
step's launches and are not part of any kernel here.
kernel_options (page of FlexKernelOptions): ROWS_GUARANTEED_SAFE, since every query sees a key of the first block that
is visited for it; BLOCKS_ARE_CONTIGUOUS, since a row's whole blocks of keys are neighbours, and so are the others. Both
hold without a mask and with a causal one. In a window or a document the blocks at its two ends are visited first: they
are no neighbours, and some queries see nothing of the first; there neither is set. Tiles are left to the measurement.
Not set: PRESCALE_QK, which rounds q once more than any implementation beside it; USE_TMA, experimental on its page;
WRITE_DQ, which pays for some masks and scores other than these.

On a CPU it is right with AVX-512 alone: with AVX2 some rows come out as anything, NaN too. Seen of short contexts with
head_dim 8 and 16 (torch 2.13; notebook/lab-log.md, 2026-11-28).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, cast

import torch
from torch import Tensor

from trainstep.attention.documents import document_of
from trainstep.attention.inputs import describe, four_dims
from trainstep.attention.scoring import Scoring
from trainstep.attention.sdpa import call_compiled
from trainstep.base.errors import UnsupportedError

MAX_AUTOTUNE = "max-autotune-no-cudagraphs"
KERNEL_OPTIONS = {"ROWS_GUARANTEED_SAFE": True, "BLOCKS_ARE_CONTIGUOUS": True}  # with no window and no documents


def attention_flex(q: Tensor, k: Tensor, v: Tensor, scoring: Scoring) -> Tensor:
    """With torch's defaults, compiled for this shape. UnsupportedError: CPU tensors that need gradients, or a CPU
    without AVX-512."""
    return _flex("flex", q, k, v, scoring)


def attention_flex_max_autotune(q: Tensor, k: Tensor, v: Tensor, scoring: Scoring) -> Tensor:
    """Tuned for this shape, which takes long the first time. UnsupportedError: as of `attention_flex`."""
    settings: dict[str, Any] = {"mode": MAX_AUTOTUNE}
    if scoring.window is None and scoring.cu_seqlens is None:
        settings["kernel_options"] = KERNEL_OPTIONS
    return _flex("flex-max-autotune", q, k, v, scoring, **settings)


def _flex(impl: str, q: Tensor, k: Tensor, v: Tensor, scoring: Scoring, **settings: Any) -> Tensor:
    if q.device.type == "cpu" and torch.is_grad_enabled() and any(t.requires_grad for t in (q, k, v)):
        raise UnsupportedError(
            f"impl={impl!r} has no backward on the CPU: {describe(q, k, v)}; use impl='eager' or 'sdpa' there"
        )
    if q.device.type == "cpu" and (found := torch.backends.cpu.get_cpu_capability()) != "AVX512":
        raise UnsupportedError(
            f"impl={impl!r} is PyTorch's FlexAttention, which computes wrong rows on CPUs without AVX-512, and torch "
            f"uses this one as {found}; use impl='eager' or 'sdpa' here"
        )
    from torch.nn.attention.flex_attention import flex_attention

    lengths, is_causal, window = (q.shape[-2], k.shape[-2]), scoring.is_causal, scoring.window
    if scoring.cu_seqlens is not None:
        mask = _document_block_mask(scoring.cu_seqlens, lengths[0], is_causal, window)
    else:
        mask = _causal_block_mask(*lengths, window, str(q.device)) if is_causal else None
    if scoring.softcap is not None:
        settings["score_mod"] = _softcapped(scoring.softcap)
    q4, k4, v4, grouped = four_dims(q, k, v)
    out = call_compiled(
        flex_attention, q4, k4, v4, block_mask=mask, scale=scoring.scale, enable_gqa=grouped, **settings
    )
    return cast(Tensor, out).reshape(q.shape)


@lru_cache(maxsize=64)
def _softcapped(softcap: float) -> Callable[..., Tensor]:
    def capped(score: Tensor, _batch: Tensor, _head: Tensor, _query: Tensor, _key: Tensor) -> Tensor:
        return softcap * torch.tanh(score / softcap)

    return capped


@lru_cache(maxsize=64)
def _causal_block_mask(n_queries: int, n_keys: int, window: int | None, device: str) -> Any:
    from torch.nn.attention.flex_attention import create_block_mask

    def visible(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return key <= query if window is None else (key <= query) & (key > query - window)

    return create_block_mask(visible, B=None, H=None, Q_LEN=n_queries, KV_LEN=n_keys, device=device)


def _document_block_mask(cu_seqlens: Tensor, total: int, is_causal: bool, window: int | None) -> Any:
    """Made anew for every call, since only the device knows whether the documents are those of the last."""
    from torch.nn.attention.flex_attention import create_block_mask

    document = document_of(cu_seqlens, total)

    def visible(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        seen = document[query] == document[key]
        if is_causal:
            seen = seen & (key <= query)
        return seen if window is None else seen & (key > query - window)

    sizes: dict[str, Any] = {"B": None, "H": None, "Q_LEN": total, "KV_LEN": total, "device": str(cu_seqlens.device)}
    if not cu_seqlens.is_cuda:
        return create_block_mask(visible, **sizes)
    return call_compiled(create_block_mask, visible, **sizes)  # uncompiled it holds all queries by all keys
