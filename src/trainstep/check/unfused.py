"""Fused attention taken apart: its operators' results as the formula has them, one product after the other, so that
roundings inside of it can be drawn where they count.

PyTorch's own kernels compute float32's attention as exactly in TF32 as without it (seen on an H100), and others that
take their place do not: what these may be off by has to be drawn although the kernel that is there shows nothing of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_aten = torch.ops.aten
FORWARD = (_aten._scaled_dot_product_efficient_attention, _aten._scaled_dot_product_flash_attention_for_cpu)
BACKWARD = (
    _aten._scaled_dot_product_efficient_attention_backward,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward,
)
"""Backward operators of fused attention that takes float32."""
MOST_SCORES = 2**26
"""Scores that are held at once; of longer contexts it is some queries' at a time."""


def overwrite(operator: Any, args: Any, kwargs: Mapping[str, Any], result: Any) -> None:
    """Write what the formula gives over the output or the three gradients of a fused operator.

    Args:
        operator: one overload of `FORWARD` or `BACKWARD`.
        args: its own, as are `kwargs`.
        result: what it gave. Stays where something is dropped, which only the kernel knows.
    """
    call = _Call.of(_named_arguments(operator, args, kwargs))
    if call.drops:
        return
    if operator.overloadpacket in FORWARD:
        for batch, rows in call.parts():
            weights, value = call.weights(batch, rows), call.of_keys(call.value, batch)
            result[0][batch, :, rows] = call.by_head(torch.bmm(weights, value), batch)
    else:
        for each in result[:3]:
            if each is not None:  # as where nobody asked for it
                each.zero_()
        for batch, rows in call.parts():
            of_query, of_key, of_value = call.backward(batch, rows)
            for place, part in ((0, of_query), (1, of_key), (2, of_value)):
                if result[place] is not None:
                    result[place][batch, :, slice(None) if place else rows] += part


def _named_arguments(operator: Any, args: Any, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """All arguments of a call, by their names without underscores at the end."""
    schema = operator._schema.arguments
    defaults = {each.name: each.default_value for each in schema if each.has_default_value()}
    given = {each.name: value for each, value in zip(schema, args, strict=False)}
    return {name.rstrip("_"): value for name, value in (defaults | given | dict(kwargs)).items()}


@dataclass(frozen=True)
class _Call:
    """Inputs of attention: (batch, heads, tokens, head_dim); of keys and values there may be fewer heads."""

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None  # that is added to scores
    gradient: Tensor | None
    is_causal: bool
    scale: float
    drops: bool

    @staticmethod
    def of(named: Mapping[str, Any]) -> _Call:
        query, scale = named["query"], named["scale"]
        return _Call(
            query=query,
            key=named["key"],
            value=named["value"],
            mask=named.get("attn_bias", named.get("attn_mask")),
            gradient=named.get("grad_out"),
            is_causal=named["is_causal"],
            scale=query.shape[-1] ** -0.5 if scale is None else scale,
            drops=named["dropout_p"] > 0,
        )

    def parts(self) -> Iterator[tuple[slice, slice]]:
        """Parts of the batch and of the queries, with at most `MOST_SCORES` scores each."""
        batch, heads, queries, _ = self.query.shape
        of_one = heads * self.key.shape[-2]
        rows = max(1, min(queries, MOST_SCORES // of_one))
        samples = max(1, MOST_SCORES // (of_one * rows))
        for first in range(0, batch, samples):
            for row in range(0, queries, rows):
                yield slice(first, first + samples), slice(row, row + rows)

    def of_keys(self, tensor: Tensor, batch: slice) -> Tensor:
        """Keys' or values', (batch · heads, keys, head_dim), once for each head of queries."""
        shared = self.query.shape[1] // tensor.shape[1]
        part = tensor[batch]
        return (part.repeat_interleave(shared, dim=1) if shared > 1 else part).flatten(0, 1)

    def by_head(self, tensor: Tensor, batch: slice) -> Tensor:
        """(batch · heads, …) → (batch, heads, …)."""
        return tensor.unflatten(0, (len(self.query[batch]), -1))

    def weights(self, batch: slice, rows: slice) -> Tensor:
        """softmax(q kᵀ · scale), (batch · heads, queries, keys); nothing where a query sees no key."""
        query, key = self.query[batch, :, rows].flatten(0, 1), self.of_keys(self.key, batch)
        scores = torch.bmm(query, key.mT) * self.scale
        if self.mask is not None:
            mask = self.mask.expand(*self.query.shape[:-1], key.shape[-2])[batch, :, rows].flatten(0, 1)
            scores = scores + mask
        if self.is_causal:
            numbers = torch.arange(self.query.shape[-2], device=query.device)[rows, None]
            scores = scores.masked_fill(torch.arange(key.shape[-2], device=query.device) > numbers, -torch.inf)
        weights: Tensor = _aten._softmax(scores, -1, False)  # as it is seen of the formula
        return weights if self.mask is None else weights.masked_fill((scores == -torch.inf).all(-1, keepdim=True), 0.0)

    def backward(self, batch: slice, rows: slice) -> tuple[Tensor, Tensor, Tensor]:
        """The gradients of these queries, and theirs of keys and values, (batch, heads, …)."""
        assert self.gradient is not None, "backward has the output's"
        gradient, value = self.gradient[batch, :, rows].flatten(0, 1), self.of_keys(self.value, batch)
        query, key = self.query[batch, :, rows].flatten(0, 1), self.of_keys(self.key, batch)
        weights = self.weights(batch, rows)
        torch.bmm(weights, value)  # what the sums of rows are taken from
        of_value = torch.bmm(weights.mT, gradient)
        of_scores = _aten._softmax_backward_data(torch.bmm(gradient, value.mT), weights, -1, weights.dtype)
        of_query, of_key = torch.bmm(of_scores, key), torch.bmm(of_scores.mT, query)
        of_query, of_key = of_query * self.scale, of_key * self.scale
        return self.by_head(of_query, batch), self._of_heads(of_key, batch), self._of_heads(of_value, batch)

    def _of_heads(self, gradient: Tensor, batch: slice) -> Tensor:
        """Summed over the heads of queries that share one of keys."""
        heads = self.key.shape[1]
        return self.by_head(gradient, batch).unflatten(1, (heads, -1)).sum(2)
