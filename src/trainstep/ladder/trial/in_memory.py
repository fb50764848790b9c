"""Files that one process leaves for another, in memory where there is room: several times a model's weights, which
need no disk so, and are mapped by the reader and not read.

The process that will read them opens them (`in_memory`), and puts a link to each in a folder. Whoever is to write
follows the link, if what it writes has room there (`make_room`). The memory is given back when the reader closes it and
has let go of what it read, or ends, however it does. Importing this imports no torch.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from trainstep.base.hardware import free_host_bytes

MOST = 0.5
"""Share of the free memory that a file may take, together with those that other ranks of the host write meanwhile."""


@contextmanager
def in_memory(folder: Path, names: Iterable[str]) -> Iterator[None]:
    """Have what is saved under these names in the folder, which is made, lie in memory while this is entered. Where a
    system has no such files, or the folder no links, it is on disk."""
    folder.mkdir(parents=True, exist_ok=True)
    open_: dict[Path, int] = {}  # link → what it leads to
    try:
        with suppress(OSError, AttributeError):
            for name in names:
                link = folder / name
                link.unlink(missing_ok=True)
                open_[link] = os.memfd_create(name)
                link.symlink_to(f"/proc/{os.getpid()}/fd/{open_[link]}")
        yield
    finally:
        for link, descriptor in open_.items():  # a link would lead to whatever is opened next
            if link.is_symlink():
                link.unlink()
            os.close(descriptor)


def make_room(path: Path, size: int) -> None:
    """Have what is written to `path` go where a link there leads, if that can be written and has room; else to a file.

    Args:
        size: of the content, in bytes.
    """
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if path.is_symlink() and (ranks * size > MOST * free_host_bytes() or not os.access(path, os.W_OK)):
        path.unlink()
