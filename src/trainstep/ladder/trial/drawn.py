"""Batches that are drawn at random, such as augmented images: each draws from a seed of its own, made of its indices.

So a batch is the same in whichever process it is loaded, and those that follow draw nothing else for it. The generators
are those of torch, NumPy and Python, and all that the data set holds. An iterator leaves a generator alone that its
first batch drew nothing from.
"""

from __future__ import annotations

import functools
import gc
import random
import sys
import zlib
from collections import deque
from collections.abc import Callable
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch.utils.data._utils.fetch import _MapDatasetFetcher

MOST_OBJECTS = 2**14
"""Objects that a data set is looked into for generators."""
ATOMS = (int, float, str, bytes, type(None), type, ModuleType, torch.Tensor)
Generator = tuple[Callable[[], Any], Callable[[Any], object], Callable[[int], object]]
"""A generator of random numbers as functions that tell its state, set it, and seed it."""


def draw_by_indices(seed: int, tell: Callable[[], object]) -> None:
    """Have each batch of a map-style data set draw so.

    Args:
        seed: of the run.
        tell: called in the process of an iterator whose first batch is seen to draw.
    """
    original: Callable[..., Any] = _MapDatasetFetcher.fetch

    def fetch(self: Any, indices: Any) -> Any:
        known: list[Generator] | None = vars(self).get("drawn")
        generators = generators_of(self.dataset) if known is None else known
        before = [state() for state, _, _ in generators]
        for _, _, begin in generators:
            begin(zlib.crc32(f"{seed} {indices}".encode()))
        begun = [_words(state()) for state, _, _ in generators] if known is None else []
        try:
            return original(self, indices)
        finally:
            if known is None:
                self.drawn = [each for each, first in zip(generators, begun, strict=True) if _words(each[0]()) != first]
                if self.drawn:
                    tell()
            for (_, restore, _), state in zip(generators, before, strict=True):
                restore(state)

    _MapDatasetFetcher.fetch = fetch  # type: ignore[method-assign]


def generators_of(data: Any) -> list[Generator]:
    """Generators of the process, of the data set's module, and inside of the data set."""
    found, ahead, seen = dict[int, Generator](), deque([random._inst, torch.default_generator, data]), set[int]()
    if "numpy.random" in sys.modules:
        ahead.append(sys.modules["numpy.random"].mtrand._rand)
    ahead += [each for each in vars(sys.modules[type(data).__module__]).values() if _generator(each)]
    while ahead and len(seen) < MOST_OBJECTS:
        each = ahead.popleft()
        if id(each) in seen or isinstance(each, ATOMS):
            continue
        seen.add(id(each))
        if (own := _generator(each)) is not None:
            found[id(each)] = own
        else:
            ahead += each.__closure__ or () if isinstance(each, FunctionType) else gc.get_referents(each)
    return list(found.values())


def _words(state: Any) -> str:
    return repr(state.tolist() if isinstance(state, torch.Tensor) else state)


def _generator(value: Any) -> Generator | None:
    if isinstance(value, random.Random) and not isinstance(value, random.SystemRandom):
        return value.getstate, value.setstate, value.seed
    if isinstance(value, torch.Generator):
        return value.get_state, value.set_state, value.manual_seed
    if type(value).__module__.startswith("numpy.random") and hasattr(value, "seed"):
        return value.get_state, value.set_state, value.seed
    if (bits := getattr(value, "bit_generator", None)) is None:
        return None
    put = functools.partial(setattr, bits, "state")
    return lambda: bits.state, put, lambda seed: put(type(bits)(seed).state)
