"""Cost of measuring a step: the same very short steps with the hooks and without them.

They are taken when the script is done, so that it sees nothing of them, neither time nor random numbers. A script's
step costs about as much if it has as many phases, and more for every part of an accumulated one.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

STEPS, LEFT_OUT = 25, 5
PAIRS = 5


def cost_of_a_step(with_hooks: Callable[[Callable[[], object]], object]) -> float | None:
    """Milliseconds: the fastest run with hooks less the fastest without; None where noise hides what is between them.

    Runs are taken in turns, as a machine that is busy with other work slows whole runs down.

    Args:
        with_hooks: makes a call under the hooks.
    """
    without: list[float] = []
    under: list[float] = []
    with torch.random.fork_rng(devices=[]), torch.enable_grad(), torch.device("cpu"):
        for _ in range(PAIRS):
            without.append(_median_of_steps())
            with_hooks(lambda: under.append(_median_of_steps()))
    cost = min(under) - min(without)
    return cost if cost > 0 else None


def _median_of_steps() -> float:
    """The median of some steps of a tiny model, in milliseconds."""
    model = nn.Linear(2, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
    taken = []
    start = time.perf_counter()
    for (x,) in DataLoader(TensorDataset(torch.zeros(STEPS, 2)), batch_size=1):
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        end = time.perf_counter()
        taken.append((end - start) * 1e3)
        start = end
    return statistics.median(taken[LEFT_OUT:])
