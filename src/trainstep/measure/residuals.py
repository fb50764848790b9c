"""What forward keeps for backward (its residuals): bytes by module and by operation, each storage counted once.

Autograd passes every tensor it saves through a pack hook. The one here notes the tensor's storage and the innermost
module that is running. When forward is done, what still lives is what is kept, and a walk over the graph finds which
node, that is which operation, holds it. A small view keeps its whole storage alive, so storages are counted, not views,
each for the first that saved it. Parameters, buffers and the batch are there without backward and count nothing; casts
of parameters (the half-precision weights of autocast) do count, under a name of their own. Selective checkpointing
keeps results without telling autograd: those are not seen here.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from trainstep.measure.memory import storages_of

WEIGHT_CAST = "cast of a parameter"
"""The operation under which casts of parameters are listed."""
CHECKPOINT = "checkpoint"
"""The operation under which inputs of checkpointed segments are listed: no node of the graph holds them."""
_CASTS_AND_VIEWS = ("ToCopyBackward", "TBackward", "TransposeBackward", "ViewBackward", "PermuteBackward")


@dataclass(frozen=True)
class Residual:
    """One storage that is kept for backward."""

    module: str
    """Dotted name of the innermost module that was running; empty for the root, or outside of all modules."""
    operation: str
    """The operation whose backward needs it, as autograd names it, such as `Softmax`."""
    shape: tuple[int, ...]
    """Of the first view of it that was saved."""
    dtype: torch.dtype
    bytes: int
    """Of the whole storage."""


@dataclass(frozen=True)
class Residuals:
    """All that is kept, in the order in which it was saved."""

    kept: tuple[Residual, ...]

    @property
    def bytes(self) -> int:
        """Bytes of all of it."""
        return sum(residual.bytes for residual in self.kept)


class _Packed:
    """What the pack hook hands to autograd in a tensor's stead."""

    def __init__(self, tensor: Tensor, module: str) -> None:
        self.tensor = tensor.detach()  # with its graph, a saved output would keep itself alive in a circle
        self.module = module
        self.casts_parameter = _casts_parameter(tensor)


def residuals(
    forward: Callable[[], Any], module: nn.Module | None = None, resident: Iterable[Tensor] = ()
) -> tuple[Residuals, Any]:
    """Run `forward` and return what its results keep for backward, and the results, still differentiable.

    Args:
        forward: runs the forward pass; what is kept is what the graphs of the tensors it returns hold.
        module: whose submodules are to be named, and whose parameters and buffers are left out. None for compiled
            code, which has no modules left; its parameters then belong into `resident`.
        resident: further tensors that are alive anyway, such as the batch.
    """
    alive = [*resident, *(() if module is None else (*module.parameters(), *module.buffers()))]
    seen = {storage.data_ptr() for tensor in alive for storage in storages_of(tensor)}
    running: list[str] = []
    packed: list[weakref.ref[_Packed]] = []

    def pack(tensor: Tensor) -> _Packed:
        each = _Packed(tensor, running[-1] if running else "")
        packed.append(weakref.ref(each))
        return each

    uncompiled = torch.compiler.disable(pack)  # or a compiled forward would compile it too, for every shape anew
    with (
        torch.autograd.graph.saved_tensors_hooks(uncompiled, lambda each: each.tensor),
        nullcontext() if module is None else module_calls(module, running.append, running.pop),
    ):
        results = forward()
    holders = {id(each): operation_name(node.name()) for node in graph_nodes(results) for each in _packed_by(node)}
    kept = []
    for each in filter(None, (reference() for reference in packed)):
        operation = WEIGHT_CAST if each.casts_parameter else holders.get(id(each), CHECKPOINT)
        for storage in storages_of(each.tensor):
            if storage.data_ptr() not in seen and storage.nbytes() > 0:
                seen.add(storage.data_ptr())
                shape = tuple(each.tensor.shape)
                kept.append(Residual(each.module, operation, shape, each.tensor.dtype, storage.nbytes()))
    return Residuals(tuple(kept)), results


def _packed_by(node: Any) -> Iterator[_Packed]:
    for attribute in dir(node):
        if attribute.startswith("_raw_saved_"):
            value = getattr(node, attribute)
            for saved in value if isinstance(value, (tuple, list)) else (value,):
                if isinstance(saved.data, _Packed):
                    yield saved.data


@contextmanager
def module_calls(module: nn.Module, enter: Callable[[str], object], leave: Callable[[], object]) -> Iterator[None]:
    """While entered, `enter(name)` runs before and `leave()` after every call of `module` and of its submodules."""

    def entering(name: str) -> Callable[..., None]:
        def before(*_: object) -> None:  # what a hook returns would take the place of the arguments
            enter(name)

        return before

    def after(*_: object) -> None:
        leave()

    handles = []
    for name, each in module.named_modules():
        handles.append(each.register_forward_pre_hook(entering(name)))
        handles.append(each.register_forward_hook(after, always_call=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def graph_nodes(results: Any) -> Iterator[Any]:
    """Every node of the autograd graphs behind the tensors in `results`, each once."""
    ahead = [leaf.grad_fn for leaf in tree_leaves(results) if isinstance(leaf, Tensor) and leaf.grad_fn is not None]
    visited = set(ahead)
    while ahead:
        node = ahead.pop()
        yield node
        for following, _ in node.next_functions:
            if following is not None and following not in visited:
                visited.add(following)
                ahead.append(following)


def operation_name(node_name: str) -> str:
    """`SoftmaxBackward0` → `Softmax`, `torch::autograd::CopySlices` → `CopySlices`."""
    name = node_name.rpartition("::")[2].rstrip("0123456789")
    return name.removesuffix("Backward") or name


def _casts_parameter(tensor: Tensor) -> bool:
    """Whether the tensor is a parameter that was only cast or viewed since."""
    node = tensor.grad_fn
    casts = False
    while node is not None and node.name().rstrip("0123456789") in _CASTS_AND_VIEWS:
        casts |= node.name().startswith("ToCopy")
        node = node.next_functions[0][0]
    return casts and isinstance(getattr(node, "variable", None), nn.Parameter)


def residual_stream_bytes(batch: int, context: int, d_model: int, element_bytes: int) -> int:
    """Bytes of one residual stream: batch · context · d_model elements."""
    return batch * context * d_model * element_bytes
