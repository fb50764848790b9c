"""Contents of a batch: its tensors, the tokens among them, a rank's share of its rows, and a print of its content.

A batch is a tensor, or tuples, lists, dicts and dataclasses of them, as a workload's author has it.
"""

from __future__ import annotations

import copy
import dataclasses
import hashlib
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from trainstep.base.errors import UsageError


def map_tensors(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """`value` with `change` applied to every tensor in its tuples, lists and dicts, and in classes derived from them.

    A mapping of another class (such as the `BatchEncoding` of Hugging Face) and a dataclass are shallow copies.
    """
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, (MutableMapping, list)):
        changed = copy.copy(value)  # of the same class, for what a loss reads as an attribute
        for key in range(len(value)) if isinstance(value, list) else list(value):
            changed[key] = map_tensors(value[key], change)
        return changed
    if isinstance(value, PackedSequence):
        fields = {name: map_tensors(item, change) for name, item in value._asdict().items() if name != "batch_sizes"}
        return value._replace(**fields)  # its batch_sizes belong on the CPU
    if isinstance(value, tuple):
        items = [map_tensors(item, change) for item in value]
        return type(value)._make(items) if hasattr(value, "_make") else type(value)(items)  # a namedtuple, or plain
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        other = copy.copy(value)
        for field in dataclasses.fields(value):
            object.__setattr__(other, field.name, map_tensors(getattr(value, field.name), change))
        return other
    return value


def tensors_of(value: Any) -> list[Tensor]:
    """All tensors that `map_tensors` changes."""
    found: list[Tensor] = []

    def collect(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    map_tensors(value, collect)
    return found


def share_of(batch: Any, rank: int, world_size: int) -> Any:
    """A rank's rows of each tensor's first dimension.

    Raises:
        UsageError: there are not as many rows for each rank.
    """

    def rows(tensor: Tensor) -> Tensor:
        count = tensor.shape[0] if tensor.dim() else 0
        if count == 0 or count % world_size:
            raise UsageError(
                f"a batch with a tensor of shape {tuple(tensor.shape)} cannot be divided among {world_size} ranks; "
                f"its first dimension must be a multiple of {world_size}"
            )
        return tensor.chunk(world_size)[rank]

    return map_tensors(batch, rows)


def count_tokens(batch: Any) -> int | None:
    """Elements of the batch's first integer tensor of two dimensions (sequences × tokens), or None."""
    if isinstance(batch, Tensor):
        return batch.numel() if batch.dim() == 2 and not batch.is_floating_point() else None
    items = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, (tuple, list)) else ()
    return next((count for item in items if (count := count_tokens(item)) is not None), None)


def fingerprint(batch: Any) -> str:
    """Hash of the types, shapes and bits of a batch's tensors."""
    found = hashlib.blake2b(digest_size=16)
    for tensor in tensors_of(batch):
        found.update(f"{tensor.dtype} {tuple(tensor.shape)} ".encode())
        found.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()
