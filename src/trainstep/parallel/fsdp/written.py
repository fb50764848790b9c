"""Lists and mappings that a call is given anew, as tensors in them are replaced, and what it writes into them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor


class Written:
    """Between what a caller gave and what the call is given in its place.

    Args:
        given, made: the same arguments, tensors aside, in containers of the same form.
    """

    def __init__(self, given: Sequence[Any], made: Sequence[Any]) -> None:
        self._containers: list[tuple[Any, Any]] = []
        self._tensors: list[tuple[Tensor, Tensor]] = []
        self._begun: list[tuple[list[Any], list[Any]]] = []  # of each container, keys and values as the call was given
        for one, other in zip(given, made, strict=True):
            if not isinstance(one, Tensor):
                self._note(one, other)

    def _note(self, given: Any, made: Any) -> None:
        """Note the pairs of lists, deques and dicts, also those in others, and of tensors."""
        if isinstance(given, Tensor):
            self._tensors.append((given, made))
        elif given is not made and isinstance(given, (list, deque, dict, tuple)):
            if not isinstance(given, tuple):
                self._containers.append((given, made))
                self._begun.append((list(made), list(_values(made))))
            for one, other in zip(_values(given), _values(made), strict=True):
                self._note(one, other)

    def back(self) -> None:
        """Write into the caller's containers what the call has written into its own; what it only added is added."""
        given = {id(made): given for given, made in (*self._containers, *self._tensors)}
        for (before, after), (keys, values) in zip(self._containers, self._begun, strict=True):
            now, entries = list(after), list(_values(after))
            kept = _are_same(now[: len(keys)], keys) and _are_same(entries[: len(values)], values)
            if kept and len(now) == len(keys):
                continue
            start = len(keys) if kept else 0
            written = [given.get(id(value), value) for value in entries[start:]]
            if not kept:
                before.clear()
            if isinstance(before, dict):
                before.update(zip(now[start:], written, strict=True))
            else:
                before.extend(written)


def _values(container: Any) -> Iterable[Any]:
    return container.values() if isinstance(container, dict) else container


def _are_same(before: list[Any], now: list[Any]) -> bool:
    return len(before) == len(now) and all(a is b for a, b in zip(before, now, strict=True))
