"""Calls that make the host wait for a GPU and are no read of a tensor, such as a mask as an index: found by CUDA's own
check, which warns at each, in one step."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from trainstep.observe.lines import Lines

MESSAGE = "called a synchronizing"  # how the warning begins; what else it says differs between versions


@contextmanager
def synchronisations(lines: Lines, found: Callable[[int], object], is_known: Callable[[], bool]) -> Iterator[None]:
    """While entered, `found` is called with the number of the line of each; nothing of it is shown.

    Args:
        lines: numbers the lines.
        found: what is told.
        is_known: whether the call under way is one that is timed anyway.
    """
    before, show = torch.cuda.get_sync_debug_mode(), warnings.showwarning
    if before:  # the script looks itself
        yield
        return

    def note(message: Any, *arguments: Any, **keywords: Any) -> None:
        if MESSAGE not in str(message):
            show(message, *arguments, **keywords)
        elif not is_known():
            found(lines.number("a synchronising operation"))

    warnings.filterwarnings("always", message=f".*{MESSAGE}")
    added = warnings.filters[0]
    warnings.showwarning = note
    torch.cuda.set_sync_debug_mode("warn")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)
        if warnings.showwarning is note:
            warnings.showwarning = show
        if added in warnings.filters:
            warnings.filters.remove(added)  # type: ignore[attr-defined]
