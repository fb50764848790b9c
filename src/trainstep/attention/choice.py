"""Which implementation `impl="auto"` stands for: the fastest measured on this kind of GPU, nothing cleverer."""

import torch
from torch import Tensor

from trainstep.attention.choice_table import FASTEST


def choose(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> str:
    """Name the implementation that `attention(q, k, v, impl="auto")` runs for these inputs.

    The table holds self-attention: one length, as many key heads as query heads. Whatever it does not hold (the CPU, a
    GPU, dtype or head_dim nobody measured, grouped heads, two lengths) is left to PyTorch: "sdpa".
    """
    if q.device.type != "cuda" or torch.version.hip is not None or q.shape != k.shape or k.shape != v.shape:
        return "sdpa"
    major, minor = torch.cuda.get_device_capability(q.device)
    dtype = str(q.dtype).removeprefix("torch.")
    fastest = "sdpa"
    for from_length, impl in FASTEST.get((f"sm_{major}{minor}", dtype, q.shape[-1], is_causal), ()):
        if q.shape[-2] >= from_length:
            fastest = impl
    return fastest
