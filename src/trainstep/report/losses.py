"""Do two rows train alike? Their losses, step by step, held against what rounding may do to them.

Of one seed, two forms of one training start from the same weights and see the same batches, warm-up included. Rounding
takes their losses apart in two ways. A loss is a mean over the batch's tokens, each off independently, so it is off by
that over the square root of their number. And gradients are off by a part of themselves, so updates are, and so is what
training has made of the loss so far: a step that never updates is off by all of that. Either part is what checks allow
a single number, `tolerance.headroom` times one rounding, of the coarser of the two precisions.

Losses within this budget are a necessary sign and no proof: the gradient of one parameter that is dropped, or a weight
decay that is left out, may move them by less than rounding does. `check.step` judges gradients and updates.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

from trainstep.base.precision import PRECISIONS
from trainstep.base.tolerance import FLOAT32_LOSES, VACUOUS, headroom
from trainstep.report.numbers import number
from trainstep.rows.records import Row

WRITTEN = 1e-5
"""By how much two numbers that files have with six significant digits may seem apart, relative."""
NOT_TRAINING = ("forward", "forward-backward")
"""Modes that update nothing, so that losses are of the initial weights throughout."""


@dataclass(slots=True)  # not frozen, which takes twice the time to make
class Losses:
    """Distance between the losses of two rows, at the step that uses most of what is allowed."""

    difference: float | None = None
    """Relative to the old one; infinite if either is not finite. None where they cannot be compared."""
    allowed: float | None = None
    """The same of what rounding may do."""
    not_told: str = ""
    """Reason why they do not tell whether both train alike; empty where they do."""

    @property
    def differ(self) -> bool:
        """True if they are further apart than rounding may take them."""
        return self.difference is not None and self.allowed is not None and not self.difference <= self.allowed

    @property
    def severity(self) -> tuple[bool, bool, float, float]:
        """Larger where it is worse: losses that differ, then those that do not tell, then those that are near it."""
        if self.difference is None or self.allowed is None:
            return False, True, 0.0, 0.0
        return self.differ, bool(self.not_told), self.difference / self.allowed, self.allowed


def tokens_of(row: Row) -> float | None:
    """Tokens per step, to five digits, or a script's samples; None where a row does not say."""
    names = ("samples_per_step", "tokens", "done", "tokens_per_s", "step_ms")
    samples, tokens, done, per_second, step_ms = (getattr(row, name, None) for name in names)
    if samples is not None:
        return samples
    if tokens and done:  # of a training
        return tokens / done
    return None if per_second is None or step_ms is None else per_second * step_ms / 1e3


def hold(old: Row, new: Row) -> Losses:
    """Hold the losses of `new` against those of `old`, as far as both have them."""
    if why_not := _incomparable(old, new):
        return Losses(not_told=why_not)
    before, after = old.samples["training_loss"], new.samples["training_loss"]
    part = max(_part(str(old.case["precision"])), _part(str(new.case["precision"])))
    of_tokens = 1 / math.sqrt(tokens_of(old) or 1.0)
    moved, used, parts = 0.0, list[tuple[float, float, float]](), list[tuple[float, float]]()
    for expected, own in zip(before, after, strict=False):
        if expected is None or own is None or not math.isfinite(expected - own):
            return Losses(math.inf, WRITTEN)
        size, change = abs(expected) or 1.0, abs(expected - before[0])
        moved = change if change > moved else moved  # `max` takes three times as long, and files have millions
        allowed = part * (abs(expected) * of_tokens + moved) / size + WRITTEN
        difference = abs(expected - own) / size
        used.append((difference / allowed, allowed, difference))
        parts.append((moved / size, allowed))
    _, allowed, difference = max(used)  # where the most of what is allowed is used
    if difference > allowed:
        return Losses(difference, allowed)
    return Losses(difference, allowed, _not_checked(old, new) or _too_little(old, *max(parts)))


def _incomparable(old: Row, new: Row) -> str:
    """Reason why the two are no losses of the same batches and weights; empty where they are."""
    seed, other = old.case.get("seed"), new.case.get("seed")
    if seed != other:
        return f"seeds {number(seed)} and {number(other)}"
    for which, row in (("old", old), ("new", new)):
        if not row.samples.get("training_loss"):
            return f"no losses in the {which} row"
        if getattr(row, "batches", None):
            return "every build has other batches"
        if getattr(row, "compared", None):
            return "random numbers differ"
        if row.case.get("precision") not in PRECISIONS:
            return f"the {which} row's precision is unknown"
    return ""


@cache
def _part(name: str) -> float:
    """The part of a single number that a precision may take it off by."""
    return headroom(1) * PRECISIONS[name].one_rounding * (FLOAT32_LOSES if name == "fp32" else 1.0)


def _not_checked(old: Row, new: Row) -> str:
    """Say which row was not checked by itself, and why; empty where both were."""
    for which, row in (("old", old), ("new", new)):
        if reason := getattr(row, "not_checked", None):
            return f"{which} row: {reason}"
    return ""


def _too_little(old: Row, moved: float, allowed: float) -> str:
    """Note for training that moved losses so little that a step that never updates may be within the budget.

    Args:
        moved: by the most, relative to a loss.
        allowed: there.
    """
    if old.case.get("mode") in NOT_TRAINING or allowed < VACUOUS * moved:
        return ""
    return f"training moved the loss by {number(moved, 2)}, of {number(allowed, 2)} allowed"
