"""A call run a second time as it ran the first: what it may have read beside its tensors is put back for the while.

Forward is a function of more than its arguments: it reads and leaves things in a key-value cache, in attributes and
buffers of its modules, in random number generators, in globals. Running it again then does something else, as where a
cache that is full by now gives attention twice the keys. So the state that a call can reach is read before and after
it: attributes and buffers of its modules, variables that their code names (`reaching`), arguments, and all lists,
dicts, objects and generators in those. What it changed is changed back while it runs again, and restored to what
it was before that.

Tensors, parameters and numpy arrays are the exception. They are not copied, buffers aside, so a call that changes one
in place cannot be repeated and is refused. So is a call that uses an iterator, which has no state to copy. torch counts
changes in place, but for those through `.data`, and numpy counts none. Values are compared in a block's first call
alone, in training and in evaluation, since that reads all weights and makes the host wait for the device.

torch itself restores its own random numbers and autocast.
"""

from __future__ import annotations

import io
import random
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from trainstep.base.errors import UnsupportedError
from trainstep.checkpointing.reaching import (
    OWN,
    PLAIN,
    Reach,
    Variables,
    built_in,
    contents_of,
    held,
    is_container,
    members,
    slots_of,
)
from trainstep.checkpointing.sketching import Comparison, is_end
from trainstep.checkpointing.writes import Untouched, refuse
from trainstep.step.randomness import DRAWING, Source, is_same_state, source_of

Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]
_HERE = (str(Path(__file__).parents[1]), str(Path(torch.__file__).parent))


class Block:
    """A block that runs again in backward, and what its calls have shown.

    Args:
        name: its name in the model, for errors.
        module: the block, its `forward` not yet replaced.
    """

    def __init__(self, name: str, module: nn.Module) -> None:
        self.name, self.module = name, module
        self._forward = module.forward
        self._reach: Reach | None = None
        self.calls = 0
        """Number of calls that have ended."""
        self._looked: set[bool] = set()
        self._compared: set[bool] = set()
        self.written: set[tuple[nn.Module, str]] = set()
        """Buffers that a call writes to without a trace."""

    def is_new(self) -> bool:
        """Return True until a call has ended in this mode, training or evaluation."""
        return self.module.training not in self._looked

    def note_call(self) -> None:
        """Count a call that has ended, with those inside it."""
        self.calls += 1
        self._looked.add(self.module.training)

    def comparison(self) -> Comparison | None:
        """Return what compares a call with its recomputation, until one of each mode agrees."""
        mode = self.module.training
        return None if mode in self._compared else Comparison(self.name, lambda: self._compared.add(mode))

    def reach(self, arguments: list[Any]) -> Reach:
        """Return the state outside of the modules that their code names; the first call's arguments count."""
        if self._reach is None:
            self._reach = Reach(list(self.module.modules()), [self._forward], arguments)
        return self._reach


class Repeated:
    """A call of a block's forward, as `torch.utils.checkpoint` runs it, and runs it again.

    Args:
        block: the block that runs.
        args, kwargs: what it is called with.
        context_fn: contexts to enter inside, as selective checkpointing's.
        note: called with the block's name when it runs again.
    """

    def __init__(
        self,
        block: Block,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        context_fn: Callable[[], Contexts] | None,
        note: Callable[[str], object],
    ) -> None:
        self._block = block
        self._note = note
        self._inner = context_fn() if context_fn is not None else (nullcontext(), nullcontext())
        self._comparison = block.comparison()
        self._before: _State | None = _State(block, args, kwargs)
        self._changed: list[tuple[Any, Any]] = []
        self._buffers: list[tuple[nn.Module, str, Tensor]] = []
        self._drawn: list[tuple[Source, Any]] = []

    def contexts(self) -> Contexts:
        """Return the contexts to enter around the first run, and around another."""
        return self._first(), _Reentrant(self._again)

    @contextmanager
    def _first(self) -> Iterator[None]:
        assert self._before is not None
        self._before.note_sources()
        with self._inner[0], nullcontext() if self._comparison is None else self._comparison.forward():
            yield
        if place := self._before.tensor_changed():
            raise refuse(self._block.name, place)
        self._changed, self._buffers = self._before.changed(), self._before.changed_buffers()
        self._drawn = self._before.drawn()
        self._block.note_call()
        self._before = None  # what is unchanged need not be held

    @contextmanager
    def _again(self) -> Iterator[None]:
        self._note(self._block.name)
        with ExitStack() as stack:
            for target, contents in self._changed:
                stack.callback(_write, target, _read(target))
                _write(target, contents)
            for module, name, value in self._buffers:
                stack.callback(module._buffers.__setitem__, name, module._buffers[name])
                module._buffers[name] = value.clone()
            for source, state in self._drawn:
                stack.callback(source.restore_random_state, source.random_state())
                source.restore_random_state(state)
            try:
                with self._inner[1], nullcontext() if self._comparison is None else self._comparison.again():
                    yield
            except Exception as error:
                if _is_about_something_else(error):
                    raise
                raise unrepeatable(self._block.name, error) from error


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
    return is_memory or isinstance(error, UnsupportedError) or is_end(error)


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


