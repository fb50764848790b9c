"""A call run a second time as it ran the first: what it may have read beside its tensors is put back for the while.

Forward is a function of more than its arguments: it reads and leaves things in a key-value cache, in attributes and
buffers of its modules, in random number generators. Running it again then does something else, as where a cache that
is full by now gives attention twice the keys. So what a call can reach is looked at before and after it: the
attributes and buffers of its modules, and all lists, dicts and objects in those and in its arguments. What it changed
is changed back while it runs again, and restored to what it was before that. Tensors are the exception. They are not
copied, buffers aside, so a call that changes one in place cannot be repeated and is refused.

torch itself restores its own random numbers and autocast.
"""

from __future__ import annotations

import random
import sys
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from trainstep.base.errors import UnsupportedError
from trainstep.step.randomness import DRAWING

Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]
_OWN = frozenset(vars(nn.Module())) | {"forward", "_compiled_call_impl"}
"""Attributes that torch gives a module: parameters, hooks and the like, which a forward does not change."""
_HERE = (str(Path(__file__).parents[1]), str(Path(torch.__file__).parent))


class Repeated:
    """One call of some blocks' forward, as `torch.utils.checkpoint` runs it, and runs it again.

    Args:
        blocks: the modules that are run, by name.
        args, kwargs: what they are called with.
        context_fn: contexts to enter inside, as selective checkpointing's.
        note: called with the first block's name when it is run again.
    """

    def __init__(
        self,
        blocks: dict[str, nn.Module],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        context_fn: Callable[[], Contexts] | None,
        note: Callable[[str], object],
    ) -> None:
        self._block = next(iter(blocks))
        self._note = note
        self._inner = context_fn() if context_fn is not None else (nullcontext(), nullcontext())
        self._before: _State | None = _State(blocks, args, kwargs)
        self._changed: list[tuple[Any, Any]] = []
        self._buffers: list[tuple[nn.Module, str, Tensor]] = []
        self._generators: _Generators | None = None

    def contexts(self) -> Contexts:
        """What to enter around the first run, and around another."""
        return self._first(), _Reentrant(self._again)

    @contextmanager
    def _first(self) -> Iterator[None]:
        generators = _Generators()
        with self._inner[0]:
            yield
        assert self._before is not None
        if place := self._before.tensor_changed():
            raise UnsupportedError(
                f"checkpointing: {self._block} changes {place} in place, so it cannot be run again on what it was; let "
                "it work on a copy, or leave checkpointing off"
            )
        self._changed, self._buffers = self._before.changed(), self._before.changed_buffers()
        self._generators = generators if generators.have_moved() else None
        self._before = None  # what is unchanged need not be held

    @contextmanager
    def _again(self) -> Iterator[None]:
        self._note(self._block)
        with ExitStack() as stack:
            for target, contents in self._changed:
                stack.callback(_write, target, _read(target))
                _write(target, contents)
            for module, name, value in self._buffers:
                stack.callback(module._buffers.__setitem__, name, module._buffers[name])
                module._buffers[name] = value.clone()
            if self._generators is not None:
                stack.callback(_Generators().restore)
                self._generators.restore()
            try:
                with self._inner[1]:
                    yield
            except Exception as error:
                if _is_about_something_else(error):
                    raise
                raise unrepeatable(self._block, error) from error


def unrepeatable(block: str, error: Exception) -> UnsupportedError:
    """The error of a block whose forward, run again in backward, did something else."""
    said = " ".join(str(error).split())
    return UnsupportedError(
        f"checkpointing: {block}{_line_of(error)} does not do in backward what it did in forward, so what it computed "
        f"cannot be computed again; leave checkpointing off ({type(error).__name__}: {said[:200]})"
    )


def _is_about_something_else(error: Exception) -> bool:
    """The end of a recomputation, as torch announces it; a lack of memory; an error that is named already."""
    is_memory = isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "allocate memory" in str(error)
    return is_memory or isinstance(error, UnsupportedError) or type(error).__name__ == "_StopRecomputationError"


