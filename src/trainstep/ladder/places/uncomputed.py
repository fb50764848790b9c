"""Results that stand for calls which a script has made and nobody has computed yet: what changes that find their places
as the script runs have in common.

Such a tensor is known by its shape, dtype and device. What is done with it is either taken note of, which makes a
further one, or computes it by the script's own calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.forward_ad import unpack_dual

SELF = object()
"""Among the arguments of a call that was taken note of: the result of the call before."""
Call = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]
"""Function, positional arguments, named ones."""
_CASTS = {"float": torch.float32, "half": torch.float16, "bfloat16": torch.bfloat16, "double": torch.float64}
CASTS = ("to", "type_as", *_CASTS)
"""Names of functions that `cast_to` knows."""
KNOWN = {getattr(Tensor, name).__get__ for name in ("shape", "dtype", "device", "ndim", "layout", "is_cuda")} | {
    *(Tensor.size, Tensor.dim, Tensor.numel, Tensor.__len__, Tensor.is_floating_point)
}
"""Functions whose answer is known of what is not computed."""


class Uncomputed(Tensor):
    """A result that is not computed yet."""

    def as_written(self) -> Tensor:
        """Compute its values by the script's own calls."""
        raise NotImplementedError


def known(func: Any, args: Any, kwargs: Any) -> Any:
    """Answer of one of `KNOWN`."""
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **kwargs)


def as_written(values: Any) -> Any:
    """With every tensor that is not computed replaced, in lists, tuples and dictionaries too."""
    if isinstance(values, Uncomputed):
        return values.as_written()
    if isinstance(values, dict):
        return {name: as_written(each) for name, each in values.items()}
    if type(values) in (list, tuple):
        return type(values)(map(as_written, values))
    return values


def after(value: Any, calls: tuple[Call, ...]) -> Any:
    """The result of further calls."""
    for func, args, kwargs in calls:
        value = func(*(value if each is SELF else each for each in args), **kwargs)
    return value


def is_transformed(*tensors: Tensor) -> bool:
    """True if any is of torch.func's transforms, or has a tangent (forward-mode AD): nodes with a backward alone do not
    know what to do with these."""
    return any(
        torch._C._functorch.is_functorch_wrapped_tensor(each) or unpack_dual(each).tangent is not None
        for each in tensors
    )


class State(NamedTuple):
    """State that a call's result depends on besides its arguments."""

    device: str
    has_grad: bool
    has_autocast: bool
    narrow: torch.dtype  # autocast's

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Calls are made in it."""
        with torch.set_grad_enabled(self.has_grad), torch.autocast(self.device, self.narrow, enabled=self.has_autocast):
            yield


def state_of(device: torch.device) -> State:
    """State for a call that is made now."""
    kind = device.type
    return State(kind, torch.is_grad_enabled(), torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))


class Dtypes:
    """The dtypes of calls' results, found by the same calls on single numbers."""

    def __init__(self) -> None:
        self._known: dict[tuple[Any, ...], torch.dtype | None] = {}

    def of(self, func: Any, args: Any, kwargs: dict[str, Any]) -> torch.dtype | None:
        """None where the call fails: the script's own will say what is wrong."""
        device = next(each.device for each in args if isinstance(each, Tensor))
        words = [(each.dtype, each.dim()) if isinstance(each, Tensor) else repr(each) for each in args]
        key = (func, *words, repr(kwargs), device, state_of(device))
        if key not in self._known:
            tiny = [
                torch.zeros((1,) * each.dim(), dtype=each.dtype, device=each.device)
                if isinstance(each, Tensor)
                else each
                for each in args
            ]
            try:
                with torch.no_grad():
                    self._known[key] = func(*tiny, **kwargs).dtype
            except (RuntimeError, TypeError):
                self._known[key] = None
        return self._known[key]


def cast_to(name: str, args: Any, kwargs: dict[str, Any]) -> torch.dtype | None:
    """The floating dtype that a cast is to; None where it is another call."""
    if name in _CASTS:
        return _CASTS[name] if len(args) == 1 and not kwargs else None
    given = [*args[1:], *kwargs.values()]
    if len(given) != 1 or (kwargs and "dtype" not in kwargs):
        return None
    dtype = given[0]
    if isinstance(dtype, Tensor):
        dtype = dtype.dtype if dtype.device == args[0].device else None
    return dtype if isinstance(dtype, torch.dtype) and dtype.is_floating_point else None