class _State:
    """State at this moment: of modules, arguments and the variables that the modules' code names."""

    def __init__(self, block: Block, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._block = block
        self._is_new = block.is_new()
        self._held: list[tuple[Any, Any]] = []  # an object and its contents
        self._untouched = Untouched(reads_values=self._is_new)
        self._buffers: list[tuple[nn.Module, str, Tensor, int, Tensor]] = []
        self._sources: list[Source] = []
        self._states: list[tuple[Source, Any]] = []
        self._own_states: list[tuple[Source, Any]] = []
        self._seen: set[int] = set()
        reach = block.reach([*args, *kwargs.values()])
        for place, value in (*enumerate(args), *kwargs.items()):
            self._look(f"its argument {place}", value)
        for name, module in block.module.named_modules(prefix=block.name):
            self._look_at_module(name, module, reach.names)
        for variables in reach.variables:
            contents = variables.read()
            self._held.append((variables, contents))
            for key, value in contents.items():
                if type(value) not in PLAIN:
                    self._look(variables.place(key), value)
        for where, value in reach.values:
            self._look(where, value)

    def note_sources(self) -> None:
        """Note where all sources of random numbers are."""
        own = (source_of(random), source_of(np.random), *self._sources)
        self._states = [(each, each.random_state()) for each in own if each is not None]
        self._own_states = [(each, each.random_state()) for each in DRAWING]

    def drawn(self) -> list[tuple[Source, Any]]:
        """Return the sources that drew since, with their states then; sources of our own always."""
        return self._own_states + [
            (source, state) for source, state in self._states if not is_same_state(state, source.random_state())
        ]

    def changed(self) -> list[tuple[Any, Any]]:
        """The objects that hold something else by now, with what they held."""
        return [(target, before) for target, before in self._held if not _is_same(before, _read(target))]

    def changed_buffers(self) -> list[tuple[nn.Module, str, Tensor]]:
        """The buffers that were written to, with their values before.

        `torch.nn.functional.batch_norm` writes to running statistics without a trace, whosever they are: to vectors.
        A block's first call shows which of the others are written to so.
        """
        if self._is_new:
            self._block.written.update(
                (module, name) for module, name, buffer, _, value in self._buffers if not torch.equal(buffer, value)
            )
        return [
            (module, name, value)
            for module, name, buffer, version, value in self._buffers
            if buffer._version != version
            or module._buffers.get(name) is not buffer
            or (buffer.dim() == 1 and buffer.is_floating_point())
            or (module, name) in self._block.written
        ]

    def tensor_changed(self) -> str:
        """Say where a tensor or an array is that was changed in place; empty if there is none."""
        return next((place for place, _ in self._untouched.written()), "")

    def _look_at_module(self, name: str, module: nn.Module, named: set[str]) -> None:
        attributes = _read(module)
        self._held.append((module, attributes))
        for key, value in attributes.items():
            if type(value) not in PLAIN:
                self._look(f"{name}.{key}", value, is_used=key in named)
        for key, parameter in module._parameters.items():
            if parameter is not None:
                self._seen.add(id(parameter))
                self._untouched.add(f"{name}.{key}", parameter)
        for key, buffer in module._buffers.items():
            if buffer is not None and not buffer.is_inference():
                self._buffers.append((module, key, buffer, buffer._version, buffer.detach().clone()))

    def _look(self, place: str, value: Any, *, is_used: bool = True) -> None:
        ahead = [value]
        while ahead:
            each = ahead.pop()
            if type(each) in PLAIN or id(each) in self._seen:
                continue
            if isinstance(each, (Tensor, np.ndarray)):
                self._seen.add(id(each))
                self._untouched.add(place, each)
            elif isinstance(each, (tuple, frozenset)):
                ahead += each
            elif (source := source_of(each)) is not None:
                self._seen.add(id(each))
                self._sources.append(source)
            elif is_container(each):
                self._seen.add(id(each))
                self._held.append((each, _read(each)))
                ahead += members(each)
            elif inner := held(each):
                ahead += inner
            elif is_used and isinstance(each, (Iterator, random.SystemRandom)) and not isinstance(each, io.IOBase):
                raise self._uncopied(place, each)

    def _uncopied(self, place: str, value: Any) -> UnsupportedError:
        return UnsupportedError(
            f"checkpointing: {self._block.name} uses {place}, a {type(value).__name__}, which cannot be put back for "
            "running the block again; take the next value outside of the block and pass it in, or leave checkpointing "
            "off"
        )


def _read(target: Any) -> Any:
    """A shallow copy of what an object holds: a dict of its items or attributes, else a list."""
    if isinstance(target, nn.Module):
        return {name: value for name, value in vars(target).items() if name not in OWN}
    return target.read() if isinstance(target, Variables) else contents_of(target)


def _write(target: Any, contents: Any) -> None:
    """Make an object hold what `_read` said."""
    if (kind := built_in(target)) is not None:
        kind.clear(target)
        add = kind.__setitem__ if issubclass(kind, dict) else kind.add if kind is set else kind.append
        for each in contents.items() if issubclass(kind, dict) else zip(contents, strict=True):
            add(target, *each)
    elif isinstance(target, Variables):
        target.write(contents)
    else:
        attributes, slots = getattr(target, "__dict__", {}), slots_of(type(target))  # type: ignore[arg-type]
        for name in _read(target):
            object.__delattr__(target, name) if name in slots else attributes.pop(name)
        for name, value in contents.items():
            object.__setattr__(target, name, value) if name in slots else attributes.update({name: value})


def _is_same(before: Any, now: Any) -> bool:
    """True if an object holds the very same things, in the same order."""
    if len(before) != len(now):
        return False
    if isinstance(before, dict):
        return all(a is b and x is y for (a, x), (b, y) in zip(before.items(), now.items(), strict=True))
    return all(a is b for a, b in zip(before, now, strict=True))
