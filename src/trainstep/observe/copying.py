"""Copies of a script's working folder, in which a run may write without changing the folder itself.

Files below `LARGE` are copied for each run. A larger one is cloned where the file system can (its blocks are shared
until one side writes). Elsewhere it is copied once, and every run's copy links to that one, which is copied anew after
a run that wrote into it. So no link leads to a file of yours that a run may write.
"""

from __future__ import annotations

import os
import shutil
import stat
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from trainstep.base.errors import UsageError
from trainstep.observe.command import Command

LARGE = 64 * 2**20
"""Bytes from which a file is not copied for each run."""
MOST_BYTES, MOST_FILES = 4 * 2**30, 100_000
"""Bytes and files that are copied for each run at most."""
ENVIRONMENT = ("pyvenv.cfg", "conda-meta")
"""A folder with one of these is a Python environment, which is linked as a whole."""
NO_DATA = ("__pycache__", ".git")
"""Folders whose files change without changing what a run starts from."""
FICLONE = 0x40049409


def _is_environment(folder: Path) -> bool:
    return any((folder / name).exists() for name in ENVIRONMENT)


def _entries(folder: Path, without: Path) -> Iterator[tuple[Path, os.stat_result]]:
    """Paths in a folder with their status, each folder before its own; links and environments are not entered.

    Files that were removed meanwhile are left out, and folders that cannot be read, as the script cannot either.
    """
    with suppress(FileNotFoundError, PermissionError), os.scandir(folder) as entries:
        for path in sorted(Path(entry.path) for entry in entries):
            if path == without:
                continue
            with suppress(FileNotFoundError):
                status = path.lstat()
                yield path, status
                if stat.S_ISDIR(status.st_mode) and not _is_environment(path):
                    yield from _entries(path, without)


