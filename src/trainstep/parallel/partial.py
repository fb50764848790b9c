"""Tensors that stand for a whole of which this rank has a part, and refuse what would be computed from the part alone.

Where parameters or gradients are divided, code that does not know it (a norm in a regulariser, torch's clipping, an
average by hand) computes with what the rank has, without an error and differently on every rank. These tensors go
through `__torch_function__` before anything is computed:

`StandIn`
    has a shape and a dtype and no elements. What its owner does with a use is up to the owner: fill in the whole, or
    raise.
`RankGradient`, `RankValues`
    have this rank's rows of a gradient, or of a parameter's values. Elementwise functions are those of the whole, row
    by row, and run; everything else raises. An optimizer never sees them: before a step the rows of gradients are put
    in their place as plain tensors.

`before_optimizer_steps` lets a wrapper look at an optimizer before it steps: whether it is one that may be given parts,
and whether gradients are complete.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Mapping
from itertools import chain
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakTensorKeyDictionary

from trainstep.base.errors import UsageError

ELEMENTWISE = frozenset(
    getattr(torch.optim, name)
    for name in ["SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adadelta", "Adagrad", "ASGD", "RMSprop", "Rprop"]
)
"""Optimizers that treat each element alone, so that parts can be updated. What a subclass changes is not known."""

_PROPERTIES = (
    *(
        "shape",
        "dtype",
        "device",
        "layout",
        "requires_grad",
        "is_leaf",
        "ndim",
        "names",
        "grad_fn",
        "_version",
        "nbytes",
    ),
    *("is_cuda", "is_cpu", "is_meta", "is_sparse", "is_quantized", "is_mkldnn", "itemsize", "_base", "output_nr"),
    *("is_mps", "is_xpu", "is_nested", "is_sparse_csr", "retains_grad", "_backward_hooks", "is_ipu", "is_maia"),
)
_METHODS = (
    *("size", "dim", "ndimension", "numel", "nelement", "element_size", "stride", "storage_offset", "get_device"),
    *("is_contiguous", "is_floating_point", "is_complex", "is_signed", "is_inference", "__len__"),
    *("__hash__", "type", "is_same_size", "is_shared"),
)
_FUNCTIONS = ("is_floating_point", "is_complex", "numel", "is_same_size", "is_signed", "result_type", "promote_types")
METADATA = frozenset(
    [
        *(getattr(Tensor, name).__get__ for name in _PROPERTIES if hasattr(Tensor, name)),
        *(getattr(Tensor, name) for name in _METHODS if hasattr(Tensor, name)),
        *(getattr(torch, name) for name in _FUNCTIONS if hasattr(torch, name)),
    ]
)
"""What says or sets something of a tensor and reads none of its elements."""


class StandIn(Tensor):
    """A tensor of a shape and a dtype without elements; a subclass says in `use` what comes of computing with it."""

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


class RankRows(Tensor):
    """This rank's rows of what is divided among ranks. A subclass says of what, and what to do instead.

    Attributes:
        plain: the rows as a plain tensor, sharing memory.
    """

    plain: Tensor
    _what: ClassVar[str]
    _instead: ClassVar[str]

    @classmethod
    def mark(cls, rows: Tensor) -> Any:
        marked = rows.as_subclass(cls)
        marked.plain = rows
        return marked

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.plain.__reduce_ex__(protocol)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = name_of(func)
        if not cls._is_served(func, name):
            raise UsageError(
                f"{name} of a sharded parameter's {cls._what}: a rank has only its rows of it, so the result "
                f"would be another one on every rank. {cls._instead}; for this rank's rows as they are, "
                f"{cls._what}.as_subclass(torch.Tensor)"
            )
        with torch._C.DisableTorchFunctionSubclass():
            result = cls._called(func, name, args, kwargs or {})
        return _marked(result, cls) if func not in METADATA else result

    @classmethod
    def _is_served(cls, func: Callable[..., Any], name: str) -> bool:
        return _is_local(func)

    @classmethod
    def _called(cls, func: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return func(*args, **kwargs)


class RankValues(RankRows):
    """This rank's rows of a parameter's values, as `data` of it has them."""

    _what = "data"
    _instead = "Take the whole from gather_full_parameters() of FullyShardedDataParallel"


class RankGradient(RankRows):
    """This rank's rows of a gradient. `for_wrapper` makes the class that one wrapper's gradients have."""

    _what = "gradient"
    _instead = "Clip with clip_grad_norm_ of FullyShardedDataParallel, which takes the norm over all ranks"
    _group: dist.ProcessGroup
    _is_complete: Callable[[], bool]

    @classmethod
    def for_wrapper(cls, group: dist.ProcessGroup, is_complete: Callable[[], bool]) -> type[RankGradient]:
        """`is_complete`: whether all gradients are there, so that they may be changed."""
        return type(cls.__name__, (cls,), {"_group": group, "_is_complete": staticmethod(is_complete)})

    @classmethod
    def _is_served(cls, func: Callable[..., Any], name: str) -> bool:
        return name == _OVERFLOW_CHECK or super()._is_served(func, name)

    @classmethod
    def _called(cls, func: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if changes(name) and name != "requires_grad_" and not cls._is_complete():
            raise UsageError(
                f"{name} on a gradient before finish_gradient_synchronization(): other gradients are still "
                "on their way and would be left out; call it first"
            )
        result = super()._called(func, name, args, kwargs)
        if name == _OVERFLOW_CHECK:  # one rank's rows may overflow alone: then no rank may step
            dist.all_reduce(args[1], op=dist.ReduceOp.MAX, group=cls._group)
        return result


_OVERFLOW_CHECK = "_amp_foreach_non_finite_check_and_unscale_"


_checks: weakref.WeakKeyDictionary[Any, Callable[[Any, torch.optim.Optimizer], None]] = weakref.WeakKeyDictionary()


def before_optimizer_steps(owner: Any, check: Callable[[Any, torch.optim.Optimizer], None]) -> None:
    """Call `check(owner, optimizer)` before every step of every optimizer, as long as `owner` lives.

    Torch is given one hook, for good: Python may collect an owner while torch walks over its hooks.
    """
    _watch_optimizers()
    _checks[owner] = check


@functools.cache
def _watch_optimizers() -> None:
    register_optimizer_step_pre_hook(_run_checks)


def _run_checks(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    for owner, check in list(_checks.items()):
        check(owner, optimizer)


class Known:
    """Which optimizers have any of some parameters; looked up once per optimizer and number of parameter groups.

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
    """Whether the optimizer treats each element alone: one of torch's that does, or one that says `is_elementwise`."""
    kind = optimizer if isinstance(optimizer, type) else type(optimizer)
    return kind in ELEMENTWISE or bool(getattr(optimizer, "is_elementwise", False))


