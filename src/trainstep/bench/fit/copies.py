"""Rates at which a GPU's memory is copied to page-locked host memory and back."""

from __future__ import annotations

import statistics
import time

import torch

SIZE, ROUNDS = 256 * 2**20, 5
"""Bytes of a copy, and how often it is made."""


def copy_rates(device: torch.device) -> tuple[float, float]:
    """Bytes per second to page-locked host memory and back, of a GPU."""
    here = torch.empty(SIZE, dtype=torch.uint8, device=device)
    there = torch.empty(SIZE, dtype=torch.uint8, pin_memory=True)
    rates = []
    for target, origin in ((there, here), (here, there)):
        samples = []
        for _ in range(ROUNDS):
            torch.cuda.synchronize(device)
            start = time.perf_counter()
            target.copy_(origin, non_blocking=True)
            torch.cuda.synchronize(device)
            samples.append(time.perf_counter() - start)
        rates.append(SIZE / statistics.median(samples))
    return rates[0], rates[1]