class Copies:
    """Makes them.

    Args:
        without: a folder below the working folder that is left out.
        stock: the folder for the one copy of each large file.

    Raises:
        UsageError: the folder has too much to copy for each run.
    """

    def __init__(self, without: Path, stock: Path) -> None:
        self.root, self._stock = Path.cwd().resolve(), stock.resolve()
        self._folders: list[Path] = []
        self._links: list[Path] = []
        self._files: list[Path] = []
        self._large: dict[Path, os.stat_result] = {}
        total, by_name = 0, Counter[str]()
        for path, status in _entries(self.root, without.resolve()):
            if stat.S_ISLNK(status.st_mode) or (stat.S_ISDIR(status.st_mode) and _is_environment(path)):
                self._links.append(path)
            elif stat.S_ISDIR(status.st_mode):
                self._folders.append(path)
            elif not stat.S_ISREG(status.st_mode):
                continue  # a socket or a pipe
            elif status.st_size >= LARGE:
                self._large[path] = status
            else:
                self._files.append(path)
                total += status.st_size
                by_name[path.relative_to(self.root).parts[0]] += 1
                if total > MOST_BYTES or len(self._files) > MOST_FILES:
                    most = by_name.most_common(1)[0][0]
                    raise UsageError(
                        f"{self.root} has more than {MOST_BYTES / 2**30:.0f} GiB or {MOST_FILES:,} files to copy for "
                        f"each run, most of them in {most}; start it in the script's own folder, keep data elsewhere, "
                        "or give --in-place"
                    )

    @property
    def linked(self) -> str:
        """A sentence about the large files; empty where there are none."""
        if not self._large:
            return ""
        names = [str(each.relative_to(self.root)) for each in self._large]
        size = sum(each.st_size for each in self._large.values()) / 2**30
        shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        return (
            f"Files of {LARGE // 2**20} MiB and more ({size:.3g} GiB: {shown}) are copied once, and each run's copy "
            "links to that."
        )

    def make(self, place: Path) -> None:
        """A copy at `place`, with its large files.

        Raises:
            UsageError: something cannot be copied.
        """
        self.make_small(place)
        self.add_large(place)

    def make_small(self, place: Path) -> None:
        """A copy without large files."""
        try:
            place.mkdir(parents=True)
            for folder in self._folders:
                (place / folder.relative_to(self.root)).mkdir()
            for path in self._files:
                with suppress(FileNotFoundError, PermissionError):  # the script could not read it either
                    shutil.copy2(path, place / path.relative_to(self.root), follow_symlinks=False)
            for path in self._links:
                (place / path.relative_to(self.root)).symlink_to(self._leads_to(path, place))
        except OSError as error:
            raise _cannot(error) from error

    def _leads_to(self, path: Path, place: Path) -> Path:
        """Target of a link in the copy: in the copy if the link leads into the folder, else where the link does."""
        if not path.is_symlink():
            return path
        target = Path(os.path.normpath(path.parent / path.readlink()))
        return place / target.relative_to(self.root) if target.is_relative_to(self.root) else target

    def add_large(self, place: Path, is_only_read: Callable[[Path, os.stat_result], bool] = lambda *_: False) -> None:
        """Add the large files to a copy.

        Args:
            is_only_read: a file and how it was → True if no run writes it, so that a link to the file itself will do.
        """
        try:
            for path, status in self._large.items():
                target = place / path.relative_to(self.root)
                if path.exists() and not _is_cloned(path, target):
                    target.symlink_to(path if is_only_read(path, status) else self._in_stock(path))
        except OSError as error:
            raise _cannot(error) from error

    def _in_stock(self, path: Path) -> Path:
        """The one copy, as the file is."""
        own, status = self._stock / path.relative_to(self.root), path.stat()
        if not own.exists() or not is_unchanged(own, status):
            own.parent.mkdir(parents=True, exist_ok=True)
            own.unlink(missing_ok=True)
            shutil.copy2(path, own)
        return own

    def target(self, command: Command, place: Path) -> str:
        """Target of a command in a copy; the command's own where that lies elsewhere."""
        path = Path(command.target).resolve()
        if command.is_module or not path.is_relative_to(self.root):
            return command.target
        return str(place / path.relative_to(self.root))

    def written(self, place: Path) -> frozenset[str]:
        """Names of files with content in a copy that are not in the folder."""
        found = (path.relative_to(place) for path, status in _entries(place, self._stock) if _is_content(path, status))
        return frozenset(str(path) for path in found if not (self.root / path).exists())

    def close(self) -> None:
        """Remove the one copy of each large file."""
        shutil.rmtree(self._stock, ignore_errors=True)


def _is_content(path: Path, status: os.stat_result) -> bool:
    return stat.S_ISREG(status.st_mode) and status.st_size > 0 and not set(path.parts) & set(NO_DATA)


def _cannot(error: OSError) -> UsageError:
    return UsageError(
        f"cannot copy {error.filename or 'the working folder'}: {error.strerror}; mend that, or give --in-place"
    )


def is_unchanged(path: Path, status: os.stat_result) -> bool:
    """True if a file is as it was, by its size and its time."""
    now = path.stat()
    return (now.st_size, now.st_mtime_ns) == (status.st_size, status.st_mtime_ns)


def _is_cloned(path: Path, target: Path) -> bool:
    """Clone a file, with its mode and times; False where the file system cannot."""
    if sys.platform != "linux":
        return False
    import fcntl

    try:
        with path.open("rb") as old, target.open("wb") as new:
            fcntl.ioctl(new, FICLONE, old.fileno())
    except OSError:
        target.unlink(missing_ok=True)
        return False
    shutil.copystat(path, target)
    return True


class InPlace:
    """The files that were in the working folder before a run.

    Args:
        without: a folder below it that is left out.
    """

    def __init__(self, without: Path) -> None:
        self._before = {
            path: status
            for path, status in _entries(Path.cwd(), without.resolve())
            if stat.S_ISREG(status.st_mode) and not set(path.parts) & set(NO_DATA)
        }

    def changed(self) -> list[str]:
        """Names of those that were changed or removed since; an empty file that was only touched is not."""
        return [
            os.path.relpath(path)
            for path, status in self._before.items()
            if not path.exists() or not (is_unchanged(path, status) or path.stat().st_size == status.st_size == 0)
        ]
