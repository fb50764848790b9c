"""Named ranges around steps, phases, modules and pieces of attention, emitted once for every profiler.

A range is a `record_function`: torch.profiler records it, and under `emit_nvtx` the same range goes to NVTX, so Nsight
Systems sees what torch.profiler sees. Modules are announced by hooks, put on for the time of a profile and taken off
again; outside of it nothing is there to cost anything. Code inside torch.compile is never hooked, which would compile
it anew: a compiled module is announced around the call of its compiled code, as one.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn
from torch.profiler import record_function

RangeKind = Literal["step", "phase", "module", "attention"]
KINDS: tuple[RangeKind, ...] = ("step", "phase", "module", "attention")
ROOT = "(model)"
"""The name of the outermost module, whose own dotted name is empty."""


def announce(kind: RangeKind, name: str) -> AbstractContextManager[Any]:
    """A range that every profiler sees; its name is `kind:name`."""
    return record_function(f"{kind}:{name}")


def parse_range(text: str) -> tuple[RangeKind, str] | None:
    """The kind and the name of a range of ours; None for anybody else's."""
    kind, colon, name = text.partition(":")
    return (kind, name) if colon and name and kind in KINDS else None


def announced_phase(name: str) -> AbstractContextManager[Any]:
    """A `PhaseContext`: the phase as a range."""
    return announce("phase", name)


@contextmanager
def modules_announced(module: nn.Module) -> Iterator[None]:
    """While entered, every call of `module` and of its submodules is a range.

    Recomputation of checkpointed activations is announced too, as it calls modules again. A module that is not called
    but has its `forward` or weights used directly stays silent.
    """
    open_ranges = _OpenRanges()
    undo: list[Callable[[], None]] = []
    try:
        for each in modules_to_announce(module):
            if each.module._compiled_call_impl is None:
                before, after = open_ranges.hooks(each.name)
                first = each.module.register_forward_pre_hook(before, prepend=True)
                last = each.module.register_forward_hook(after, always_call=True)
                undo += [first.remove, last.remove]
            else:
                undo.append(_announce_compiled(each.module, each.name))
        yield
    finally:
        for action in undo:
            action()


@dataclass(frozen=True)
class Announced:
    """A module and the name it is announced under."""

    name: str
    module: nn.Module


def modules_to_announce(module: nn.Module, name: str = "") -> Iterator[Announced]:
    """`module` and its submodules, down to modules that are compiled."""
    seen: set[int] = set()

    def walk(name: str, module: nn.Module) -> Iterator[Announced]:
        if id(module) in seen:
            return
        seen.add(id(module))
        if type(module).forward is not nn.Module.forward or "forward" in vars(module):  # containers are never called
            yield Announced(name or ROOT, module)
        if module._compiled_call_impl is not None or hasattr(module, "_orig_mod"):
            return
        for child_name, child in module.named_children():
            yield from walk(f"{name}.{child_name}" if name else child_name, child)

    return walk(name, module)


class _OpenRanges(threading.local):
    """The ranges open in each thread: backward recomputes in a thread of its own."""

    def __init__(self) -> None:
        self.stack: list[AbstractContextManager[Any]] = []

    def hooks(self, name: str) -> tuple[Callable[..., None], Callable[..., None]]:
        """Hooks that open and close the range of one module."""

        def before(*_: object) -> None:
            opened = announce("module", name)
            opened.__enter__()
            self.stack.append(opened)

        def after(*_: object) -> None:
            self.stack.pop().__exit__(None, None, None)

        return before, after


def _announce_compiled(module: nn.Module, name: str) -> Callable[[], None]:
    compiled = module._compiled_call_impl
    assert compiled is not None, f"{name} is not compiled"

    def inside_range(*args: Any, **kwargs: Any) -> Any:
        with announce("module", name):
            return compiled(*args, **kwargs)

    module._compiled_call_impl = inside_range

    def undo() -> None:
        module._compiled_call_impl = compiled

    return undo


def announced_steps(step: Callable[..., object]) -> Callable[..., object]:
    """`step`, each of its calls a range with a number of its own."""
    numbers = itertools.count()

    def numbered(*args: Any) -> object:
        with announce("step", str(next(numbers))):
            return step(*args)

    return numbered
