"""The row sums of softmax's backward in 16 bits, as fused attention has them: of outputs that were rounded.

Softmax's backward is dS = P · (dP − δ), with one sum δ for a row. The formula takes δ = Σ P · dP over the keys, from
the very dP that it subtracts it from, so that a row of dS sums to nothing whatever dP was rounded to. Fused attention
takes δ = Σ dO · O over the features of a head, from the output that it gave away, in 16 bits: its row of dS is off by
one and the same part of P for all keys. Where all queries have a direction in common, as in late blocks, gradients of
keys have that error along it, and next to nothing else.

It is taken as it is, not drawn: where tokens are much alike, so are their outputs, and all are rounded alike. Random
roundings would cancel over thousands of queries, and these do not.

Which output belongs to a softmax is found by what operators read: the product after a softmax of as many numbers reads
the values, and the product of the output's gradient with the same values comes right before softmax's backward.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from trainstep.casting import matmul_precision

_aten = torch.ops.aten


class NarrowOutputs:
    """Sees the operators of a forward and a backward pass, and knows how far the row sums between them are off.

    Args:
        dtype: the 16 bits that outputs are given away in.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._weights = 0  # numbers of the last softmax, until its product with values
        self._off: dict[int, Tensor] = {}  # outputs, by where their values lie, until their gradient comes
        self._errors: Tensor | None = None  # of the row sums that come next

    def see(self, operator: Any, args: Any, result: Any) -> None:
        """Take notice of an operator that has run."""
        if operator is _aten._softmax:
            self._weights = result.numel()
        elif operator is _aten.bmm and result.dtype == self._dtype:
            left, right = args[:2]
            if left.numel() == self._weights:
                with matmul_precision("tf32"):  # holds 16 bits, and sums in float32
                    exact = left.float() @ right.float()
                self._off[right.data_ptr()], self._weights = exact.to(self._dtype) - exact, 0
            elif (off := self._off.pop(right.data_ptr(), None)) is not None and off.shape == left.shape:
                self._errors = (left * off).sum(-1)

    def row_errors(self, output: Tensor, dim: int) -> Tensor | None:
        """How far each row sum of this softmax's backward is off, (…, queries, 1) in float32; None where the softmax
        is not attention's."""
        errors, self._errors = self._errors, None
        is_last = dim % output.dim() == output.dim() - 1
        if errors is None or not is_last or errors.numel() * output.shape[-1] != output.numel():
            return None
        return errors.view(*output.shape[:-1], 1)
