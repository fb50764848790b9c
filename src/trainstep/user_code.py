"""Which line of the user's own code an error came through."""

from __future__ import annotations

import sysconfig
import traceback
from pathlib import Path

_NOT_THE_USERS = (str(Path(__file__).parent), *(sysconfig.get_paths()[name] for name in ("stdlib", "purelib")), "<")


def place_of(error: BaseException) -> str:
    """` (file.py:12)`: the innermost such line; empty if there is none."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not frame.filename.startswith(_NOT_THE_USERS):
            return f" ({Path(frame.filename).name}:{frame.lineno})"
    return ""
