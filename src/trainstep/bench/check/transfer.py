"""Large tensors from the host to a GPU.

A check keeps its reference on the host, where the step it judges cannot count it as memory, and copies all of it to the
GPU several times per step judged. From ordinary memory the driver copies with one thread; through page-locked pieces,
which all of torch's threads fill while the piece before is on its way, it goes several times as fast. Page-locking the
reference itself would take it out of the machine's ordinary memory for the time of a whole ladder.
"""

from __future__ import annotations

import torch
from torch import Tensor

PIECE = 32 * 2**20
"""Bytes of page-locked memory per piece."""


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """As `tensor.to(device)`, bit for bit."""
    if device.type != "cuda" or tensor.device.type != "cpu" or tensor.layout != torch.strided or not tensor.numel():
        return tensor.to(device)
    found = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
    source, target = (each.reshape(-1).view(torch.uint8) for each in (tensor, found))
    for start in range(0, len(source), PIECE):
        piece = source[start : start + PIECE].pin_memory()  # of a pool that takes it back once it was sent
        target[start : start + PIECE].copy_(piece, non_blocking=True)
    return found
