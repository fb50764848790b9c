"""What the host side of the Hopper kernels shares: their head_dim, and descriptors for the copy engine."""

from functools import cache
from typing import Any

import torch
import triton
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

_TYPES = {torch.float16: gl.float16, torch.bfloat16: gl.bfloat16}


def block_of(head_dim: int) -> int:
    """The head_dim a Hopper kernel computes with; the copy engine fills what is missing with zeros."""
    return max(64, triton.next_power_of_2(head_dim))


def describe_tiles(t: Tensor, rows: int, block_d: int) -> TensorDescriptor:
    """A descriptor of (batch, heads, length, head_dim) in tiles of [1, 1, rows, block_d]."""
    return TensorDescriptor(t, t.shape, t.stride(), [1, 1, rows, block_d], _layout(t.dtype, rows, block_d))


@cache
def _layout(dtype: torch.dtype, rows: int, block_d: int) -> Any:
    return gl.NVMMASharedLayout.get_default_for([1, 1, rows, block_d], _TYPES[dtype])
