"""Two computations of a model with dropout drop other elements, even from one seed: what a check does about it.

Compiled code draws other random numbers than eager code, unless it is compiled with eager code's (`eager_random`). On a
GPU the dropped elements depend on the dtype, and in fused attention on the kernel: then dropout is switched off on both
sides (`without_dropout`). Either way the code is compiled anew, since compiled code is kept by function, whatever it
was compiled under.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from trainstep.measure.outcome import release_memory

DROPOUTS = ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout")
SDPA = "scaled_dot_product_attention"


@contextmanager
def compiled_anew() -> Iterator[None]:
    """Drop what was compiled before on entry, and what was compiled inside on leaving."""
    release_memory()
    try:
        yield
    finally:
        release_memory()


@contextmanager
def eager_random() -> Iterator[None]:
    """Inside, what is compiled (anew) draws as eager code does, which is slower: for checks, not for times."""
    from torch._inductor import config as inductor

    with compiled_anew(), inductor.patch(fallback_random=True):
        yield


@dataclass
class Seen:
    """Calls that would have dropped something."""

    calls: int = 0
    """Calls of functions that drop; of those in compiled code one or all are counted."""
    elements: dict[float, int] = field(default_factory=dict)
    """By probability, from how many elements in forward passes; 0 in compiled code, where calls are not counted."""

    def note(self, p: float, elements: int) -> None:
        """A function would drop each of so many elements with this probability."""
        if p > 0:
            self.calls += 1
            # Calls of compiled code are not counted, and what backward computes again was counted before.
            is_counted = not torch.compiler.is_compiling() and torch._C._current_graph_task_id() < 0
            self.elements[p] = self.elements.get(p, 0) + (elements if is_counted else 0)


def drops_otherwise(own: Mapping[float, int], plain: Mapping[float, int], *, are_counted: bool) -> str:
    """Say how a step would have dropped something else than the plain one; empty where it would not.

    Args:
        own, plain: what each has `Seen.elements` of.
        are_counted: whether both are of one pass of eager code; else their probabilities alone are compared.
    """
    if own == plain or (not are_counted and own.keys() == plain.keys()):
        return ""
    said = [
        " and ".join(f"{each[p]:,} elements with p = {p:g}" for p in sorted(each)) or "nothing" for each in (own, plain)
    ]
    return f"drops from {said[0]} in a pass, and the plain step from {said[1]}"


@contextmanager
def without_dropout() -> Iterator[Seen]:
    """While entered, the dropout functions of `torch.nn.functional` drop nothing: those that modules of `torch.nn` call
    (not recurrent ones, whose dropout is their kernel's), and scaled_dot_product_attention's.

    A module that took a function itself (`from torch.nn.functional import dropout`) is not reached. What is compiled
    inside is compiled anew. Not for use from several threads.
    """
    seen = Seen()
    originals = {name: getattr(F, name) for name in (*DROPOUTS, SDPA)}
    with compiled_anew():
        try:
            for name in DROPOUTS:
                setattr(F, name, _identity(originals[name], seen))
            setattr(F, SDPA, _attention(originals[SDPA], seen))
            yield seen
        finally:
            for name, original in originals.items():
                setattr(F, name, original)


def _identity(dropout: Callable[..., Tensor], seen: Seen) -> Callable[..., Tensor]:
    default = inspect.signature(dropout).parameters["training"].default

    def identity(input: Tensor, p: float = 0.5, training: bool = default, inplace: bool = False) -> Tensor:
        seen.note(p if training else 0.0, input.numel())
        return input

    return identity


def _attention(sdpa: Callable[..., Tensor], seen: Seen) -> Callable[..., Tensor]:
    def attention(query: Tensor, key: Tensor, value: Tensor, attn_mask: Any = None, dropout_p: float = 0.0, *args: Any,
                  **more: Any) -> Tensor:  # fmt: skip
        seen.note(dropout_p, query.shape[:-1].numel() * key.shape[-2])
        return sdpa(query, key, value, attn_mask, 0.0, *args, **more)

    return attention
