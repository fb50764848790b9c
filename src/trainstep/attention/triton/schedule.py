"""Which tile a program works on, and in which order programs start: shared by the forward and both backward kernels."""

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

# Programs that run at the same time share keys and values (or queries and gradients) through the L2 cache. Heads are
# started in sections whose shared tensors fill about half of it, and within a section the tiles with the most work come
# first, so that the last programs to start are the short ones.
_L2_SHARE = 0.5

# Arguments that change from call to call: compiled once for all their values. Strides are not among them: their
# alignment decides how wide the loads can be.
SIZES = [
    "tiles_per_head", "all_heads", "heads", "all_kv_heads", "kv_heads", "n_queries", "n_keys", "heads_per_section",
]  # fmt: skip


@triton.jit
def tile_and_head(program, tiles_per_head, n_heads, heads_per_section, LONGEST_LAST: tl.constexpr):
    """Map a program's id to (tile, head): sections of heads in turn; within one, tile by tile over all its heads."""
    section = program // (heads_per_section * tiles_per_head)
    first_head = section * heads_per_section
    section_heads = tl.minimum(heads_per_section, n_heads - first_head)
    within = program - first_head * tiles_per_head
    tile = within // section_heads
    head = first_head + within % section_heads
    if LONGEST_LAST:
        tile = tiles_per_head - 1 - tile
    return tile, head


@triton.jit
def load_tile(pointers, mask, PARTIAL: tl.constexpr):
    """Load a tile, with zeros where the mask is False; a tile known to be whole (not PARTIAL) needs no mask."""
    if PARTIAL:
        return tl.load(pointers, mask=mask, other=0.0)
    else:  # noqa: RET505 - Triton compiles one of two branches, so the second return must be in one
        return tl.load(pointers)


def section_heads(device: torch.device, heads: int, bytes_per_head: int) -> int:
    """How many heads to run side by side when each keeps re-reading `bytes_per_head` bytes."""
    return max(1, min(heads, int(_L2_SHARE * _l2_bytes(device)) // bytes_per_head))


@cache
def _l2_bytes(device: torch.device) -> int:
    if device.type != "cuda":
        return 1 << 20  # Triton's interpreter, which has no cache: any size will do
    return torch.cuda.get_device_properties(device).L2_cache_size


def four_dims(t: Tensor) -> Tensor:
    """View (..., heads, length, head_dim) as (batch, heads, length, head_dim), a 3-D tensor with one head.

    Copies only what the kernels cannot address: a last dimension that is not contiguous, leading dimensions that do not
    merge, or rows so far apart that offsets inside one tile would leave 32 bits.
    """
    if t.ndim == 2:
        t = t[None, None]
    elif t.ndim == 3:
        t = t[:, None]
    elif t.ndim > 4:
        t = t.flatten(0, -4)
    if t.stride(-1) != 1 or t.stride(-2) >= 2**22:
        t = t.contiguous()
    return t
