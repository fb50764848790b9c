"""The exceptions that mean "the user can mend this", and the one that means "another process is gone".

The first are `ValueError`s, so library callers catch them as usual. The command line prints their message alone,
without a traceback, and exits with 2, or with 1 where other ranks are missing; every other exception is a fault of ours
and keeps its traceback.
"""

from __future__ import annotations

import re
import sys
import sysconfig
import traceback
from pathlib import Path
from types import FrameType


class UsageError(ValueError):
    """Bad input: the message says what came, what was expected and what to do."""


class UnsupportedError(UsageError):
    """Sound input that this machine, or this combination, cannot run. A grid records it as a row and goes on."""


def refuse_create_graph(what: str, instead: str) -> None:
    """In a backward whose results have no graph: raise under create_graph=True, where theirs would be silently lost.

    Raises:
        UnsupportedError: gradients are to have gradients.
    """
    import torch

    if torch.is_grad_enabled():
        raise UnsupportedError(f"{what} has no gradients of its gradients (create_graph=True); use {instead}")


class CollectiveError(RuntimeError):
    """A collective failed, or was waited for in vain: one sentence that says which rank is missing, and where.

    It is no fault of this process, and starting all ranks again goes on from the newest checkpoint.
    """


OUT_OF_MEMORY = re.compile(
    r"out of memory|you tried to allocate|\bMemoryError\b|std::bad_alloc|Cannot allocate memory", re.IGNORECASE
)
"""The words in which a process says that it had no more memory, its own or a GPU's."""
_OBEYED = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060\u2066-\u2069\ufeff"
    r"\ud800-\udfff\U000e0000-\U000e007f]"
)
"""Characters that terminals obey or readers cannot see: controls but for line end and tab, directions of writing,
spaces without width, half surrogates, tags."""


def printable(text: str) -> str:
    """Text of anybody's for a terminal: what it would obey instead of showing is written as its escape, `\\x1b`."""
    return _OBEYED.sub(lambda found: ascii(found[0])[1:-1], text)


def say(text: str, *, end: str = "\n", to_stderr: bool = False) -> None:
    """Print text of anybody's. All printing goes through here or through `console_for_output`, which cleans it too."""
    print(printable(text), end=end, file=sys.stderr if to_stderr else sys.stdout, flush=True)


def place_of(error: BaseException) -> str:
    """` (file.py:12)`: the innermost line of the user's own code that an error came through; empty if there is none."""
    return next((f" ({_told(each)})" for each in _users(traceback.extract_tb(error.__traceback__))), "")


def line_of(frame: FrameType) -> str:
    """`file.py:12 (forward)`: where code is, by the user's innermost line, or the innermost of all if there is none."""
    stack = traceback.extract_stack(frame)
    line = next(iter(_users(stack)), stack[-1])
    return f"{_told(line)} ({line.name})"


def one_line(error: BaseException, limit: int = 240) -> str:
    """The first line of an error's message that says something, cut to `limit` characters."""
    first = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    return first if len(first) <= limit else first[: limit - 1] + "…"


def _users(stack: traceback.StackSummary) -> list[traceback.FrameSummary]:
    """The lines of the user's own code, the innermost first."""
    not_the_users = (
        str(Path(__file__).parents[1]),
        *(sysconfig.get_paths()[name] for name in ("stdlib", "purelib")),
        "<",
    )
    return [line for line in reversed(stack) if not line.filename.startswith(not_the_users)]


def _told(line: traceback.FrameSummary) -> str:
    return f"{Path(line.filename).name}:{line.lineno}"
