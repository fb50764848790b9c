"""The ranks of a wrapper: all of them, those that divide one replica of the model, and those that have the same part.

A two-dimensional `DeviceMesh` lays ranks out in rows: a row is one replica of the model, divided among its ranks (the
*shard* dimension), and a column the ranks that have the same part of every replica (the *replicate* dimension). With
ranks 0 to 3 as [[0, 1], [2, 3]], ranks 0 and 1 have half of the model each, and so have 2 and 3. What is divided
travels along rows, what is then averaged between replicas along columns, and what is not divided among all ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard

from trainstep.base.errors import UsageError
from trainstep.parallel.process import resolve_group

DIMENSIONS = ("replicate", "shard")
_ADVICE = (
    'torch.distributed.device_mesh.init_device_mesh(device, (replicas, ranks of each), mesh_dim_names=("replicate", '
    '"shard")), with one host\'s ranks in a row'
)


@dataclass(frozen=True)
class Ranks:
    """`everyone` are the wrapper's ranks; `shard` those of this rank's row, `replicate` those of its column.

    Where there is one replica, `everyone` is `shard`, and `replicate` is None.
    """

    everyone: dist.ProcessGroup
    shard: dist.ProcessGroup
    replicate: dist.ProcessGroup | None = None
    given: DeviceMesh | None = None  # what it was made from

    @property
    def replicas(self) -> int:
        return 1 if self.replicate is None else self.replicate.size()

    def mesh(self, device_type: str) -> DeviceMesh:
        """The mesh whose last dimension is `shard`: what was given, else that of the group."""
        return DeviceMesh.from_group(self.shard, device_type) if self.given is None else self.given

    @property
    def layout(self) -> tuple[str, list[Any]] | None:
        """To be compared between ranks."""
        return None if self.given is None else (self.given.device_type, self.given.mesh.tolist())


def others(group: dist.ProcessGroup) -> list[int]:
    """The numbers of a group's other ranks, in another order on every rank, so that no two turn to one at a time."""
    rank, size = group.rank(), group.size()
    return [(rank + distance) % size for distance in range(1, size)]


def placements(mesh: DeviceMesh, *, cut: bool) -> list[Placement]:
    """Placements of a tensor cut by rows along the last dimension of `Ranks.mesh`, or of one that is whole on every
    rank."""
    return [*[Replicate()] * (mesh.ndim - 1), Shard(0) if cut else Replicate()]


def ranks_of(process_group: dist.ProcessGroup | None, mesh: DeviceMesh | None) -> Ranks:
    """The ranks that a wrapper was given: a group, a mesh of one dimension or of `DIMENSIONS`, or, by default, all.

    A mesh that has only some of all ranks, in both dimensions, is given a group of them here; all of them must call.

    Raises:
        UsageError: both were given, the mesh is another one, or not in order, or this process is not in it.
    """
    if mesh is None:
        group = resolve_group(process_group)
        return Ranks(group, group)
    if process_group is not None:
        raise UsageError("process_group and mesh were both given; give the mesh, which has the groups, or the group")
    world = resolve_group(None)
    if not isinstance(mesh, DeviceMesh):
        raise UsageError(f"mesh is a {type(mesh).__name__}; expected a DeviceMesh, such as {_ADVICE}")
    _check_dimensions(mesh)
    rows: list[list[int]] = mesh.mesh.view(-1, mesh.mesh.shape[-1]).tolist()
    if unsorted := [row for row in rows if row != sorted(row)]:
        raise UsageError(
            f"mesh has the row {unsorted[0]}; expected ranks in ascending order within a row, as torch numbers those "
            "of a group: in another order a rank would have the part of another one"
        )
    numbers = mesh.mesh.flatten().tolist()
    if max(numbers) >= world.size():
        few = f"and there are {world.size()} (0 to {world.size() - 1})"
        raise UsageError(f"mesh has {len(numbers)} ranks, up to rank {max(numbers)}, {few}; make it of those")
    if mesh.get_coordinate() is None:
        raise UsageError(
            f"mesh has the ranks {mesh.mesh.tolist()}, and this process is rank {dist.get_rank()}; only its members "
            "may use it"
        )
    try:
        groups = mesh.get_all_groups()
    except (RuntimeError, KeyError, ValueError) as error:
        raise UsageError(f"mesh has no process groups ({error}); make it with {_ADVICE}") from error
    if len(groups) == 1:
        return Ranks(groups[0], groups[0], given=mesh)
    replicate, shard = groups
    if replicate.size() == 1:
        return Ranks(shard, shard, given=mesh)
    if shard.size() == 1:
        return Ranks(replicate, shard, replicate, mesh)
    return Ranks(_of_all(sorted(numbers), world, shard, mesh.device_type), shard, replicate, mesh)


def _check_dimensions(mesh: DeviceMesh) -> None:
    names = mesh.mesh_dim_names
    if mesh.ndim == 1:
        return
    if mesh.ndim == 2 and (
        names is None or all(name.endswith(end) for name, end in zip(names, DIMENSIONS, strict=True))
    ):
        return
    found = f"of shape {tuple(mesh.mesh.shape)}" if names is None else ", ".join(f'"{name}"' for name in names)
    raise UsageError(
        f'mesh has the dimensions {found}; expected one dimension, or "replicate" and "shard", in that order: {_ADVICE}'
    )


def _of_all(numbers: list[int], world: dist.ProcessGroup, one: dist.ProcessGroup, device: str) -> dist.ProcessGroup:
    """The group of these ranks; where it is not that of all, a new one, which waits as long as `one` does."""
    if len(numbers) == world.size():
        return world
    timeout: timedelta = one._get_backend(torch.device(device)).options._timeout
    made = dist.new_group(numbers, timeout=timeout, use_local_synchronization=True)
    assert isinstance(made, dist.ProcessGroup), "this rank is among them"
    return made
