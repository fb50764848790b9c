"""Which attention cases there are to measure: single ones, and named grids and lists of shapes. Imports no torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from trainstep.bench.grid import expand
from trainstep.config import AttentionImpl
from trainstep.errors import UsageError

AttentionDtype = Literal["fp32", "fp16", "bf16"]
GridName = Literal["naive", "flash"]
ListName = Literal["leaderboard", "peers"]


@dataclass(frozen=True)
class AttentionCase:
    """One cell of the grid: self-attention, as many keys as queries."""

    impl: AttentionImpl = "flash-triton"
    """Attention implementation; an explicit one never falls back."""
    batch: int = 1
    """Sequences."""
    heads: int = 16
    """Heads; 0 for tensors without a head dimension, (batch, seq, head_dim)."""
    seq: int = 4096
    """Tokens per sequence."""
    head_dim: int = 64
    """Features per head."""
    causal: Literal["yes", "no"] = "yes"
    """Whether query i sees only the keys up to i."""
    dtype: AttentionDtype = "bf16"
    """Type of q, k and v."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Of q, k and v."""
        heads = (self.heads,) if self.heads else ()
        return (self.batch, *heads, self.seq, self.head_dim)

    @property
    def is_causal(self) -> bool:
        """`causal` as a truth value."""
        return self.causal == "yes"


FUSED: tuple[AttentionImpl, ...] = ("flash-triton", "sdpa-flash", "sdpa-cudnn", "flex")

GRIDS: Mapping[GridName, Mapping[str, Sequence[Any]]] = {
    "naive": {
        "head_dim": (16, 32, 64, 128),
        "seq": (256, 1024, 4096, 8192, 16384),
        "impl": ("eager", "eager-compiled"),
        "batch": (8,),
        "heads": (0,),
        "causal": ("no",),
        "dtype": ("fp32",),
    },
    "flash": {
        "dtype": ("bf16", "fp32"),
        "head_dim": (16, 32, 64, 128),
        "seq": tuple(2**power for power in range(7, 17)),
        "impl": ("eager", "eager-compiled", "flash-reference", "sdpa-efficient", *FUSED),
        "batch": (1,),
        "heads": (1,),
        "causal": ("yes",),
    },
}
"""The two studies of CS336's assignment 2: what the eager formula costs, and from which length flash attention wins."""

LISTS: Mapping[ListName, Sequence[tuple[int, int, int, int, Literal["yes", "no"]]]] = {
    "leaderboard": ((1, 16, 16384, 64, "yes"),),
    "peers": (
        (1, 16, 16384, 64, "yes"),
        (1, 32, 32768, 128, "yes"),
        (16, 16, 1024, 128, "yes"),
        (4, 16, 4096, 128, "yes"),
        (1, 16, 16384, 128, "no"),
        (4, 32, 4096, 64, "yes"),
        (4, 32, 4096, 64, "no"),
        (4, 8, 4096, 256, "yes"),
    ),
}
"""Lists of (batch, heads, seq, head_dim, causal): CS336's leaderboard case, and the shapes we compare ourselves on."""


def grid_cases(axes: Mapping[str, Sequence[Any]]) -> list[AttentionCase]:
    """Every combination of the axes.

    Raises:
        UsageError: a size that is not positive.
    """
    return [_checked(AttentionCase(**values)) for values in expand(axes)]


def listed_cases(
    name: ListName, impls: Sequence[AttentionImpl], dtypes: Sequence[AttentionDtype]
) -> list[AttentionCase]:
    """The shapes of a named list, each with every implementation and dtype."""
    return [
        AttentionCase(impl, batch, heads, seq, head_dim, causal, dtype)
        for batch, heads, seq, head_dim, causal in LISTS[name]
        for dtype in dtypes
        for impl in impls
    ]


def _checked(case: AttentionCase) -> AttentionCase:
    if min(case.batch, case.seq, case.head_dim) < 1 or case.heads < 0:
        values = ", ".join(f"{name} {value}" for name, value in dataclasses.asdict(case).items())
        raise UsageError(f"impossible attention case ({values}); batch, seq and head_dim must be at least 1, heads 0")
    return case
