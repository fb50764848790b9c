"""The border: the closed list of torch's entry points by which a script is observed, and how one is.

**The rule.** The observer leaves no trace. In a script's process `trainstep run` uses only the entries below. No hook
sits on a module, no function or dispatch mode is entered, no stance is set, no other class or function is changed, and
no frame of ours is on the stack while the script's or torch's code runs.

| entry | where |
|---|---|
| optimizer steps | torch's global hooks before and after `Optimizer.step`; a closure that is a function |
| backward, `torch.autograd.grad` | `torch.autograd._engine_run_backward`, which both look up at the call |
| batches | `DataLoader.__iter__`, `_BaseDataLoaderIter.__next__` and `_next_index` |
| reads by the host | `READS` of `torch.Tensor`; on a CPU only counted after the first ones of a line |
| waits for a GPU | `torch._C._cuda_synchronize`, `torch.cuda.Event.synchronize`, `torch.cuda.Stream.synchronize` |
| waits for other ranks | a hook on the node at which backward begins, removed when it ends |
| compilations | dynamo's list of callbacks at the start of one |
| settings | torch's getters and DistributedDataParallel's account, asked at each backward pass (`habits`) |
| memory | the system's count of the process, from a file that is open throughout, and torch's of a GPU |
| forks | `os.register_at_fork`: a child observes nothing, and the worker of a loader counts its own lines |
| lines under way | a thread without a frame reads `sys._current_frames()`; none while a process forks (`sampling`) |
| models | `__call__` of the class of each outermost model (`modules`), which is no building block of torch's |

An `Entry` stands in a class in an attribute's place. Looked up on the class it gives the original. Looked up on an
object it notes that a call begins and returns the original, bound as Python binds it. The interpreter calls that and
drops it, which a weak reference notices: the call has ended. So what is noted comes before and after the call, never
around it. The note of the end is made in C: Python code there would run the handler of a signal that is pending, and
the exception of that handler, such as KeyboardInterrupt, would be lost.
"""

from __future__ import annotations

import functools
import itertools
import operator
import pkgutil
import signal
import sys
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import CodeType, FrameType, MethodType
from typing import Any

READS = ("item", "tolist", "cpu", "numpy", "nonzero", "__bool__", "__int__", "__float__", "__index__", "__repr__")
"""Methods of tensors that wait until the device has computed what the host reads."""

Begun = tuple[Callable[[float], object], Iterable[Iterator[Any]]] | None
"""Called with the host's clock at the end of a call; iterators in C, of each of which one item is taken there, as an
event is recorded. None where the end does not matter."""
Begins = Callable[[Any, FrameType], Begun]
"""Called with an object and the frame that calls a method of it, when that call begins."""
NOTHING: Any = object()
PROBED = 200
"""Calls by which it is measured what counting one takes."""
_CLOCK = iter(time.perf_counter, None)  # taking an item of it reads the clock in C


@dataclass(slots=True)
class Site:
    """A place in code that calls a method so often that further calls are only counted."""

    line: int  # its number
    code: CodeType  # kept, so that no other code gets its address
    timed: int = 0  # calls that were timed
    ms: float = 0.0  # of those
    calls: int = 0  # that were counted since the last look


