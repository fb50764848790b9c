"""A large JSON object read field by field, and its lists element by element: only a piece of it is ever in memory.

Text that lies about its size cannot take the machine: one value may have `LARGEST_VALUE` characters, and a gzip file
may hold `_ROOM` bytes and `_GROWTH` times its own size.
"""

from __future__ import annotations

import codecs
import gzip
import json
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from trainstep.base.errors import UsageError
from trainstep.base.files import open_regular, parse_line

LARGEST_VALUE = 2**22  # characters of one field, or of one element of a list
_PIECE = 2**22  # bytes read at once
_ROOM, _GROWTH = 2**27, 100  # what a gzip file may hold; traces are compressed 10 to 30 times
_SPACE = re.compile(r"[ \t\n\r]*")
_BETWEEN = re.compile(r"[ \t\n\r]*,[ \t\n\r]*\{")  # two objects of a list
_TRIES = 4  # ends of elements that are tried for a piece, before its elements are read one by one


class NotAsExpected(Exception):
    """A text is wrong; the error says how in a few words."""


def fields_of(path: Path, listed: str) -> Iterator[tuple[str, Any]]:
    """The fields of the object in a JSON file, also gzipped, in order; the list `listed` in pieces, several times.

    Raises:
        NotAsExpected: the file holds no JSON object.
        UsageError: it cannot be read, is cut short or damaged, or holds far more than its size allows.
    """
    try:
        with open_regular(path) as file:
            is_gzip = file.peek(2)[:2] == b"\x1f\x8b"
            most = _ROOM + _GROWTH * path.stat().st_size if is_gzip else None
            yield from _Reader(path, gzip.GzipFile(fileobj=file) if is_gzip else file, most).fields(listed)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise UsageError(f"{path} is cut short or damaged: {error}; export it again") from error
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror or error}") from error


class _Reader:
    """`_text` from `_at` on is what was read and is not used up."""

    def __init__(self, path: Path, stream: BinaryIO | gzip.GzipFile, most: int | None) -> None:
        self._path, self._stream, self._most = path, stream, most
        self._text, self._at, self._taken, self._is_whole = "", 0, 0, False
        self._is_tried = False  # whether `_many` has seen this text
        self._utf8 = codecs.getincrementaldecoder("utf-8")()
        self._decoder = json.JSONDecoder()

    def fields(self, listed: str) -> Iterator[tuple[str, Any]]:
        if self._next() == "[":
            raise NotAsExpected(f"a list, and no object with a list of {listed}")
        self._expect("{")
        if self._next() == "}":
            self._at += 1
        else:
            while True:
                name = self._value()
                if not isinstance(name, str):
                    raise NotAsExpected("a field without a name")
                self._expect(":")
                if name == listed and self._next() == "[":
                    self._at += 1
                    yield name, []
                    for piece in self._pieces():
                        yield name, piece
                else:
                    yield name, self._value()
                if self._separator("}"):
                    break
        if self._next():
            raise NotAsExpected("more than one object")

    def _pieces(self) -> Iterator[list[Any]]:
        """The elements of a list whose bracket is read, many at a time."""
        if self._next() == "]":
            self._at += 1
            return
        while True:
            if piece := self._many():
                yield piece
            yield [self._value()]
            if self._separator("]"):
                return

    def _many(self) -> list[Any]:
        """The elements that end within the text at hand, where each is an object: all of it up to some `},{`."""
        if len(self._text) - self._at < _PIECE // 2:
            self._read()
        end, tries = len(self._text), 0 if self._is_tried else _TRIES
        self._is_tried = True
        for _ in range(tries):
            end = self._text.rfind("}", self._at, end)
            if end < 0:
                break
            if _BETWEEN.match(self._text, end + 1):
                try:
                    found = parse_line(f"[{self._text[self._at : end + 1]}]".encode())
                except ValueError:
                    continue  # an end inside of an element, or something wrong, which reading one by one will name
                self._at = end + 1
                self._separator("]")
                return list(found)
        return []

    def _value(self) -> Any:
        self._next()
        while True:
            try:
                value, end = self._decoder.raw_decode(self._text, self._at)
                if end - self._at <= LARGEST_VALUE and (end < len(self._text) or self._is_whole):  # a number may go on
                    self._at = end
                    return value
            except json.JSONDecodeError as error:
                if self._is_whole:
                    raise NotAsExpected(f"not JSON: {error.msg}, or cut short") from error
            except RecursionError as error:
                raise NotAsExpected("values nested too deep") from error
            except ValueError as error:  # a number with thousands of digits
                raise NotAsExpected(str(error)) from error
            if len(self._text) - self._at > LARGEST_VALUE:
                raise NotAsExpected(f"not JSON, or a value of more than {LARGEST_VALUE:,} characters")
            self._read()

    def _separator(self, closing: str) -> bool:
        """True if the object or list ends here; otherwise another element follows."""
        found = self._next()
        if found not in (closing, ","):
            raise NotAsExpected(f"not JSON: expected , or {closing}, or cut short")
        self._at += 1
        return found == closing

    def _expect(self, character: str) -> None:
        if self._next() != character:
            raise NotAsExpected(f"not JSON: expected {character}, or cut short")
        self._at += 1

    def _next(self) -> str:
        """The next character that is no space; empty at the end."""
        while True:
            self._at = _end(_SPACE, self._text, self._at)
            if self._at < len(self._text) or self._is_whole:
                return self._text[self._at : self._at + 1]
            self._read()

    def _read(self) -> None:
        if self._is_whole:
            return
        piece = self._stream.read(max(_PIECE, min(len(self._text) - self._at, LARGEST_VALUE)))
        self._taken += len(piece)
        if self._most is not None and self._taken > self._most:
            raise UsageError(
                f"{self._path} holds more than {self._most / 2**20:,.0f} MiB, over {_GROWTH} times its own size, as no "
                "trace does"
            )
        try:
            text = self._utf8.decode(piece, final=not piece)
        except UnicodeDecodeError as error:
            raise NotAsExpected(f"not JSON: {error.reason}") from error
        self._text, self._at = self._text[self._at :] + text, 0
        self._is_whole, self._is_tried = not piece, False


def _end(pattern: re.Pattern[str], text: str, start: int) -> int:
    found = pattern.match(text, start)
    return start if found is None else found.end()
