"""The line of the user's own code that a call comes from, and calls that make the host wait for the device."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Literal, NamedTuple

Owner = Literal["torch", "python", "library", "user"]

_PYTHON = str(Path(os.__file__).resolve().parent)
_OURS = str(Path(__file__).resolve().parents[1])


class Place(NamedTuple):
    """Place of a call: the innermost line that is neither torch's nor Python's, and the user's own around it."""

    file: str
    line: int
    function: str
    user_file: str | None = None  # None where the innermost line is the user's own, or no line is
    user_line: int | None = None


@cache
def owner_of(file: str) -> Owner:
    """Whose code a file is."""
    if file.startswith("<"):
        return "python"
    path = str(Path(file).resolve())
    parts = Path(path).parts
    if path.startswith(_OURS):
        return "torch"
    for folder in ("site-packages", "dist-packages"):
        if folder in parts:
            return "torch" if parts[parts.index(folder) + 1] in ("torch", "triton") else "library"
    return "python" if path.startswith(_PYTHON) else "user"


def place_of_call(frame: FrameType | None) -> Place:
    """The place of a call, looked for outwards from a frame."""
    found: Place | None = None
    while frame is not None:
        owner = owner_of(frame.f_code.co_filename)
        if owner in ("library", "user"):
            here = Place(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)
            if owner == "user":
                return here if found is None else found._replace(user_file=here.file, user_line=here.line)
            found = found or here
        frame = frame.f_back
    return found or Place("", 0, "")


def user_calls() -> list[tuple[str, int]]:
    """File and line of each call of the user's own that is under way, the innermost first."""
    frame: FrameType | None = sys._getframe(1)
    found = list[tuple[str, int]]()
    while frame is not None:
        if owner_of(frame.f_code.co_filename) == "user":
            found.append((frame.f_code.co_filename, frame.f_lineno))
        frame = frame.f_back
    return found


def shown_line(file: str | None, line: int | None) -> str:
    """`train.py:31`; with its package where a file is a library's."""
    parts = Path(file or "?").parts
    inside = next((parts[at + 1 :] for at, part in enumerate(parts) if part.endswith("-packages")), parts[-1:])
    return f"{'/'.join(inside)}:{line}"


def line_around(place: Place) -> str:
    """The user's own line around a place, else the place's."""
    return shown_line(place.user_file or place.file, place.user_line or place.line)


_real_path = cache(os.path.realpath)


def line_of_call() -> str:
    """`/home/me/train.py:31`: the innermost line under way that is neither torch's, nor Python's, nor ours."""
    place = place_of_call(sys._getframe(1))
    return f"{place.file and _real_path(place.file)}:{place.line}"


class Lines:
    """Numbers lines of code by the calls made there; each is told to `on_new` once."""

    def __init__(self, on_new: Callable[[int, Place, str], object]) -> None:
        self._numbers: dict[tuple[Place, str], int] = {}
        self._on_new = on_new

    def number(self, call: str, frame: FrameType) -> int:
        """The number of the line around a frame that calls `call`."""
        return self.number_of(place_of_call(frame), call)

    def number_of(self, place: Place, call: str) -> int:
        """The number of a line that calls `call`, or in which a phase of this name is under way."""
        key = place, call
        if key not in self._numbers:
            self._numbers[key] = len(self._numbers)
            self._on_new(self._numbers[key], *key)
        return self._numbers[key]