def _line_of(error: Exception) -> str:
    """` (modeling.py:12)`: the innermost line that is neither torch's nor ours."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not frame.filename.startswith((*_HERE, "<")):
            return f" ({Path(frame.filename).name}:{frame.lineno})"
    return ""


class _Reentrant(AbstractContextManager[None]):
    """A context manager that can be entered anew, as for a second backward."""

    def __init__(self, make: Callable[[], AbstractContextManager[Any]]) -> None:
        self._make = make
        self._entered: list[AbstractContextManager[Any]] = []

    def __enter__(self) -> None:
        self._entered.append(self._make())
        self._entered[-1].__enter__()

    def __exit__(self, *error: Any) -> Any:
        return self._entered.pop().__exit__(*error)


class _Generators:
    """The states of Python's and numpy's random numbers, and of sources of our own."""

    def __init__(self) -> None:
        self._python, self._numpy = random.getstate(), np.random.get_state()
        self._own = [(source, source.random_state()) for source in DRAWING]

    def have_moved(self) -> bool:
        """Whether numbers were drawn since; where sources of our own are, always."""
        if self._own:
            return True
        now = _Generators()
        same_numpy = all(np.array_equal(a, b) for a, b in zip(self._numpy, now._numpy, strict=True))
        return self._python != now._python or not same_numpy

    def restore(self) -> None:
        random.setstate(self._python)
        np.random.set_state(self._numpy)
        for source, state in self._own:
            source.restore_random_state(state)


class _State:
    """What some modules and arguments hold at this moment."""

    def __init__(self, blocks: dict[str, nn.Module], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._held: list[tuple[Any, Any]] = []  # an object and its contents
        self._tensors: list[tuple[str, Tensor, int]] = []
        self._buffers: list[tuple[nn.Module, str, Tensor, int, Tensor]] = []
        self._seen: set[int] = set()
        for place, value in (*enumerate(args), *kwargs.items()):
            self._look(f"its argument {place}", value)
        for block_name, block in blocks.items():
            for name, module in block.named_modules(prefix=block_name):
                self._look_at_module(name, module)

    def changed(self) -> list[tuple[Any, Any]]:
        """The objects that hold something else by now, with what they held."""
        return [(target, before) for target, before in self._held if not _is_same(before, _read(target))]

    def changed_buffers(self) -> list[tuple[nn.Module, str, Tensor]]:
        """The buffers that were written to, with their values before.

        `torch.nn.functional.batch_norm` writes to running statistics without a trace, whosever they are: to vectors.
        """
        return [
            (module, name, value)
            for module, name, buffer, version, value in self._buffers
            if buffer._version != version
            or module._buffers.get(name) is not buffer
            or (buffer.dim() == 1 and buffer.is_floating_point())
        ]

    def tensor_changed(self) -> str:
        """Where a tensor is that was changed in place; empty if there is none."""
        return next((place for place, tensor, version in self._tensors if tensor._version != version), "")

    def _look_at_module(self, name: str, module: nn.Module) -> None:
        attributes = _read(module)
        self._held.append((module, attributes))
        for key, value in attributes.items():
            self._look(f"{name}.{key}", value)
        for key, buffer in module._buffers.items():
            if buffer is not None and not buffer.is_inference():
                self._buffers.append((module, key, buffer, buffer._version, buffer.detach().clone()))

    def _look(self, place: str, value: Any) -> None:
        ahead = [value]
        while ahead:
            each = ahead.pop()
            if id(each) in self._seen:
                continue
            if isinstance(each, Tensor):
                if not isinstance(each, nn.Parameter) and not each.is_inference():
                    self._seen.add(id(each))
                    self._tensors.append((place, each, each._version))
            elif isinstance(each, (tuple, frozenset)):
                ahead += each
            elif _is_container(each):
                self._seen.add(id(each))
                contents = _read(each)
                self._held.append((each, contents))
                ahead += contents.values() if isinstance(contents, dict) else contents


def _is_container(value: Any) -> bool:
    """A collection, or an object of a class of the user's or a library's own; not torch's, nor ours."""
    if isinstance(value, (dict, list, set, deque, SimpleNamespace)):
        return True
    if isinstance(value, (nn.Module, type)) or callable(value) or not hasattr(value, "__dict__"):
        return False
    library = type(value).__module__.partition(".")[0]
    return library not in ("torch", "trainstep", "numpy") and library not in sys.stdlib_module_names


def _read(target: Any) -> Any:
    """A shallow copy of what an object holds: a dict of its items or attributes, else a list."""
    if isinstance(target, dict):
        return dict.copy(target)
    if isinstance(target, (list, set, deque)):
        return list(target)
    if isinstance(target, nn.Module):
        return {name: value for name, value in vars(target).items() if name not in _OWN}
    return dict(vars(target))


def _write(target: Any, contents: Any) -> None:
    """Make an object hold what `_read` said."""
    if isinstance(target, (dict, set)):
        target.clear()
        target.update(contents)
    elif isinstance(target, (list, deque)):
        target.clear()
        target.extend(contents)
    else:
        attributes = vars(target)
        for name in _read(target):
            del attributes[name]
        attributes.update(contents)


def _is_same(before: Any, now: Any) -> bool:
    """Whether an object holds the very same things, in the same order."""
    if len(before) != len(now):
        return False
    if isinstance(before, dict):
        return all(a is b and x is y for (a, x), (b, y) in zip(before.items(), now.items(), strict=True))
    return all(a is b for a, b in zip(before, now, strict=True))
