"""`loss.item()` of a GPU without waiting: a number that is read once somebody needs it.

`item()` returns a `Later`, whose value is on its way to pinned memory. Sums, means and other arithmetic of it are
`Later` too. Whatever needs the number itself (a comparison, a format, `float`, a place in a tensor or an array) waits
for it then, so a script computes what it computed before. It is a `numbers.Real`; code that asks whether it is a
`float`, as `statistics`, `decimal` and methods of tensors such as `fill_` do, refuses it. `print` of a `Later` prints
when the number is there, in the order of all that is printed. What cannot be put off from outside stays: a number that
is formatted at once, `print` of a tensor, `float(loss)`, `if loss > 3`, `.cpu()`.
"""

from __future__ import annotations

import atexit
import builtins
import functools
import json
import math
import numbers
import operator
import os
import sys
from collections import deque
from collections.abc import Callable
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor
from torch.jit import _builtins
from torch.utils import _device
from torch.utils._pytree import tree_leaves, tree_map

from trainstep.observe.lines import line_of_call, owner_of

Note = Callable[[str, str], object]
DEEPEST = 100
"""Results of results that are not there yet; beyond that they are waited for."""
LATE, AT_ONCE = "read late", "still waited for at "


class Reading:
    """A number on its way from a GPU to the host."""

    def __init__(self, tensor: Tensor) -> None:
        with torch.no_grad():
            self._host = torch.empty((), dtype=tensor.dtype, pin_memory=True)
            self._host.copy_(tensor.detach().reshape(()), non_blocking=True)
        self._event = torch.cuda.Event()
        self._event.record()
        self._number: float | None = None

    def is_done(self) -> bool:
        """True if it has arrived."""
        return self._number is not None or self._event.query()

    def number(self) -> float:
        """Wait for it; a second time, which may be in a forked process without a GPU, it is known."""
        if self._number is None:
            self._event.synchronize()
            self._number = float(self._host)
        return self._number


class Later:
    """A number that is found out when it is needed: one that is read, or a function of such.

    Args:
        function: finds it out.
        operands: its arguments, some of which may be `Later` too.
        readings: what it waits for.
        on_wait: called where somebody needs it before it is there.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        operands: tuple[Any, ...],
        readings: tuple[Any, ...],
        on_wait: Callable[[], object],
    ) -> None:
        self.function, self.operands, self.readings, self.on_wait = function, operands, readings, on_wait
        self.depth: int = 1 + max((each.depth for each in operands if isinstance(each, Later)), default=0)
        self._number: Any = None

    def is_there(self) -> bool:
        """True if nothing need be waited for."""
        return all(each.is_done() for each in self.readings)

    def now(self) -> Any:
        """The number, waited for where that is necessary."""
        operands = self.operands  # before the number, which another thread may find out meanwhile
        if self._number is None:
            if not self.is_there():
                self.on_wait()
            number = self.function(*(each.now() if isinstance(each, Later) else each for each in operands))
            self._number = number
            self.operands = self.readings = ()
        return self._number

    def settle(self) -> None:
        """Find out what of it is there, so that the sum of a whole run does not become a chain as long as the run."""
        self.operands = _settled(self.operands)
        self.readings = tuple(each for each in self.readings if not each.is_done())
        self.depth = 1 + max((each.depth for each in self.operands if isinstance(each, Later)), default=0)

    def __getattr__(self, name: str) -> Any:
        """Attribute that a float has, such as `is_integer`."""
        if not hasattr(float, name):
            raise AttributeError(f"'float' object has no attribute '{name}'")
        return getattr(self.now(), name)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        """Array that numpy makes of it."""
        import numpy

        return numpy.asarray(self.now(), dtype)

    def __array_ufunc__(self, function: Any, method: str, *args: Any, **kwargs: Any) -> Any:
        """Compute with it in numpy, in the dtype that a float gives."""
        return getattr(function, method)(*_known(args), **_known(kwargs))

    def __round__(self, digits: int | None = None) -> Any:
        return round(self.now()) if digits is None else _combined(round, self, digits)

    def __format__(self, how: str) -> str:
        return format(self.now(), how)

    def __divmod__(self, other: Any) -> Any:
        return divmod(self.now(), other)

    def __rdivmod__(self, other: Any) -> Any:
        return divmod(other, self.now())

    def __conform__(self, protocol: object) -> Any:
        """Value that sqlite3 keeps."""
        return self.now()

    def __reduce__(self) -> Any:
        return float, (self.now(),)


def _known(values: Any) -> Any:
    """The same with numbers, waited for, wherever one is in them."""
    return tree_map(lambda each: each.now() if isinstance(each, Later) else each, values)


def _settled(operands: tuple[Any, ...]) -> tuple[Any, ...]:
    """With what is there as numbers."""
    for each in operands:
        if isinstance(each, Later):
            each.settle()
    return tuple(each.now() if isinstance(each, Later) and each.is_there() else each for each in operands)


def _combined(function: Callable[..., Any], *operands: Any) -> Any:
    """A `Later` of operands; the number itself where all are there, or where too many steps are under way."""
    known = _settled(operands)
    waiting = [each for each in known if isinstance(each, Later)]
    if not waiting or max(each.depth for each in waiting) > DEEPEST:
        return function(*(each.now() if isinstance(each, Later) else each for each in known))
    readings = tuple(reading for each in waiting for reading in each.readings)
    return Later(function, known, readings, waiting[0].on_wait)


def _give_operators() -> None:
    """Give it what a float can do."""
    for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow"):
        function = getattr(operator, name)

        def forth(self: Later, other: Any, function: Any = function) -> Any:
            return _combined(function, self, other) if _is_number(other) else function(self.now(), other)

        def back(self: Later, other: Any, function: Any = function) -> Any:
            return _combined(function, other, self) if _is_number(other) else function(other, self.now())

        setattr(Later, f"__{name}__", forth)
        setattr(Later, f"__r{name}__", back)
    for function in (operator.neg, operator.pos, operator.abs):
        setattr(Later, f"__{function.__name__}__", lambda self, function=function: _combined(function, self))
    for name in ("eq", "ne", "lt", "le", "gt", "ge"):
        function = getattr(operator, name)

        def compared(self: Later, other: Any, function: Any = function) -> Any:
            return function(self.now(), other.now() if isinstance(other, Later) else other)

        setattr(Later, f"__{name}__", compared)
    for needed in (float, int, bool, complex, hash, repr, str, math.trunc, math.floor, math.ceil):
        setattr(Later, f"__{needed.__name__}__", lambda self, needed=needed: needed(self.now()))


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float, Later))


_give_operators()
numbers.Real.register(Later)  # as tensorboard and numpy ask


def _taking_later(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap one of torch's functions that go by types, such as `torch.tensor`."""

    @functools.wraps(function)
    def taking(*args: Any, **options: Any) -> Any:
        try:
            return function(*args, **options)
        except (RuntimeError, TypeError) as error:
            if Later.__name__ not in str(error):
                raise
        return function(*_known(args), **_known(options))

    taking.__module__, taking.__qualname__ = "torch", function.__name__  # as it is pickled
    return taking


