"""Tile configurations: what each kernel runs with on each kind of GPU, looked up, never searched for at run time.

The numbers are in `tables`, which `tune` measures and writes.
"""

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from trainstep.attention.triton import tables
from trainstep.errors import UsageError


@dataclass(frozen=True)
class Tile:
    """One configuration of a portable kernel: queries × keys per tile, warps per program, stages of its pipeline."""

    queries: int
    keys: int
    warps: int
    stages: int


@dataclass(frozen=True)
class HopperTile:
    """One configuration of a Hopper kernel.

    consumers: warpgroups that compute, each on 64 rows of its own. block: rows per tile that streams past them.
    stages: slots of the ring those tiles pass through. own_in_registers: whether a consumer keeps its own rows in
    registers, which spares shared memory's bandwidth where there are registers to spare.
    """

    consumers: int
    block: int
    stages: int
    own_in_registers: bool = False

    @property
    def registers(self) -> int:
        """Registers per consumer thread: what 65,536 leave when the producer's warpgroup keeps 24 each."""
        return 240 if self.consumers == 2 else 160


def block_of(head_dim: int) -> int:
    """The head_dim a portable kernel computes with: the next power of two, at least the 16 that matrix units need."""
    return max(16, 1 << (head_dim - 1).bit_length())


def multiply_precision(dtype: torch.dtype) -> str:
    """How kernels multiply: float32 as exactly as PyTorch's own matrix products under the current setting."""
    if dtype == torch.float32 and torch.get_float32_matmul_precision() == "highest":
        return "tf32x3"
    return "tf32"  # 16-bit operands are multiplied as they are; this names nothing there


def architecture(capability: tuple[int, int]) -> str:
    """The key of `tables.PORTABLE` for a GPU: its own name or, unknown, the one for the least shared memory."""
    name = f"sm_{capability[0]}{capability[1]}"
    return name if name in tables.PORTABLE else "other"


def tile_for(kernel: str, q: Tensor, is_causal: bool) -> Tile:
    """The portable configuration of `kernel` ("forward", "dq" or "dkdv") for q's device, dtype and head_dim."""
    capability = torch.cuda.get_device_capability(q.device)
    precision = multiply_precision(q.dtype) if q.dtype == torch.float32 else "16-bit"
    return _portable(architecture(capability), kernel, precision, block_of(q.shape[-1]), is_causal)


@cache
def _portable(arch: str, kernel: str, precision: str, block_d: int, is_causal: bool) -> Tile:
    return Tile(*tables.PORTABLE[arch][kernel, precision, block_d, is_causal])


@cache
def hopper_tile_for(kernel: str, head_dim: int, is_causal: bool) -> HopperTile:
    """The configuration of a Hopper kernel, which has the same three names and takes 16-bit inputs."""
    row = tables.HOPPER.get((kernel, max(64, block_of(head_dim)), is_causal))
    if row is None:
        raise UsageError(f"no Hopper configuration of {kernel!r} for head_dim {head_dim}")
    return HopperTile(*row)
