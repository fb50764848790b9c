"""One parameter of a sharded module: this rank's rows of it, and the whole of it while its group is gathered.

A parameter with two or more dimensions is cut by rows, as `torch.chunk` cuts and as a DTensor's `Shard(0)` lies: each
rank has ceil(rows / world size) of them, the last ranks fewer or none. So a shard keeps its dimensions, its elements
are contiguous, and it is a valid checkpoint as it stands. Everything else is replicated.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from trainstep.errors import UsageError


@dataclass(frozen=True)
class Rows:
    """How a tensor of `shape` is cut by rows over `world_size` ranks, for this `rank`."""

    shape: torch.Size
    rank: int
    world_size: int

    @property
    def per_rank(self) -> int:
        """Rows of a full shard: ceil(rows / world size)."""
        return -(-self.shape[0] // self.world_size)

    @property
    def start(self) -> int:
        """The rank's first row."""
        return min(self.rank * self.per_rank, self.shape[0])

    @property
    def stop(self) -> int:
        """One past the rank's last row."""
        return min((self.rank + 1) * self.per_rank, self.shape[0])

    @property
    def padded_shape(self) -> torch.Size:
        """The shape with as many rows as make the shards equal."""
        return torch.Size((self.per_rank * self.world_size, *self.shape[1:]))


class ShardedParameter:
    """A parameter's shard, which the optimizer sees, and its full form, which the module computes with.

    Attributes:
        names: all names in the module; several if it is tied.
        shape: of the full parameter.
        rows: how it is cut, or None if it is replicated.
        shard: this rank's rows (or all of it), in the dtype it is trained in. `.grad` is the shard's.
        full: while gathered, the whole parameter in the dtype it is computed with; a leaf whose storage comes and goes.
    """

    def __init__(
        self,
        names: list[str],
        slots: list[tuple[nn.Module, str]],
        shard: nn.Parameter,
        shape: torch.Size,
        rows: Rows | None,
    ) -> None:
        self.names = names
        self.slots = slots
        self.shard = shard
        self.shape = shape
        self.rows = rows
        self.trainable = shard.requires_grad
        self.full: nn.Parameter | None = None

    @property
    def name(self) -> str:
        """The first of its names."""
        return self.names[0]

    def compute_dtype(self, dtype: torch.dtype | None) -> torch.dtype:
        """What it is gathered in, if floating-point parameters are computed with in `dtype` (None: as they are)."""
        return self.shard.dtype if dtype is None or not self.shard.is_floating_point() else dtype

    def install_full(self) -> None:
        """Let the module compute with the full parameter."""
        assert self.full is not None
        if self.shard.requires_grad != self.trainable:
            raise UsageError(
                f"requires_grad of {self.name} was {self.trainable} when it was sharded and is "
                f"{self.shard.requires_grad} now; freeze or unfreeze before FullyShardedDataParallel is built"
            )
        self._install(self.full)

    def install_shard(self) -> None:
        """Put the shard back in its place."""
        self._install(self.shard)

    def _install(self, parameter: nn.Parameter) -> None:
        for module, attribute in self.slots:
            there = module._parameters.get(attribute)
            if there is not self.shard and there is not self.full:
                raise UsageError(
                    f"{self.name} was replaced or removed after the module was sharded; change parameters in place, "
                    "through load_state_dict, or before FullyShardedDataParallel is built"
                )
            module._parameters[attribute] = parameter

    def attach_gradient(self, gradient: Tensor) -> None:
        """Add to the shard's `.grad`, or become it."""
        if self.shard.grad is None:
            self.shard.grad = gradient
        else:
            self.shard.grad.add_(gradient)
