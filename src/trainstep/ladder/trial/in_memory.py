"""Files that one process leaves for another, in memory where there is room: several times a model's weights, which
need no disk so, and are mapped by the reader and not read.

The process that will read them opens them (`InMemory`), and puts a link to each in a folder. Whoever is to write
follows the link, if what it writes has room there (`make_room`). The memory is given back when the reader closes it and
has let go of what it read, or ends, however it does. Importing this imports no torch.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from trainstep.base.hardware import free_host_bytes

MOST = 0.5
"""Share of the free memory that a file may take, together with those that other ranks of the host write meanwhile."""


class InMemory:
    """Files of one run, open until the next one's or until it is closed."""

    def __init__(self) -> None:
        self._open: dict[Path, int] = {}  # link → what it leads to

    def begin(self, folder: Path, names: Iterable[str]) -> None:
        """Have what is saved under these names in the folder lie in memory. Where a system has no such files, or the
        folder no links, it will be on disk."""
        self.close()
        if not hasattr(os, "memfd_create"):
            return
        try:
            for name in names:
                link = folder / name
                link.unlink(missing_ok=True)
                self._open[link] = os.memfd_create(name)
                link.symlink_to(f"/proc/{os.getpid()}/fd/{self._open[link]}")
        except OSError:
            self.close()

    def close(self) -> None:
        """Let go of them, and remove the links, which would lead to whatever is opened next."""
        while self._open:
            link, descriptor = self._open.popitem()
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
