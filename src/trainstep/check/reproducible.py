"""Does a workload compute the same twice? What does not can be held against nothing, and is not called wrong for it.

A workload is built twice from one seed, which torch, numpy and `random` all start from. Then it has the same weights,
gets the same batches, and makes the same gradients of them, unless it draws from a generator of its own. Other weights
or gradients make every comparison void. Other batches need not: all sides are then given the same one.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from trainstep.base.errors import UnsupportedError
from trainstep.base.precision import PrecisionName
from trainstep.base.tolerance import REPEATS, ROUNDINGS, one_rounding
from trainstep.check.gradients import Gradients, Rounding

SEEDS = "torch, numpy and `random` are seeded before the factory is called; seed any other generator there"


class NotReproducibleError(UnsupportedError):
    """Two builds of a workload from one seed are not alike."""


def check_same_weights(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> None:
    """Raise `NotReproducibleError` where two builds have other parameters or buffers."""
    unlike = [name for name, value in first.items() if name not in second or not _equal(value, second[name])]
    if unlike or len(first) != len(second):
        which = unlike[0] if unlike else "some"
        raise NotReproducibleError(f"not reproducible: built twice from one seed, {which} has other values; {SEEDS}")


def check_same_gradients(first: Gradients, second: Gradients, precision: PrecisionName) -> None:
    """Raise `NotReproducibleError` where the same weights and batch gave other gradients."""
    apart = Rounding.between(second, first).relative(first)
    if not apart <= max(REPEATS, ROUNDINGS * one_rounding(precision)) or first.by_name.keys() != second.by_name.keys():
        raise NotReproducibleError(
            f"not reproducible: the same weights and batch gave gradients that are {apart:.2g} apart; {SEEDS}"
        )


def _equal(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and torch.equal(one.to(other.device).nan_to_num(), other.nan_to_num())
