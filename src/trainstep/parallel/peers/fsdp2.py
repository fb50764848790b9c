"""torch.distributed.fsdp.fully_shard (FSDP2).

A group for each block, and one for the rest, as in torch's tutorial "Getting Started with Fully Sharded Data Parallel
(FSDP2)"; or for several blocks in a row, which fully_shard takes as a list.

reshard_after_forward: its default. Blocks give their gathered weights back after forward; the root's (embedding, last
norm, head) stay, since backward begins with them (page of fully_shard).

Prefetch: explicit, two blocks ahead in forward and in backward, as in the tutorial ("Explicit prefetching"), and as far
as ours looks ahead. Left out where parameters may go unused: the order of blocks must then be taken from each step, as
FSDP2 does by itself. The tutorial also gathers the root's weights before forward; here nothing would run beside that.

param_dtype: the dtype the step computes in under autocast, so that weights travel in 16 bits (the tutorial's
MixedPrecisionPolicy).

reduce_dtype: two rows. float32 as in the tutorial and in torchtitan; or the same 16 bits, which sends half and sums
with the rounding of 16 bits (page of MixedPrecisionPolicy: without it, the reduction is in param_dtype). Without
autocast there is nothing to choose.

mesh: one dimension; for hybrid sharding two, ("replicate", "shard"), with a host's ranks in a row, as on the page of
fully_shard ("HSDP") and in torchtitan's. Gradients are then all-reduced between rows in reduce_dtype.

Compiled, blocks are compiled in place before sharding, as in torchtitan ("after AC wrapping and before FSDP"), and as
for ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from trainstep.base.errors import UnsupportedError

AHEAD = 2
"""Groups gathered before they are called."""


def shard_fully(
    module: nn.Module,
    mesh: DeviceMesh,
    dtype: torch.dtype | None,
    groups: Sequence[list[nn.Module]],
    *,
    narrow_reduce: bool,
    fixed_order: bool,
) -> None:
    """Shard the module in place.

    Args:
        mesh: the ranks; of two dimensions, ("replicate", "shard"), for hybrid sharding.
        dtype: that of autocast; None computes in the parameters' own.
        groups: the blocks, those of a list together.
        narrow_reduce: gradients are summed in `dtype`, instead of in float32.
        fixed_order: every step calls all blocks, in order of definition.

    Raises:
        UnsupportedError: a parameter is a scalar.
    """
    if scalars := [name for name, parameter in module.named_parameters() if not parameter.dim()]:
        raise UnsupportedError(f"torch's fully_shard takes no parameter without dimensions, such as {scalars[0]}")
    policy = MixedPrecisionPolicy(
        param_dtype=dtype, reduce_dtype=torch.float32 if dtype and not narrow_reduce else None
    )
    for group in groups:
        fully_shard(group, mesh=mesh, mp_policy=policy)
    fully_shard(module, mesh=mesh, mp_policy=policy)
    if fixed_order:
        _prefetch(cast(Sequence[FSDPModule], [first for first, *_ in groups]))


def _prefetch(blocks: Sequence[FSDPModule]) -> None:
    """`blocks`: the first of each group."""
    for place, block in enumerate(blocks):
        if after := blocks[place + 1 : place + 1 + AHEAD]:
            block.set_modules_to_forward_prefetch(list(after))
        if before := blocks[max(place - AHEAD, 0) : place]:
            block.set_modules_to_backward_prefetch(list(reversed(before)))
