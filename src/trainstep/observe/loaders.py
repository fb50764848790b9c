"""The loaders that a script takes batches from: the lines where it does, what they were given, and how many batches."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence, Sized
from typing import TYPE_CHECKING, Any

from trainstep.observe.lines import Place, line_around

if TYPE_CHECKING:
    from torch.utils.data import DataLoader


class Loaders:
    """Told of each loader that is iterated over, and of each batch."""

    def __init__(self, on_new: Callable[[], object]) -> None:
        self._by_iterator: weakref.WeakKeyDictionary[Any, dict[str, Any]] = weakref.WeakKeyDictionary()
        self._drawn: weakref.WeakKeyDictionary[Any, deque[int]] = weakref.WeakKeyDictionary()
        self._found: dict[tuple[Any, ...], dict[str, Any]] = {}
        self._on_new = on_new

    def begins(self, loader: DataLoader[Any], iterator: Any, place: Place) -> None:
        """Batches will come from an iterator over a loader, for a line of code."""
        entry = {"line": line_around(place), "workers": loader.num_workers, "is_pinned": bool(loader.pin_memory)}
        worker = next(iter(getattr(iterator, "_workers", ())), None)
        if (start := getattr(getattr(worker, "_popen", None), "method", None)) not in (None, "fork"):
            entry["start"] = start
        known = tuple(entry.values())
        is_new = known not in self._found
        self._by_iterator[iterator] = self._found.setdefault(known, entry | {"batches": 0, "begun": 0})
        self._by_iterator[iterator]["begun"] += 1
        if is_new:
            self._on_new()

    def drew(self, iterator: Any, index: Any) -> None:
        """An iterator is about to fetch a batch: of these samples of the dataset, or of one."""
        is_several = isinstance(index, Sized) and not isinstance(index, str)
        self._drawn.setdefault(iterator, deque()).append(len(index) if is_several else 1)

    def took(self, iterator: Any) -> int:
        """A batch came from it; how many samples are in it. Batches come in the order in which they were drawn."""
        entry = self._by_iterator.get(iterator)
        if entry is not None:
            entry["batches"] += 1
        drawn = self._drawn.get(iterator)
        return drawn.popleft() if drawn else 0

    def stock(self) -> tuple[int, int]:
        """Batches that lie ready in all of them, and those together with what workers were asked for and load."""
        each = [_stock_of(iterator) for iterator in list(self._by_iterator)]
        return sum(ready for ready, _ in each), sum(asked for _, asked in each)

    def found(self) -> list[dict[str, Any]]:
        """line, workers, is_pinned, batches, and how often it was begun, of each."""
        return list(self._found.values())


def _stock_of(iterator: Any) -> tuple[int, int]:
    """Batches that workers have loaded and nobody has taken, in torch's queues or there before their turn; and those
    together with what they have yet to load.

    Nothing where there are no workers, and on systems whose queues do not tell how much is in them.
    """
    names = ("_worker_result_queue", "_data_queue")  # the same one where no thread pins memory in between
    queues = {id(each): each for each in (getattr(iterator, name, None) for name in names) if each is not None}
    if not queues or iterator._shutdown:
        return 0, 0
    try:
        waiting = sum(each.qsize() for each in queues.values())
    except NotImplementedError:  # macOS
        return 0, 0
    asked = iterator._task_info.values()
    return waiting + sum(len(each) > 1 for each in asked), len(asked)


def main_loader(found: Sequence[Mapping[str, Any]]) -> str | None:
    """The loader that most batches came from, in words: `train.py:31, 1 worker, memory not pinned`."""
    if not found:
        return None
    most = most_used(found)
    workers = f"{most['workers'] or 'no'} worker{'s' * (most['workers'] != 1)}"
    workers += f" started by {most['start']}" if "start" in most else ""
    return f"{most['line']}, {workers}, memory {'pinned' if most['is_pinned'] else 'not pinned'}"


def begins_again(found: Sequence[Mapping[str, Any]]) -> bool:
    """True if the loader that most batches came from was begun a second time; without any, nothing was."""
    return bool(found) and most_used(found)["begun"] > 1


def most_used(found: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """The loader that most batches came from."""
    return max(found, key=lambda each: each["batches"])
