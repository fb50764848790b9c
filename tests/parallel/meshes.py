"""Meshes of all ranks, each made once in a process, as a user's script makes one."""

import functools

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh


def mesh_of(*shape: int, device: str = "cpu") -> DeviceMesh:
    """The mesh of this shape; every rank must call it. Of one dimension it is the last one's.

    A Gloo group has a thread that looks a hundred times a second whether anything came, as long as the process lives:
    with 86 groups a rank that waited took 5 % of a core, and a mesh for every wrapper of every test came to 279.
    """
    return _made(shape, device)


@functools.cache
def _made(shape: tuple[int, ...], device: str) -> DeviceMesh:
    return init_device_mesh(device, shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
