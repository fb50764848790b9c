"""Weights and buffers of a module, and other tensors by name: set aside in the host's memory, and put back.

Tensors that come from a GPU are kept page-locked: they are copied there again for every step that is judged, several
times over. From page-locked memory that runs at the bus's speed; from other memory the driver copies them once more in
between. Tensors share a few large buffers: to lock memory takes time per call, and torch rounds each locked buffer up
to a power of two.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor, nn

BUFFER = 2**30
"""Bytes of a buffer at most, unless one tensor alone is larger."""
ALIGNED = 64
"""Bytes at whose multiples each tensor starts."""


def tensors_of(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers of a module by name, those that are used twice once."""
    return dict([*module.named_parameters(), *module.named_buffers()])


def buffers_of(module: nn.Module) -> dict[str, Tensor]:
    """Copies of a module's buffers by name, where they are."""
    return {name: value.detach().clone() for name, value in module.named_buffers()}


def load(module: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Copy parameters and buffers into the module, whatever their dtype is there; see `load_buffers`."""
    with torch.no_grad():
        for name, value in module.named_parameters():
            value.copy_(state[name])
    load_buffers(module, state)


def load_buffers(module: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Copy buffers into the module, whatever their dtype is there.

    One that has another shape by now, as a cache that grows, is replaced by a copy. One that was not there yet, as a
    mask that the first forward makes, stays.
    """
    with torch.no_grad():
        for name, value in [*module.named_buffers()]:
            if name not in state:
                continue
            if value.shape == state[name].shape:
                value.copy_(state[name])
            else:
                owner, _, key = name.rpartition(".")
                module.get_submodule(owner)._buffers[key] = state[name].to(value.device, value.dtype, copy=True)


def copied_to_host(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies by the same names, contiguous, in the host's memory; none shares memory with what was given."""
    found = {name: each.detach().to("cpu", copy=True) for name, each in tensors.items() if not each.is_cuda}
    on_gpu = {name: each.detach() for name, each in tensors.items() if each.is_cuda}
    for names in _shared(on_gpu):
        sizes = {name: _aligned(on_gpu[name].nbytes) for name in names}
        buffer, start = torch.empty(sum(sizes.values()), dtype=torch.uint8, pin_memory=True), 0
        for name, size in sizes.items():
            tensor = on_gpu[name]
            place = buffer[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            found[name] = place.copy_(tensor)
            start += size
    return {name: found[name] for name in tensors}


def optimizer_state_tensors(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    """Every tensor in the optimizer's state."""
    for state in optimizer.state.values():
        yield from (value for value in state.values() if isinstance(value, Tensor))


def _shared(tensors: Mapping[str, Tensor]) -> Iterable[list[str]]:
    """Names of the tensors that share a buffer, in order."""
    names: list[str] = []
    size = 0
    for name, tensor in tensors.items():
        if names and size + tensor.nbytes > BUFFER:
            yield names
            names, size = [], 0
        names.append(name)
        size += _aligned(tensor.nbytes)
    if names:
        yield names


def _aligned(size: int) -> int:
    return -(-size // ALIGNED) * ALIGNED
