"""FlashAttention's own packages: flash-attn 4 (`flash_attn.cute`), or else flash-attn 3 (`flash_attn_interface`).

Neither is a dependency. `flash-attn` runs the newest that is installed, a row of `bench attention` says which version
that is, and without one it is unsupported. Both come tuned by their authors, by GPU, head_dim and mask, and take no
further setting: `flash_attn_func` as the repository's README shows it (Dao-AILab/flash-attention), gradients in
whatever order is fastest, its default, or with `deterministic=True` under `torch.use_deterministic_algorithms(True)`.

They take (batch, length, heads, head_dim). Tensors are handed over transposed, not copied: kernels read any strides of
the first three dimensions.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trainstep.attention.documents import heads_first, token_first
from trainstep.attention.inputs import describe, four_dims
from trainstep.attention.scoring import Scoring
from trainstep.base.errors import UnsupportedError

PACKAGES = {"flash-attn-4": "flash_attn.cute", "flash-attn-3": "flash_attn_interface"}
"""Name of the package → its module with `flash_attn_func` and `flash_attn_varlen_func`, the newest first."""


class Functions(NamedTuple):
    """Functions of a package that compute attention: `flash_attn_func`, and for packed documents
    `flash_attn_varlen_func`."""

    plain: Callable[..., Any]
    varlen: Callable[..., Any]


def attention_flash_attn(q: Tensor, k: Tensor, v: Tensor, scoring: Scoring) -> Tensor:
    """FlashAttention 4 or 3. UsageError: not on a GPU in 16 bits, neither package, causal with two lengths."""
    if q.device.type != "cuda" or q.dtype not in (torch.float16, torch.bfloat16):
        raise UnsupportedError(
            f"impl='flash-attn' runs on NVIDIA GPUs in float16 and bfloat16; got {describe(q, k, v)}"
        )
    if scoring.is_causal and q.shape[-2] != k.shape[-2]:
        raise UnsupportedError(
            f"impl='flash-attn' counts a causal mask from the end of the keys, not from the start: {describe(q, k, v)}"
        )
    return in_its_layout(installed()[1], q, k, v, scoring)


def in_its_layout(package: Functions, q: Tensor, k: Tensor, v: Tensor, scoring: Scoring) -> Tensor:
    """`package`'s function on tensors with heads before length: it takes (batch, length, heads, head_dim), and with
    documents (tokens, heads, head_dim), their offsets and the length of the longest, for which the host waits.

    Its window_size says how many keys a query sees before and after its own, which is not counted.
    """
    settings: dict[str, Any] = {"softmax_scale": scoring.scale, "causal": scoring.is_causal}
    if scoring.window is not None:
        settings["window_size"] = (scoring.window - 1, 0)
    if scoring.softcap is not None:
        settings["softcap"] = scoring.softcap
    if torch.are_deterministic_algorithms_enabled():
        settings["deterministic"] = True
    if scoring.cu_seqlens is None:
        q4, k4, v4, _ = four_dims(q, k, v)
        o = _output(package.plain(*(each.transpose(1, 2) for each in (q4, k4, v4)), **settings))
        return o.transpose(1, 2).reshape(q.shape)
    *tokens, offsets, longest = token_first(q, k, v, scoring.cu_seqlens)
    settings |= {f"cu_seqlens_{of}": offsets for of in "qk"} | {f"max_seqlen_{of}": longest for of in "qk"}
    return heads_first(_output(package.varlen(*tokens, **settings)), q)


def _output(returned: Any) -> Tensor:
    o: Tensor = returned[0] if isinstance(returned, tuple) else returned  # some versions return the log-sum-exp too
    return o


@cache
def installed() -> tuple[str, Functions]:
    """The package that runs, `flash-attn-4 4.0.0`, and its functions. UsageError: none can be imported."""
    why = []
    for package, module in PACKAGES.items():
        try:
            found = importlib.import_module(module)
            functions = Functions(found.flash_attn_func, found.flash_attn_varlen_func)
        except (ImportError, AttributeError) as error:
            why.append(f"{module}: {error}")
            continue
        try:
            version = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            version = "of no known version"
        return f"{package} {version}", functions
    raise UnsupportedError(
        f"impl='flash-attn' needs flash-attn 4 (pip install flash-attn-4) or 3, and neither is here: {'; '.join(why)}"
    )