_LOCAL = frozenset(
    [
        "detach",
        "detach_",
        "clone",
        "contiguous",
        "copy_",
        "zero_",
        "fill_",
        "_foreach_zero_",
        "_foreach_copy_",
        "cpu",
        "cuda",
        "to",
        "type",
        "float",
        "double",
        "half",
        "bfloat16",
        "view",
        "reshape",
        "flatten",
        "ravel",
        "view_as",
        "t",
        "squeeze",
        "unsqueeze",
        "view_as_real",
        "register_hook",
        "zeros_like",
        "ones_like",
        "empty_like",
        "new_zeros",
        "new_ones",
        "new_empty",
        "untyped_storage",
        "data_ptr",
        "record_stream",
        "as_subclass",
        "__deepcopy__",
        "__reduce_ex__",
        "requires_grad",
        "requires_grad_",
    ]
)
"""Besides arithmetic, what mixes no elements."""


@functools.cache
def _is_local(func: Callable[..., Any]) -> bool:
    """Whether each element of the result depends on the elements in its own place."""
    if func in METADATA:
        return True
    name = name_of(func)
    if name in _LOCAL or (func.__name__ == "__get__" and name in ("data", "grad")):
        return True
    name = _OPERATORS.get(name, name).removeprefix("_foreach_").rstrip("_")
    packet = getattr(torch.ops.aten, name, None)
    if packet is None or name in ("max", "min"):  # elementwise of two tensors, and of one a reduction
        return False
    return any(torch.Tag.pointwise in getattr(packet, overload).tags for overload in packet.overloads())


_OPERATORS = {f"__{start}{sign}__": sign for sign in ("add", "sub", "mul", "pow") for start in ("", "r", "i")}
_OPERATORS |= {f"__{start}{sign}__": "div" for sign in ("truediv", "div") for start in ("", "r", "i")}
_OPERATORS |= {"__and__": "bitwise_and", "__or__": "bitwise_or", "__xor__": "bitwise_xor", "__invert__": "bitwise_not"}


def changes(name: str) -> bool:
    """Whether a function of this name writes into a tensor it is given."""
    if name.startswith("__"):
        return name == "__setitem__" or (name.startswith("__i") and name not in ("__invert__", "__index__", "__int__"))
    return name.endswith("_")


def name_of(func: Callable[..., Any]) -> str:
    """`norm`, `__add__`; of what gets or sets an attribute, the attribute's name."""
    name = getattr(func, "__name__", str(func))
    return getattr(getattr(func, "__self__", None), "__name__", name) if name in ("__get__", "__set__") else name


def _marked(result: Any, cls: type[RankRows]) -> Any:
    if isinstance(result, RankRows):
        return result
    if isinstance(result, Tensor):
        return cls.mark(result)
    if isinstance(result, (list, tuple)) and any(isinstance(each, Tensor) for each in result):
        return [_marked(each, cls) for each in result]
    return result
