"""Meshes of all ranks, each made once in a process, as a user's script makes one."""

import functools

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh


@functools.cache
def mesh_of(*shape: int, names: tuple[str, ...] = ("replicate", "shard"), device: str = "cpu") -> DeviceMesh:
    """The mesh of this shape; every rank must call it. Of one dimension it is the last one's.

    A Gloo group has a thread that looks a hundred times a second whether anything came, as long as the process lives:
    a mesh for every wrapper in every test came to 160 groups, and half of both cores.
    """
    return init_device_mesh(device, shape, mesh_dim_names=names[-len(shape) :])
