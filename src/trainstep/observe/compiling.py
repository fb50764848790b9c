"""Observation beside torch.compile, which traces the code that it compiles and whatever that calls."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from trainstep.observe.imports import after_import


@contextmanager
def nothing_is_compiled() -> Iterator[None]:
    """While entered, what is to be compiled runs as it is written: torch compiles nothing under modes that see every
    operator, and raises there where `fullgraph` is asked for."""
    entered: list[Any] = []
    forget = after_import("torch._dynamo", lambda: entered.append(torch.compiler.set_stance("force_eager")))
    try:
        yield
    finally:
        forget()
        for stance in entered:
            stance.__exit__(None, None, None)


def is_anything_compiled() -> bool:
    """True if dynamo has compiled anything in this process."""
    return bool(getattr(sys.modules.get("torch._dynamo.utils"), "_compilation_metrics", None))
