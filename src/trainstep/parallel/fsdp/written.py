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
            for one, other in zip(_values(given), _values(made), strict=True):
                self._note(one, other)

    def back(self) -> None:
        """Write into the caller's containers what is now in those of the call."""
        given = {id(made): given for given, made in (*self._containers, *self._tensors)}
        for before, after in self._containers:
            entries = [given.get(id(value), value) for value in _values(after)]
            if _are_same(_values(before), entries) and (not isinstance(before, dict) or _are_same(before, after)):
                continue
            keys = list(after)
            before.clear()
            if isinstance(before, dict):
                before.update(zip(keys, entries, strict=True))
            else:
                before.extend(entries)


def _values(container: Any) -> Iterable[Any]:
    return container.values() if isinstance(container, dict) else container


def _are_same(before: Iterable[Any], now: Iterable[Any]) -> bool:
    one, other = list(before), list(now)
    return len(one) == len(other) and all(a is b for a, b in zip(one, other, strict=True))
