"""Grids: axes with several values each → every combination, as keyword arguments of one case."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any


def expand(axes: Mapping[str, Sequence[Any]]) -> Iterator[dict[str, Any]]:
    """Every combination of the axes' values, the last axis varying fastest."""
    for values in itertools.product(*axes.values()):
        yield dict(zip(axes, values, strict=True))
