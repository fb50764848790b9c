"""The row sums of softmax's backward as fused attention has them, in TF32 and in 16 bits: of the output.

Softmax's backward is dS = P · (dP − δ), with one sum δ for a row. The formula takes δ = Σ P · dP over the keys, from
the very dP that it subtracts it from, so that a row of dS sums to nothing whatever dP was rounded to. Fused attention
takes δ = Σ dO · O over the features of a head, and its row of dS is off by one and the same part of P for all keys:

- in 16 bits, by what the output was rounded by when it was given away;
- in TF32, by what P was rounded by in the output, and dO in dP.

Where all queries have a direction in common, as in late blocks, gradients of keys have that error along it, and next to
nothing else. It is taken as it is, not drawn: where tokens are much alike, so are their outputs, and all are rounded
alike. Random roundings would cancel over thousands of queries, and these do not.

Which output belongs to a softmax is found by what operators read: the product after a softmax of as many numbers reads
the values, and the product of the output's gradient with the same values comes right before softmax's backward.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from trainstep.step.casting import in_tf32, matmul_precision

_aten = torch.ops.aten


class RowSums:
    """Sees the operators of a forward and a backward pass, and knows how far the row sums between them are off.

    Args:
        dtype: of outputs that are given away: 16 bits, or float32 for products in TF32.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._weights: int | None = None  # numbers of the last softmax, until its product with values
        self._outputs: dict[int, tuple[Tensor, Tensor]] = {}
        """By where their values lie, until their gradient comes: outputs, and what they are off by."""
        self._errors: Tensor | None = None  # of the row sums that come next

    def see(self, operator: Any, args: Any, result: Any) -> None:
        """Take notice of an operator that has run."""
        if operator is _aten._softmax:
            self._weights = result.numel()
        elif operator is _aten.bmm and result.dtype == self._dtype:
            left, right = args
            if left.numel() == self._weights:
                self._outputs[right.data_ptr()], self._weights = (result, self._off(left, right)), None
            elif (known := self._outputs.pop(right.data_ptr(), None)) is not None:
                self._errors = self._of_rows(left, *known)

    def _of_rows(self, gradient: Tensor, output: Tensor, off: Tensor) -> Tensor | None:
        if gradient.shape != output.shape:  # something else was multiplied by the values
            return None
        errors = (gradient * off).sum(-1)
        if self._dtype == torch.float32:
            errors -= ((in_tf32(gradient) - gradient) * output).sum(-1)
        return errors

    def _off(self, weights: Tensor, values: Tensor) -> Tensor:
        """Error of the output, of what the row sum is taken from besides."""
        with matmul_precision("tf32"):  # holds 16 bits, and sums in float32
            if self._dtype == torch.float32:
                return (in_tf32(weights) - weights) @ values
            exact = weights.float() @ values.float()
        return exact.to(self._dtype) - exact

    def row_errors(self, output: Tensor, dim: int) -> Tensor | None:
        """Errors of each row sum of this softmax's backward, (…, queries, 1) in float32; None where the softmax is not
        attention's."""
        errors, self._errors = self._errors, None
        is_last = dim % output.dim() == output.dim() - 1
        if errors is None or not is_last or errors.numel() * output.shape[-1] != output.numel():
            return None
        return errors.view(*output.shape[:-1], 1)
