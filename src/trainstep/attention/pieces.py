"""The pieces of eager attention (scores, softmax, weighted sum), announced for a while to whoever listens."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from trainstep.attention import eager

PIECES = {
    "scores": "attention_scores",
    "softmax": "attention_weights",
    "weighted sum": "weighted_sum",
}
"""Name of each piece → the function of `attention.eager` that computes it."""


@contextmanager
def pieces_announced(announce: Callable[[str], AbstractContextManager[Any]]) -> Iterator[None]:
    """While entered, each piece of `attention_eager` runs inside `announce(name)`; before and after, at no cost.

    The functions are replaced, not the calls: nothing is looked up where nobody listens. Not for code under
    torch.compile, which would be compiled anew, and not for use from several threads.
    """
    originals = {function: getattr(eager, function) for function in PIECES.values()}
    for piece, function in PIECES.items():
        setattr(eager, function, _announced(originals[function], piece, announce))
    try:
        yield
    finally:
        for function, original in originals.items():
            setattr(eager, function, original)


def _announced(
    function: Callable[..., Any], piece: str, announce: Callable[[str], AbstractContextManager[Any]]
) -> Callable[..., Any]:
    @functools.wraps(function)
    def inside_range(*args: Any) -> Any:
        with announce(piece):
            return function(*args)

    return inside_range
