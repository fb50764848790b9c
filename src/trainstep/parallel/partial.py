"""Tensors that stand for a whole of which this rank has a part, and refuse what would be computed from the part alone.

Where parameters or gradients are divided, code that does not know it (a norm in a regulariser, torch's clipping, an
average by hand) computes with what the rank has, without an error and differently on every rank. These tensors go
through `__torch_function__` before anything is computed:

A `StandIn` has a shape and a dtype and no elements. Its owner decides what a use does: fill in the whole, compute with
this rank's part (`fsdp.rows`), or raise.

`before_optimizer_steps` lets a wrapper look at an optimizer before it steps: whether it is one that may be given parts,
and whether gradients are complete. An optimizer steps on plain tensors: a stand-in among its parameters is exchanged
for this rank's part while the step runs, and so is the key of its state.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.weak import WeakTensorKeyDictionary

ELEMENTWISE = frozenset(
    getattr(torch.optim, name)
    for name in ["SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adadelta", "Adagrad", "ASGD", "RMSprop", "Rprop"]
)
"""Optimizers that treat each element alone, so that parts can be updated. What a subclass changes is not known."""

_PROPERTIES = (
    *("shape", "dtype", "device", "layout", "requires_grad", "is_leaf", "ndim", "names", "grad_fn", "_version"),
    *("nbytes", "is_cuda", "is_cpu", "is_meta", "is_sparse", "is_quantized", "is_mkldnn", "itemsize", "_base"),
    *("output_nr", "is_mps", "is_xpu", "is_nested", "is_sparse_csr", "retains_grad", "_backward_hooks", "is_ipu"),
    "is_maia",
)
_METHODS = (
    *("size", "dim", "ndimension", "numel", "nelement", "element_size", "stride", "storage_offset", "get_device"),
    *("is_contiguous", "is_floating_point", "is_complex", "is_signed", "is_inference", "__len__"),
    *("__hash__", "is_same_size", "is_shared"),
)
_FUNCTIONS = (
    *("is_floating_point", "is_complex", "numel", "is_same_size", "is_signed", "result_type", "promote_types"),
    "_has_compatible_shallow_copy_type",
)
METADATA = frozenset(
    [
        *(getattr(Tensor, name).__get__ for name in _PROPERTIES if hasattr(Tensor, name)),
        *(getattr(Tensor, name) for name in _METHODS if hasattr(Tensor, name)),
        *(getattr(torch, name) for name in _FUNCTIONS if hasattr(torch, name)),
    ]
)
"""Functions that say or set something of a tensor and read none of its elements."""


class StandIn(Tensor):
    """A tensor of a shape and a dtype without elements; a subclass says in `use` what comes of computing with it.

    Attributes:
        updated: what an optimizer updates in its place, if it stands for a parameter.
    """

    updated: Tensor | None = None

    @classmethod
    def like(cls, tensor: Tensor) -> Any:
        return Tensor._make_wrapper_subclass(
            cls,
            tensor.shape,
            strides=tensor.stride(),
            dtype=tensor.dtype,
            device=tensor.device,
            requires_grad=tensor.requires_grad,
        )

    @classmethod
    def use(cls, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        raise NotImplementedError

    @classmethod
    @torch.compiler.disable  # type: ignore[untyped-decorator] # what its owner does is not for a graph
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        return cls.use(func, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return cls.use(func, args, kwargs or {})

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"{type(self).__name__}({tuple(self.shape)}, {self.dtype})"


_checks: weakref.WeakKeyDictionary[Any, Callable[[Any, torch.optim.Optimizer], None]] = weakref.WeakKeyDictionary()


def before_optimizer_steps(owner: Any, check: Callable[[Any, torch.optim.Optimizer], None]) -> None:
    """Call `check(owner, optimizer)` before every step of every optimizer, as long as `owner` lives.

    Torch is given one hook, for good: Python may collect an owner while torch walks over its hooks.
    """
    _watch_optimizers()
    _checks[owner] = check


@functools.cache
def _watch_optimizers() -> None:
    register_optimizer_step_pre_hook(_before_step)
    register_optimizer_step_post_hook(_after_step)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    _put_updated(optimizer)
    _run_checks(optimizer)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _after_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    try:
        if any(each is not None for each in (*args[1:], kwargs.get("closure"))):  # its gradients came in the step
            _run_checks(optimizer)
    finally:
        _put_back(optimizer)


def _run_checks(optimizer: torch.optim.Optimizer) -> None:
    try:
        for owner, check in list(_checks.items()):
            check(owner, optimizer)
    except BaseException:
        _put_back(optimizer)
        raise


@contextmanager
def updated_in(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Give the optimizer what it updates in the place of stand-ins."""
    _put_updated(optimizer)
    try:
        yield
    finally:
        _put_back(optimizer)


