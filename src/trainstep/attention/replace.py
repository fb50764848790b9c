"""A model's own calls of `F.scaled_dot_product_attention`, sent to one of our implementations for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from trainstep.attention.api import attention
from trainstep.errors import UnsupportedError


@dataclass
class Replaced:
    """What was seen while the replacement stood."""

    calls: int = 0


@contextmanager
def sdpa_replaced(impl: str) -> Iterator[Replaced]:
    """While entered, `torch.nn.functional.scaled_dot_product_attention` runs `attention(..., impl=impl)`.

    A module that took the function itself (`from torch.nn.functional import scaled_dot_product_attention`) is not
    reached: `calls` stays 0. Not for use from several threads.

    Raises:
        UnsupportedError: from the call, if it has a mask or dropout, which our implementations do not take.
    """
    seen = Replaced()
    original = F.scaled_dot_product_attention

    def replacement(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        if attn_mask is not None or dropout_p:
            raise UnsupportedError(
                f"the model calls scaled_dot_product_attention with {'a mask' if dropout_p == 0 else 'dropout'}, which "
                f"impl={impl!r} does not take; causal attention without dropout it does (is_causal=True)"
            )
        seen.calls += 1
        return attention(query, key, value, is_causal=is_causal, scale=scale, impl=impl)

    F.scaled_dot_product_attention = replacement
    try:
        yield seen
    finally:
        F.scaled_dot_product_attention = original
