"""Random numbers of every generator that a workload may draw from: torch's, numpy's and Python's own."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch


class Source(Protocol):
    """Draws random numbers of its own, beside the model's."""

    def random_state(self) -> Any:
        """State of the generator."""

    def restore_random_state(self, state: Any) -> None:
        """Go on from there."""


DRAWING: list[Source] = []
"""Generators that draw at this moment: a call that runs again draws from them what it drew before."""


@dataclass(frozen=True)
class _Generator:
    """A generator of torch's, numpy's or Python's, by the functions that return its state and set it."""

    read: Callable[[], Any]
    write: Callable[[Any], object]

    def random_state(self) -> Any:
        return self.read()

    def restore_random_state(self, state: Any) -> None:
        self.write(state)


def source_of(value: Any) -> Source | None:
    """Return the source that a generator is, or a module with the functions of one; None for another object."""
    if isinstance(value, np.random.Generator):
        value = value.bit_generator
    if isinstance(value, np.random.BitGenerator):
        return _Generator(lambda: value.state, lambda state: setattr(value, "state", state))
    if (isinstance(value, random.Random) and not isinstance(value, random.SystemRandom)) or value is random:
        return _Generator(value.getstate, value.setstate)
    if isinstance(value, (torch.Generator, np.random.RandomState)) or value is np.random:
        return _Generator(value.get_state, value.set_state)
    return None


def is_same_state(a: Any, b: Any) -> bool:
    """Compare two states of one generator."""
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    try:
        return bool(a == b)  # Python's 625 numbers at once
    except ValueError:  # it holds an array
        if isinstance(a, np.ndarray):
            return np.array_equal(a, b)
        pairs = zip(a.values(), b.values(), strict=True) if isinstance(a, dict) else zip(a, b, strict=True)
        return all(is_same_state(one, other) for one, other in pairs)


def seed_everything(seed: int) -> None:
    """Start torch on every device, numpy and `random` from one seed."""
    if torch.backends.cuda.is_built():
        torch.manual_seed(seed)
    else:  # which takes a tenth of a millisecond to note the seed for GPUs that may be used later
        torch.default_generator.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)  # which takes no more


@contextmanager
def from_seed(seed: int, devices: Iterable[torch.device]) -> Iterator[None]:
    """Inside, all of them start from this seed; outside, they go on where they were.

    Args:
        devices: those whose generators are put back; of CPUs there is one.
    """
    gpus = sorted({device.index or 0 for device in devices if device.type == "cuda"})
    own, numpys = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(gpus):
        seed_everything(seed)
        try:
            yield
        finally:
            random.setstate(own)
            np.random.set_state(numpys)


def generator_states(devices: Iterable[torch.device]) -> list[bytes]:
    """States of torch's generators, on the CPU and on these devices."""
    states = [torch.get_rng_state(), *(torch.cuda.get_rng_state(each) for each in devices if each.type == "cuda")]
    return [state.numpy().tobytes() for state in states]


def host_states() -> list[Any]:
    """States of the generators on the host: torch's, numpy's and Python's."""
    return [torch.get_rng_state(), np.random.get_state(), random.getstate()]
