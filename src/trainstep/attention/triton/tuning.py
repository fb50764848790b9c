"""Tile configurations: which tile sizes, warps and pipeline stages each kernel runs with on each kind of GPU."""

from dataclasses import dataclass
from functools import cache

import torch
import triton


@dataclass(frozen=True)
class Tile:
    """One configuration: queries × keys per tile, warps per program, stages of the software pipeline."""

    queries: int
    keys: int
    warps: int
    stages: int


def block_of(head_dim: int) -> int:
    """The head_dim a kernel computes with: the next power of two, at least the 16 that matrix units need."""
    return max(16, triton.next_power_of_2(head_dim))


def multiply_precision(dtype: torch.dtype) -> str:
    """How kernels multiply: float32 as PyTorch's own matrix products do under the current setting."""
    if dtype == torch.float32 and torch.get_float32_matmul_precision() == "highest":
        return "ieee"
    return "tf32"  # 16-bit operands are multiplied as they are; this names nothing there


@cache
def tile_for(kernel: str, device: torch.device, dtype: torch.dtype, head_dim: int, is_causal: bool) -> Tile:
    return Tile(32, 32, 4, 2)