_put: weakref.WeakKeyDictionary[torch.optim.Optimizer, list[tuple[Tensor, Tensor]]] = weakref.WeakKeyDictionary()
"""The stand-ins that an optimizer is to get back, each with what is updated in its place; empty between steps."""


def _put_updated(optimizer: torch.optim.Optimizer) -> None:
    _put_back(optimizer)  # after a step that raised
    members = chain.from_iterable(group["params"] for group in optimizer.param_groups)
    if put := [(each, own) for each in members if (own := getattr(each, "updated", None)) is not None]:
        if optimizer not in _put:  # its state may have begun as the parameters are, as that of Adagrad does
            for state in (optimizer.state[each] for each, _ in put if each in optimizer.state):
                state.update({key: getattr(value, "plain", value) for key, value in state.items()})
        _put[optimizer] = put
        _exchange(optimizer, {id(each): own for each, own in put})


def _put_back(optimizer: torch.optim.Optimizer) -> None:
    if put := _put.get(optimizer):
        _put[optimizer] = []
        _exchange(optimizer, {id(own): each for each, own in put})


def _exchange(optimizer: torch.optim.Optimizer, other: Mapping[int, Tensor]) -> None:
    """Put other tensors in the place of those of these identities, with their state."""
    for group in optimizer.param_groups:
        group["params"] = [other.get(id(each), each) for each in group["params"]]
    state = {other.get(id(each), each): own for each, own in optimizer.state.items()}
    optimizer.state.clear()
    optimizer.state.update(state)


class Known:
    """Optimizers that have any of some parameters; looked up once per optimizer and number of parameter groups.

    Neither the parameters nor the optimizers are kept alive.
    """

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        self._names: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        for name, parameter in parameters.items():
            self._names[parameter] = name
        self._seen: weakref.WeakKeyDictionary[torch.optim.Optimizer, tuple[int, str | None]] = (
            weakref.WeakKeyDictionary()
        )

    def first_in(self, optimizer: torch.optim.Optimizer) -> str | None:
        """The name of the first one that the optimizer has, or None."""
        seen = self._seen.get(optimizer)
        if seen is None or seen[0] != len(optimizer.param_groups):
            members = chain.from_iterable(group["params"] for group in optimizer.param_groups)
            name = next((self._names[each] for each in members if each in self._names), None)
            seen = self._seen[optimizer] = (len(optimizer.param_groups), name)
        return seen[1]


def is_elementwise(optimizer: torch.optim.Optimizer | type[torch.optim.Optimizer]) -> bool:
    """True if the optimizer treats each element alone: one of torch's that does, or one that says `is_elementwise`."""
    kind = optimizer if isinstance(optimizer, type) else type(optimizer)
    return kind in ELEMENTWISE or bool(getattr(optimizer, "is_elementwise", False))


def changes(name: str) -> bool:
    """True if a function of this name writes into a tensor it is given."""
    if name.startswith("__"):
        return name == "__setitem__" or (name.startswith("__i") and name not in ("__invert__", "__index__", "__int__"))
    return name.endswith("_")


def name_of(func: Callable[..., Any]) -> str:
    """`norm`, `__add__`; of what gets or sets an attribute, the attribute's name."""
    name = str(getattr(func, "_opname", getattr(func, "__name__", func)))
    return getattr(getattr(func, "__self__", None), "__name__", name) if name in ("__get__", "__set__") else name
