"""The tensors of a batch, whatever a loader packs them in."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, MutableMapping
from typing import Any

from torch import Tensor
from torch.nn.utils.rnn import PackedSequence


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