class Border:
    """Entries that are installed together.

    Where a call of ours raises, the observation ends: `on_failure` is called with the exception, once. The script goes
    on.

    Args:
        is_immediate: whether ends are told at once. That takes a frame of ours around each call. Otherwise they are
            told when something else begins.
    """

    def __init__(self, on_failure: Callable[[Exception], object], *, is_immediate: bool = False) -> None:
        self._on_failure, self.is_immediate = on_failure, is_immediate
        self._put: list[tuple[Any, str, Any, Any]] = []  # owner, name, what stands there, and what stood there
        self._numbers = itertools.count()
        self._open: dict[int, tuple[weakref.ref[Any], Callable[[float], object]]] = {}  # calls under way
        self._ended: deque[tuple[Any, ...]] = deque()  # the number and end of calls that have ended since
        self.is_off = False
        self.counted: dict[tuple[int, int], Site] = {}  # address of code and place in it → a site of counted calls
        self.spent_s = 0.0
        """Seconds of our own so far."""

    def method(self, owner: type, name: str, begins: Begins, has: Callable[[Any, Any], object] | None = None) -> None:
        """Observe a method of a class.

        Args:
            has: called with the object and the result; for a method without arguments.
        """
        self.put(owner, name, Entry(self, owner, name, begins, has))

    def function(self, modules: Sequence[Any], name: str, begins: Begins) -> None:
        """Observe a function where the code of modules looks it up; `begins` is called with the function itself."""
        entry = Function(self, getattr(modules[0], name), begins, f"{modules[0].__name__}:{name}")
        for module in modules:
            self.put(module, name, entry)

    def put(self, owner: Any, name: str, entry: Any) -> None:
        """Set an attribute until `remove`."""
        self._put.append((owner, name, entry, vars(owner).get(name, NOTHING)))
        _set(owner, name, entry)

    def remove(self) -> None:
        """Take back each entry that is still in place."""
        self.is_off = True
        self.counted.clear()
        for owner, name, entry, own in reversed(self._put):
            if vars(owner).get(name) is entry:  # and no patch of the script's
                _set(owner, name, own)
        self._put.clear()
        self._open.clear()

    @functools.cached_property
    def count_s(self) -> float:
        """Seconds that counting a call takes, measured once."""

        class Probe:
            def seen(self) -> None: ...

            def unseen(self) -> None: ...

        places = list[tuple[int, int]]()

        def begins(_: Any, frame: FrameType) -> None:
            places.append((id(frame.f_code), frame.f_lasti))
            self.counted[places[0]] = Site(-1, frame.f_code)

        self.method(Probe, "seen", begins)
        probe, clock = Probe(), time.perf_counter
        start = clock()
        for _ in range(PROBED):
            probe.unseen  # noqa: B018
        middle = clock()
        for _ in range(PROBED):
            probe.seen  # noqa: B018
        took_s = clock() - middle - (middle - start)
        self.counted.pop(places[0], None) if places else None
        return max(0.0, took_s / PROBED)

    def drain(self) -> None:
        """Tell of the calls that have ended since the last time."""
        while self._ended:
            number, at_s, *_ = self._ended.popleft()
            if number in self._open:
                self._open.pop(number)[1](at_s)

    def guard(self, work: Callable[..., Any], *arguments: Any) -> Any:
        """Do something of ours beside the script's code, where it may not raise; its result, None after a failure."""
        if self.is_off:
            return None
        start = time.perf_counter()
        try:
            self.drain()
            return work(*arguments)
        except Exception as error:
            if _is_of_handler(error):
                raise
            self.is_off = True
            self._fail(error)
            return None
        finally:
            self.spent_s += time.perf_counter() - start

    def _fail(self, error: Exception) -> None:
        try:
            self._on_failure(error)
        except Exception:
            return  # the log is gone too

    def told_at_end(self, bound: Any, begun: Begun, *, is_slot: bool = True) -> Any:
        """Return a callable for the place of a bound method or function, so that its end is told."""
        if begun is None:
            return bound
        if self.is_immediate:
            return _around(bound, functools.partial(self.guard, _end, begun))
        call = held = bound
        if isinstance(bound, MethodType) and not is_slot:
            # The interpreter drops such a method before it calls the function, so the function is held.
            held = functools.update_wrapper(functools.partial(bound.__func__), bound.__func__)
            call = MethodType(held, bound.__self__)
        ended, recorded = begun
        number = next(self._numbers)
        note = functools.partial(next, map(self._ended.append, zip((number,), _CLOCK, *recorded, strict=False)))
        self._open[number] = weakref.ref(held, note), ended
        return call


