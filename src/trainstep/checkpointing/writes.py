"""Writes into tensors and arrays by a call that cannot be run again on what they were."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _NormBase
from torch.utils._pytree import tree_leaves

from trainstep.base.errors import UnsupportedError
from trainstep.checkpointing.sketching import sketch

if TYPE_CHECKING:
    from trainstep.checkpointing.repeating import Block


class Untouched:
    """Tensors and arrays that a call should leave as they are.

    torch counts changes in place, apart from those through `.data`, and numpy counts none. Reading the values finds
    those too, and makes the host wait for the device.

    Args:
        reads_values: whether to compare values.
    """

    def __init__(self, *, reads_values: bool) -> None:
        self._reads_values = reads_values
        self._counted: list[tuple[str, Tensor, int]] = []
        self._read: list[tuple[str, Any, Any]] = []

    def add(self, place: str, value: Any) -> None:
        """Watch it, under a name for an error message."""
        if isinstance(value, Tensor):
            if value.is_inference():
                return
            self._counted.append((place, value, value._version))
        if self._reads_values and (before := _values(value)) is not None:
            self._read.append((place, value, before))

    def written(self) -> Iterator[tuple[str, Any]]:
        """Yield each that changed since, after its name."""
        yield from ((place, value) for place, value, version in self._counted if value._version != version)
        yield from ((place, value) for place, value, before in self._read if _is_other(before, _values(value)))


def _values(value: Any) -> Any:
    """Stand for the values of a tensor or an array, on the tensor's device; None where they cannot be read."""
    if isinstance(value, np.ndarray):
        return hash(value.tobytes()) if value.flags.writeable else None
    return sketch(value)


def _is_other(before: Any, now: Any) -> bool:
    """Return True where values differ that can be read and have one shape."""
    if isinstance(before, Tensor):
        return isinstance(now, Tensor) and now.shape == before.shape and not torch.equal(before, now)
    return bool(before != now)


def refuse(block: str, place: str, why: str = "") -> UnsupportedError:
    """Return the error of a block that writes into a tensor."""
    return UnsupportedError(
        f"checkpointing: {block} changes {place} in place{why}, so it cannot be run again on what it was; make the "
        "change outside of the block, let it work on a copy, or leave checkpointing off"
    )


def refusing_writes(call: Callable[..., Any], inside: Sequence[Block]) -> Callable[..., Any]:
    """Return compiled code with a check around it: it must not write to a tensor that its backward computes with again.

    Compiled code computes again from tensors as they are in backward. The check exempts running statistics: a norm that
    updates them does not compute with them.

    Args:
        call: compiled code that runs checkpointed blocks.
        inside: the blocks. The check leaves out blocks that the compiler left to Python.
    """
    tensors: list[tuple[Block, str, Tensor]] = []
    harmless: set[str] = set()

    def checked(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return call(*args, **kwargs)
        if not tensors:
            tensors.extend((block, place, each) for block in inside for place, each in _tensors(block))
        before = [(*each, each[0].calls, each[2]._version) for each in tensors if each[1] not in harmless]
        result = call(*args, **kwargs)
        for block, place, tensor, calls, version in before:
            if block.calls == calls and tensor._version != version:
                if tensor.untyped_storage().data_ptr() in set(_saved_storages(result)):
                    raise refuse(block.name, place, ", and its compiled backward computes with it")
                harmless.add(place)
        return result

    return checked


def _tensors(block: Block) -> Iterator[tuple[str, Tensor]]:
    for name, module in block.module.named_modules(prefix=block.name):
        if not isinstance(module, _NormBase):
            for key, value in {**module._parameters, **module._buffers, **vars(module)}.items():
                if isinstance(value, Tensor) and not value.is_inference():
                    yield f"{name}.{key}", value


def _saved_storages(result: Any) -> Iterator[int]:
    """Addresses of the memory that compiled code saved for the backward of `result`."""
    ahead = [each.grad_fn for each in tree_leaves(result) if isinstance(each, Tensor)]
    seen: set[Any] = {None}
    while ahead:
        node: Any = ahead.pop()
        if node in seen:
            continue
        seen.add(node)
        ahead += [each for each, _ in node.next_functions]
        if isinstance(node, torch.autograd.function.BackwardCFunction):
            uncounted = getattr(node, "_tensors_no_vc_check", None)  # where the compiler wrote itself
            yield from (each.untyped_storage().data_ptr() for each in (*node.saved_tensors, *(uncounted or ())))
