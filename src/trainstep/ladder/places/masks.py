"""The masks of attention that a script writes out, as fused attention takes them.

A mask is causal if its values say so. On a GPU reading them would stop the host each time, so this is done until the
first update; afterwards the device itself checks that it still holds, and ends the run where it does not.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from trainstep.observe.lines import line_of_call

MASKED = -1e4
"""Largest value that masks: what is filled in or added where attention must not look is this or less: exp of it is 0
next to any usual score."""
_SUMS = ("add", "__add__", "__radd__", "add_", "__iadd__")


@dataclass(frozen=True)
class Mask:
    """A mask of a script."""

    tensor: Tensor
    fill: float | None  # what scores are where the mask, of bool, is true; None where it is added to them
    shows: bool = False  # whether true means that a score stays, as in torch.where

    def left_out(self) -> Tensor:
        """True where attention does not look; only of a mask with a fill."""
        return ~self.tensor if self.shows else self.tensor


class Masks:
    """Meaning of scripts' masks."""

    def __init__(self) -> None:
        self.is_first = True  # whether the first update is still to come
        self._causal: dict[tuple[Any, ...], bool] = {}

    def given(self, masks: Sequence[Mask], queries: int, keys: int, dtype: torch.dtype) -> tuple[Tensor | None, bool]:
        """`attn_mask` and `is_causal` for as many queries and keys, in the dtype of both."""
        if not masks:
            return None, False
        first, *others = masks
        if not others and self._is_causal(first, queries, keys):
            return None, True
        if not others and first.fill == -math.inf:
            return ~first.left_out(), False
        parts = [each.tensor if each.fill is None else _filled(each.left_out(), each.fill, dtype) for each in masks]
        total = sum(parts[1:], start=parts[0])
        return (total if total.dtype == dtype else total.clamp(min=torch.finfo(dtype).min).to(dtype)), False

    def _is_causal(self, mask: Mask, queries: int, keys: int) -> bool:
        tensor = mask.tensor
        if queries != keys or queries == 1 or (tensor.requires_grad and mask.fill is None):
            return False
        where = (line_of_call(), tuple(tensor.shape), tensor.dtype) if tensor.is_cuda else ()
        if tensor.is_cuda and not self.is_first:
            if not self._causal.get(where):
                return False
            torch._assert_async(_looks_back(mask, queries))
            return True
        found = bool(_looks_back(mask, queries))
        self._causal[where] = found and self._causal.get(where, True)
        return found


def _looks_back(mask: Mask, length: int) -> Tensor:
    """True if a mask leaves out what comes after, in each of its parts, and nothing else: one bool on its device."""
    after = torch.ones(length, length, dtype=torch.bool, device=mask.tensor.device).triu_(1)
    if mask.fill is not None:
        return (mask.left_out() == after).all()
    return torch.where(after, mask.tensor <= MASKED, mask.tensor == 0).all()


def _filled(left_out: Tensor, fill: float, dtype: torch.dtype) -> Tensor:
    least = fill if fill == -math.inf else max(fill, torch.finfo(dtype).min)
    return torch.zeros(left_out.shape, dtype=dtype, device=left_out.device).masked_fill_(left_out, least)


def is_number(value: Any) -> bool:
    """True if a value is a Python number."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _number(value: Any) -> float | None:
    """A Python number, or a tensor of one on the host."""
    if type(value) is Tensor and value.dim() == 0 and value.device.type == "cpu" and not value.requires_grad:
        return float(value)
    return float(value) if is_number(value) else None


def mask_of(own: Tensor, name: str, args: Any) -> Mask | None:
    """The mask that a call puts on scores; None where it puts on none."""
    mask: Mask | None = None
    if name in ("masked_fill", "masked_fill_") and len(args) == 3 and args[0] is own:
        mask = Mask(args[1], _number(args[2]))
    elif name == "where" and len(args) == 3:
        shown = args[1] is own  # torch.where(mask, scores, fill), or the other way round
        mask = Mask(args[0], _number(args[2] if shown else args[1]), shows=shown)
    elif name in _SUMS and len(args) == 2:
        mask = Mask(args[1] if args[0] is own else args[0], None)
    if (
        mask is None
        or type(mask.tensor) not in (Tensor, nn.Parameter)
        or mask.tensor.device != own.device
        or not mask.tensor.dim()
    ):
        return None
    if name not in _SUMS and (mask.tensor.dtype != torch.bool or mask.fill is None or mask.fill > MASKED):
        return None
    if name in _SUMS and not mask.tensor.is_floating_point():
        return None
    shape = mask.tensor.shape
    fits = len(shape) <= own.dim() and all(
        one in (1, other) for one, other in zip(reversed(shape), reversed(own.shape), strict=False)
    )
    return mask if fits else None
