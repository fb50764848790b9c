"""The exceptions that mean "the user can mend this".

They are `ValueError`s, so library callers catch them as usual. The command line prints their message alone, without a
traceback, and exits with 2; every other exception is a fault of ours and keeps its traceback.
"""

from __future__ import annotations

import re
import sysconfig
import traceback
from pathlib import Path


class UsageError(ValueError):
    """Bad input: the message says what came, what was expected and what to do."""


class UnsupportedError(UsageError):
    """Sound input that this machine, or this combination, cannot run. A grid records it as a row and goes on."""


_OBEYED = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060\u2066-\u2069\ufeff"
    r"\ud800-\udfff\U000e0000-\U000e007f]"
)
"""What terminals obey or readers cannot see: controls but for line end and tab, directions of writing, spaces without
width, half surrogates, tags."""


def printable(text: str) -> str:
    """Text of anybody's for a terminal: what it would obey instead of showing is written as its escape, `\\x1b`."""
    return _OBEYED.sub(lambda found: ascii(found[0])[1:-1], text)


def place_of(error: BaseException) -> str:
    """` (file.py:12)`: the innermost line of the user's own code that an error came through; empty if there is none."""
    not_the_users = (str(Path(__file__).parent), *(sysconfig.get_paths()[name] for name in ("stdlib", "purelib")), "<")
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not frame.filename.startswith(not_the_users):
            return f" ({Path(frame.filename).name}:{frame.lineno})"
    return ""