class LateReads:
    """`Tensor.item` and `print`, from `install` on, and what refuses a `Later` though it takes floats. Before a process
    forks all numbers are waited for.

    Args:
        note: called with each line that reads, and whether it is read late or still waited for, and where.
        is_meant: which tensors are read late.
        reading: begins to read one.
    """

    def __init__(
        self,
        note: Note,
        is_meant: Callable[[Tensor], bool] = lambda tensor: tensor.is_cuda,
        reading: Callable[[Tensor], Any] = Reading,
    ) -> None:
        self._note, self._is_meant, self._reading = note, is_meant, reading
        self._waiting: deque[tuple[tuple[Any, ...], dict[str, Any]]] = deque()  # what is to be printed
        self._print: Callable[..., None] = print
        self._is_noted: dict[str, bool] = {}  # line → whether it is still waited for
        self._begun: WeakSet[Any] = WeakSet()  # readings that somebody may want yet

    def install(self) -> None:
        """Replace them."""
        original = Tensor.item

        def item(tensor: Tensor) -> Any:
            if torch.compiler.is_compiling() or not self._is_late(tensor, sys._getframe(1)):
                return original(tensor)
            line, reading = line_of_call(), self._reading(tensor)
            self._begun.add(reading)
            if line not in self._is_noted:
                self._is_noted[line] = False
                self._note(line, LATE)
            return Later(reading.number, (), (reading,), lambda: self._waited(line))

        put: Any = Tensor.__setitem__

        def __setitem__(tensor: Tensor, place: Any, value: Any) -> None:
            put(tensor, place, value.now() if isinstance(value, Later) else value)

        Tensor.item = item  # type: ignore[assignment,method-assign]
        Tensor.__setitem__ = __setitem__  # type: ignore[assignment,method-assign]
        builtins.print = self._printed
        atexit.register(self.print_all)
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(before=self._before_fork)
        _device._device_constructors()  # which `with torch.device(…)` knows by what they are now
        for name in ("tensor", "as_tensor", "full", "full_like", "where"):
            taking = _taking_later(getattr(torch, name))
            setattr(torch, name, taking)
            _builtins._register_builtin(taking, f"aten::{name}")  # of torch.jit
        save = torch.save

        @functools.wraps(save)
        def saved(obj: object, *args: Any, **options: Any) -> None:
            """A checkpoint of numbers, which `torch.load` gives back with `weights_only` too."""
            has_some = any(isinstance(each, Later) for each in tree_leaves(obj))
            save(_known(obj) if has_some else obj, *args, **options)

        torch.save = saved
        refused: Any = json.JSONEncoder.default

        def default(encoder: json.JSONEncoder, value: Any) -> Any:
            return value.now() if isinstance(value, Later) else refused(encoder, value)

        json.JSONEncoder.default = default  # type: ignore[method-assign,assignment]

    def _before_fork(self) -> None:
        """A worker of a loader can ask no GPU, and would print what waits once more."""
        self.print_all()
        for reading in list(self._begun):
            reading.number()

    def _is_late(self, tensor: Tensor, frame: Any) -> bool:
        is_scripts = owner_of(frame.f_code.co_filename) in ("user", "library")
        return is_scripts and tensor.numel() == 1 and tensor.is_floating_point() and self._is_meant(tensor)

    def _waited(self, line: str) -> None:
        if not self._is_noted[line]:
            self._is_noted[line] = True
            self._note(line, AT_ONCE + line_of_call())

    def _printed(self, *values: Any, **options: Any) -> None:
        to_screen = options.get("file") in (None, sys.stdout)
        is_late = any(isinstance(each, Later) and not each.is_there() for each in values)
        self.print_all(only_there=True)
        if to_screen and (is_late or self._waiting):
            now = tuple(each if isinstance(each, Later) else str(each) for each in values)  # it may be changed later
            self._waiting.append((now, {**options, "file": sys.stdout}))
        else:
            self._print(*values, **options)

    def print_all(self, *, only_there: bool = False) -> None:
        """Print what waits, in its order; with `only_there` up to what is not there yet."""
        while self._waiting:
            values, options = self._waiting[0]
            if only_there and any(isinstance(each, Later) and not each.is_there() for each in values):
                return
            self._waiting.popleft()
            known = [each.now() if isinstance(each, Later) else each for each in values]
            self._print(*known, **options)
