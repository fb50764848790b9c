"""Which implementation `impl="auto"` stands for: the fastest measured on this kind of device, nothing cleverer."""

import torch
from torch import Tensor


def choose(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> str:
    """Name the implementation that `attention(q, k, v, impl="auto")` runs for these inputs.

    Where nothing has been measured (the CPU, another GPU, another dtype or head_dim) this is "sdpa": PyTorch's pick.
    """
    del k, v, is_causal
    if q.device.type != "cuda" or not torch.cuda.is_available():
        return "sdpa"
    return "sdpa"
