"""A file of tensors that are filled where they lie, mapped by whoever writes it and by whoever reads it.

Each group of tensors is a stretch of the file that begins at a page. What is known at the end, and where all tensors
are, comes last, as JSON; a file without that end is not whole. A copy of several times a model's weights is made once
so: `torch.save` needs it in other memory first, and new memory takes longer than what is put there.
"""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

ENDING = b"trainstep tensors"
_LENGTH = 8  # bytes in which the JSON's length is told


class TensorFile:
    """Written group by group.

    Args:
        path: a file or a link to one; what was there is gone.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._file = path, path.open("w+b")
        self._end = 0
        self._index: dict[str, dict[str, tuple[int, Sequence[int], str]]] = {}  # group → name → start, shape, dtype

    def add(
        self, group: str, shapes: Mapping[str, Sequence[int]], dtype: torch.dtype = torch.float32
    ) -> dict[str, Tensor]:
        """Zeros of these shapes, which are the file's content whatever is written into them. A group may be added to,
        in another dtype too; of equal names in it the last counts.

        Raises:
            OSError: there is no room.
        """
        start = -(-self._end // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY
        counts = {name: torch.Size(shape).numel() for name, shape in shapes.items()}
        size = dtype.itemsize * sum(counts.values())
        if size:
            _reserve(self._file.fileno(), start, size)
            whole = torch.from_file(str(self._path), shared=True, size=start + size, dtype=torch.uint8)
            flat = whole[start:].view(dtype)
        else:
            flat = torch.empty(0, dtype=dtype)
        self._end, first, found = start + size, 0, {}
        for name, count in counts.items():
            found[name] = flat[first : first + count].view(tuple(shapes[name]))
            place = start + first * dtype.itemsize, tuple(shapes[name]), str(dtype).removeprefix("torch.")
            self._index.setdefault(group, {})[name] = place
            first += count
        return found

    def finish(self, facts: Mapping[str, Any]) -> None:
        """Write its end, with what JSON can say."""
        said = json.dumps({"facts": facts, "index": self._index}).encode()
        self._file.seek(self._end)
        self._file.write(said + len(said).to_bytes(_LENGTH, "little") + ENDING)
        self._file.close()


def _reserve(descriptor: int, start: int, size: int) -> None:
    """Reserve the space of what is mapped: a full disk would end the process."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(descriptor, start, size)
    else:
        os.ftruncate(descriptor, start + size)


def read(path: Path) -> tuple[dict[str, dict[str, Tensor]], dict[str, Any]]:
    """Groups and facts of a file. Tensors are mapped, not read: they stay when the file is removed.

    Raises:
        OSError: there is none.
        ValueError: it is not whole.
    """
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        tail = _LENGTH + len(ENDING)
        file.seek(max(size - tail, 0))
        length, ending = file.read(_LENGTH), file.read()
        if ending != ENDING:
            raise ValueError(f"{path} has no end: whoever wrote it did not come to that")
        file.seek(size - tail - int.from_bytes(length, "little"))
        content = json.loads(file.read(int.from_bytes(length, "little")))
    flat = torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8)

    def there(start: int, shape: Sequence[int], name: str) -> Tensor:
        dtype: torch.dtype = getattr(torch, name)
        end = start + torch.Size(shape).numel() * dtype.itemsize
        return flat[start:end].view(dtype).view(tuple(shape)) if end > start else torch.empty(tuple(shape), dtype=dtype)

    groups = {
        group: {name: there(*place) for name, place in every.items()} for group, every in content["index"].items()
    }
    return groups, content["facts"]