class Entry:
    """Attribute of a class, in whose place it stands: see the rule above."""

    def __init__(
        self, border: Border, owner: type, name: str, begins: Begins, has: Callable[[Any, Any], object] | None = None
    ) -> None:
        self._border, self._owner, self._name, self._begins, self._has = border, owner, name, begins, has
        self._is_slot = name.startswith("__")
        self.own = vars(owner).get(name, NOTHING)

    def __get__(self, of: Any, kind: type | None = None) -> Any:
        if self.own is NOTHING:  # inherited, as it is there by now
            bound = getattr(super(self._owner, kind if of is None else of), self._name)
        else:
            bound = self.own.__get__(of, kind)
        if of is None or self._border.is_off:
            return bound
        frame = sys._getframe(1)
        if (site := self._border.counted.get((id(frame.f_code), frame.f_lasti))) is not None:
            site.calls += 1
            return bound
        # Code that looks the attribute up by its name does not call the object.
        if self._name == "__call__" and self._name in frame.f_code.co_names + frame.f_code.co_consts:
            return bound  # `kept = model.__call__`, which is called later or never
        noted = self._border.guard(self._noted, of, bound, frame)
        return bound if noted is None else noted

    def _noted(self, of: Any, bound: Any, frame: FrameType) -> Any:
        begun = self._begins(of, frame)
        if self._has is not None:
            has = functools.partial(self._border.guard, self._has, of)
            bound = functools.partial(next, map(_passed(has), iter(bound, _NEVER)))
        return self._border.told_at_end(bound, begun, is_slot=self._is_slot)

    def __reduce__(self) -> Any:
        """Copied or pickled with its class, it is the original."""
        return operator.getitem, ([self.__get__(None, self._owner)], 0)


def _is_of_handler(error: Exception) -> bool:
    """True if a signal's handler of the script's raised it: a signal may arrive while code of ours runs."""
    handlers = [signal.getsignal(number) for number in signal.valid_signals()]
    codes = {getattr(getattr(each, "__func__", each), "__code__", None) for each in handlers} - {None}
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code not in codes:
        trace = trace.tb_next
    return trace is not None


class Function:
    """A function, in whose place it stands: what is called is the original, bound to nothing."""

    def __init__(self, border: Border, original: Callable[..., Any], begins: Begins, place: str = "") -> None:
        functools.update_wrapper(self, original)
        self.own, self._parts = original, (border, begins, place)

    @property
    def __call__(self) -> Any:
        border, begins, _ = self._parts
        call, frame = functools.partial(self.own), sys._getframe(1)
        noted = border.guard(lambda: border.told_at_end(call, begins(self.own, frame)))
        return call if noted is None else noted

    def __reduce__(self) -> Any:
        """Pickled it is its name, as functions are; one without a place is the original."""
        place = self._parts[2]
        return (pkgutil.resolve_name, (place,)) if place else (operator.getitem, ([self.own], 0))


def _set(owner: Any, name: str, value: Any) -> None:
    """Set an attribute of a class or a module, or delete it, without a call of a metaclass's code."""
    change, given = ("__delattr__", (name,)) if value is NOTHING else ("__setattr__", (name, value))
    try:
        getattr(type if isinstance(owner, type) else object, change)(owner, *given)
    except TypeError:  # a metaclass in C++, as of torch's bindings, has its own
        getattr(type(owner), change)(owner, *given)


class _Never:
    """Equal to nothing: an iterator over a function's results ends at it."""

    def __eq__(self, other: object) -> bool:
        return False

    __hash__ = object.__hash__


_NEVER = _Never()


def _passed(has: Callable[[Any], object]) -> Callable[[Any], Any]:
    """A function that shows a result to another one, and returns it."""

    def passed(result: Any) -> Any:
        has(result)
        return result

    return passed


def _end(begun: tuple[Callable[[float], object], Iterable[Iterator[Any]]]) -> None:
    ended, recorded = begun
    at_s = time.perf_counter()
    for each in recorded:
        next(each)
    ended(at_s)


def _around(bound: Callable[..., Any], end: Callable[[], object]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return bound(*args, **kwargs)
        finally:
            end()

    return call


def left_uncompiled(function: Any, *, with_calls: bool = True) -> Any:
    """The function, which torch.compile passes by, with the functions that it calls.

    Where code that is compiled calls it, the graph breaks there, as it does around each optimizer's step anyway.
    """
    from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy

    inner = _FrameAction.SKIP if with_calls else _FrameAction.DEFAULT
    set_code_exec_strategy(function.__code__, _FrameExecStrategy(_FrameAction.SKIP, inner))
    function._torchdynamo_disable = True
    return function


def leave_uncompiled() -> None:
    """Have torch.compile pass by all of ours that code which it compiled comes to."""
    for each in (Entry.__get__, Function.__call__.fget, _passed(repr), _Never.__eq__):  # type: ignore[attr-defined]
        left_uncompiled(each)
    left_uncompiled(_around(repr, dict), with_calls=False)
