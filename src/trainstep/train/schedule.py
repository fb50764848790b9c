"""The learning rate: linear warm-up, then half a cosine (Loshchilov & Hutter 2017, without restarts)."""

from __future__ import annotations

import math


def learning_rate(step: int, *, peak: float, warmup: int, steps: int, floor: float) -> float:
    """The learning rate of update number `step`, from 1 to `steps`.

    It is peak · step / warmup up to the end of the warm-up, and then falls to peak · floor at the last update.

    Args:
        step: the number of the update, from 1.
        peak: the highest learning rate, that of update `warmup`.
        warmup: updates of linear warm-up; 0 for none.
        steps: updates in all.
        floor: the last update's learning rate, as a fraction of the peak.
    """
    assert 1 <= step <= steps, f"update {step} of {steps}"
    if step <= warmup:
        return peak * step / warmup
    progress = (step - warmup) / (steps - warmup)
    return peak * (floor + (1 - floor) * (1 + math.cos(math.pi * progress)) / 2)
