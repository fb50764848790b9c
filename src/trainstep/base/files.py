"""Files that appear whole, and the reader of every JSON and TOML file that a user may have made or damaged.

A file is written beside its place and put there in one step; no link is followed. The reader takes regular files
alone, and has limits of size, of nesting and of numbers: its errors are one line with file, place, value and type.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import secrets
import shutil
import stat
import tomllib
from collections.abc import Iterator
from io import BufferedReader
from pathlib import Path
from typing import Any, TypeVar

from trainstep.base.errors import UsageError

LARGEST = {"TOML": 2**20, "JSON": 2**26, "JSON Lines": 2**32, "pickle": 2**30}
"""Bytes of a file. A row in memory takes three to five times its line."""
DEEPEST = 32
"""Levels of lists, tables and dotted keys."""
_DIGITS, _LONG = bytes.maketrans(b"123456789", b"0" * 9), re.compile(rb"(?:^|[^.0])0{20}")
"""Digits as zeros, in which whole numbers of 20 digits are found; fractions have as many in traces of optimizers."""
_TEXTS = re.compile(r'"(?:[^"\\\n]|\\.)*"|\'[^\'\n]*\'')
_DOTTED = re.compile(rf"(?<![\w-])(?:[\w-]+[ \t]*\.[ \t]*){{{DEEPEST}}}")
Shape = TypeVar("Shape")


@contextlib.contextmanager
def open_regular(path: Path, what: str = "") -> Iterator[BufferedReader]:
    """Open a file for reading, never a pipe, which may wait for ever, nor a device, which may never end.

    Args:
        what: "the configuration ", for the error.

    Raises:
        UsageError: it cannot be read, also within the block, or is no regular file.
    """
    try:
        if "\0" in str(path) or not stat.S_ISREG(path.stat().st_mode):
            raise UsageError(f"cannot read {what}{path}: expected a regular file, not a folder, a pipe or a device")
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            yield file
    except OSError as error:
        raise UsageError(f"cannot read {what}{path}: {error.strerror or error}") from error


def read_lines(path: Path, what: str = "") -> Iterator[bytes]:
    """The lines of a file of JSON Lines, each with its end; names may hold other ends of lines.

    Raises:
        UsageError: as `open_regular`, or the file is too large.
    """
    with open_regular(path, what) as file:
        check_size(file, path, "JSON Lines")
        file.seek(3 * (file.peek(3)[:3] == b"\xef\xbb\xbf"))  # editors may put a mark before the first line
        yield from file


def read_json(path: Path, shape: type[Shape], what: str = "") -> Shape:
    """The content of a JSON file, of a type that msgspec knows.

    Raises:
        UsageError: as `open_regular`; too large, no JSON, nested too deep, or of another type.
    """
    return _read(path, "JSON", shape, what)


def read_toml(path: Path, shape: type[Shape], what: str = "") -> Shape:
    """The content of a TOML file, of a type that msgspec knows; raises as `read_json`."""
    return _read(path, "TOML", shape, what)


def _read(path: Path, language: str, shape: type[Shape], what: str) -> Shape:
    import msgspec  # here: a command's help needs no files

    with open_regular(path, what) as file:
        check_size(file, path, language)
        try:
            return msgspec.convert(_parse(file.read(), language), shape)
        except msgspec.ValidationError as error:
            expected, _, place = str(error).partition(" - at ")
            raise UsageError(f"{path}: {place.strip('`$.') or 'the whole file'}: {expected}") from error
        except ValueError as error:
            raise UsageError(f"cannot read {what}{path}: {error}") from error


def check_size(file: BufferedReader, path: Path, language: str) -> int:
    """The file's size in bytes; `UsageError` if it is above that of `LARGEST`."""
    if (size := os.fstat(file.fileno()).st_size) > LARGEST[language]:
        raise UsageError(f"{path} has {size / 2**20:,.0f} MiB; at most {LARGEST[language] / 2**20:,.0f} are read")
    return size


def parse_line(text: bytes) -> Any:
    """The value of one line of JSON.

    Raises:
        ValueError: no JSON, nested too deep, or a number that is not finite or has more than 64 bits.
    """
    import msgspec

    # msgspec is twice as fast, but refuses lone surrogates, which names may have.
    with contextlib.suppress(msgspec.MsgspecError, RecursionError, ValueError):
        zeros = text.translate(_DIGITS)
        if b"0" * 20 not in zeros or not _LONG.search(zeros):  # else a whole number may need more than 64 bits
            return msgspec.json.decode(text)
    return _parse(text, "JSON")


def _parse(text: bytes, language: str) -> Any:
    try:
        content = text.decode("utf-8-sig")
        if language == "TOML" and _DOTTED.search(_TEXTS.sub("text", content)):
            raise RecursionError
        value = (tomllib if language == "TOML" else json).loads(content)
        _check_plain(value, "", 0, has_infinity=language == "TOML")
    except (json.JSONDecodeError, tomllib.TOMLDecodeError) as error:
        raise ValueError(f"not {language}: {error}") from error
    except RecursionError as error:
        raise ValueError(f"values nested more than {DEEPEST} deep") from error
    return value


def _check_plain(value: Any, place: str, depth: int, has_infinity: bool) -> None:
    if depth > DEEPEST:
        raise RecursionError
    if isinstance(value, dict | list):
        for key, each in value.items() if isinstance(value, dict) else enumerate(value):
            _check_plain(each, f"{place}.{key}".lstrip("."), depth + 1, has_infinity)
    is_long = isinstance(value, int) and abs(value) >= 2**64  # no size, count or address is larger
    if is_long or (isinstance(value, float) and not (has_infinity or math.isfinite(value))):
        raise ValueError(f"{place} is {f'{value}'[:40]}; expected a finite number of 64 bits")


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
