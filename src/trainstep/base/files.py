"""Files that appear whole: written beside their place, and put there in one step. No link is followed."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

from trainstep.base.errors import UsageError


@contextlib.contextmanager
def aside(path: Path, advice: str = "choose another folder with --out") -> Iterator[Path]:
    """Yield a new name beside `path`; the file of that name takes its place when the block ends well.

    Otherwise it is removed, and what was there stays. A link in the place of `path` is replaced, and never followed.

    Raises:
        UsageError: it cannot be written, or is a device or a pipe; the message ends with the advice.
    """
    if not is_replaceable(path):
        raise UsageError(f"{path} is no regular file; {advice}")
    draft = path.with_name(f".draft-{secrets.token_hex(8)}-{path.name}")  # the name's end may say how it is packed
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield draft
        draft.replace(path)
    except OSError as error:
        raise cannot_write(path, error, advice) from error
    finally:
        if os.path.lexists(draft):
            remove(draft)


def is_replaceable(path: Path) -> bool:
    """False for a device or a pipe, and for all in /dev: nothing may take its place."""
    is_known = not path.exists() or path.is_file() or path.is_dir() or path.is_symlink()
    return is_known and path.parent.resolve() != Path("/dev")


def remove(path: Path) -> None:
    """Remove a file, a folder with all in it, or a link itself; what the system refuses stays."""
    with contextlib.suppress(OSError):
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


def cannot_write(path: Path | str, error: OSError, advice: str = "choose another folder with --out") -> UsageError:
    """The error of a file or folder that the system refuses."""
    return UsageError(f"cannot write {path}: {error.strerror or error}; {advice}")
