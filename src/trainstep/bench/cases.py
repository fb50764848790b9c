"""Cases of attention, fused operators and collectives to measure: grids and named lists.

Imports no torch.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

from trainstep.base.errors import UsageError
from trainstep.base.operators import FUSED, AttentionImpl, FusedImpl, FusedOperator, Sizes
from trainstep.plan.communication import COLLECTIVES, CollectiveName

GridName = Literal["naive", "flash"]
ListName = Literal["leaderboard", "peers"]
ElementDtype = Literal["fp32", "fp16", "bf16"]
Grouping = Literal["one", "rows", "columns"]
ITEM_BYTES: Mapping[ElementDtype, int] = {"fp32": 4, "fp16": 2, "bf16": 2}


def expand(axes: Mapping[str, Sequence[Any]]) -> Iterator[dict[str, Any]]:
    """Every combination of the axes' values, as keyword arguments of a case, the last axis varying fastest."""
    for values in itertools.product(*axes.values()):
        yield dict(zip(axes, values, strict=True))


@dataclass(frozen=True)
class AttentionCase:
    """A cell of the grid: self-attention, as many keys as queries."""

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
    """Causal mask: yes if query i sees only the keys up to i."""
    dtype: ElementDtype = "bf16"
    """Type of q, k and v."""
    window: int = 0
    """Keys that a query sees, its own the last, where attention is causal; 0 for all."""
    deterministic: Literal["yes", "no"] = "no"
    """Determinism: yes if `torch.use_deterministic_algorithms` is on, for the same bits every time."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of q, k and v."""
        heads = (self.heads,) if self.heads else ()
        return (self.batch, *heads, self.seq, self.head_dim)

    @property
    def is_causal(self) -> bool:
        """`causal` as a truth value."""
        return self.causal == "yes"

    @property
    def is_deterministic(self) -> bool:
        """`deterministic` as a truth value."""
        return self.deterministic == "yes"

    @property
    def reach(self) -> int | None:
        """The window, None where it holds all keys."""
        return self.window if 0 < self.window < self.seq else None


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
        "impl": (
            *("eager", "eager-compiled", "flash-reference", "sdpa-efficient"),
            *("flash-triton", "sdpa-flash", "sdpa-cudnn", "flex"),
        ),
        "batch": (1,),
        "heads": (1,),
        "causal": ("yes",),
    },
}
"""The two studies of CS336's assignment 2: what the eager formula costs, and from which length flash attention wins."""

LONGEST: Mapping[AttentionImpl, int] = {"flash-reference": 2048}
"""Tokens up to which a named grid has what is there to be read: there a pass takes a third of a second on an H200, and
at each doubling four times as long."""

INTERPRETED: Mapping[str, Sequence[Any]] = {
    "heads": (2,),
    "seq": (100, 128),
    "head_dim": (64,),
    "dtype": ("fp32", "fp16"),
}
"""Cases that are checked in Triton's interpreter where nothing is said: a second or two each on two cores."""

LISTED = ("batch", "heads", "seq", "head_dim", "causal")
"""Settings that a list gives of a case."""

LISTS: Mapping[ListName, Sequence[tuple[int, int, int, int, Literal["yes", "no"]]]] = {
    "leaderboard": ((1, 16, 16384, 64, "yes"),),
    "peers": (
        (1, 16, 16384, 64, "yes"),
        (1, 32, 32768, 128, "yes"),
        (16, 16, 1024, 128, "yes"),
        (16, 32, 1024, 64, "yes"),
        (4, 16, 4096, 128, "yes"),
        (4, 16, 4096, 128, "no"),
        (1, 16, 16384, 128, "no"),
        (4, 32, 4096, 64, "yes"),
        (4, 32, 4096, 64, "no"),
        (4, 8, 4096, 256, "yes"),
    ),
}
"""Lists of what `LISTED` names: CS336's leaderboard case, and the shapes we compare ourselves on."""


def grid_cases(axes: Mapping[str, Sequence[Any]]) -> list[AttentionCase]:
    """Every combination of the axes.

    Raises:
        UsageError: a size that is not positive, or a window without causal attention.
    """
    cases = [AttentionCase(**values) for values in expand(axes)]
    for case in cases:
        sizes_fit = min(case.batch, case.seq, case.head_dim) >= 1 and min(case.heads, case.window) >= 0
        if not sizes_fit or (case.window and not case.is_causal):
            values = ", ".join(f"{name} {value}" for name, value in asdict(case).items())
            raise UsageError(
                f"impossible attention case ({values}); batch, seq and head_dim must be at least 1, heads and window "
                "0, and a window is causal (causal yes)"
            )
    return cases


def named_grid(name: GridName, given: Mapping[str, Sequence[Any]]) -> list[AttentionCase]:
    """The cases of a grid, with the axes that are given in place of its own; no case is beyond `LONGEST`, unless
    implementations are given.

    Raises:
        UsageError: a size that is not positive.
    """
    # Whoever names implementations wants all lengths of them; only the grid's own choice is cut short.
    cases = grid_cases({**GRIDS[name], **given})
    return cases if "impl" in given else [case for case in cases if case.seq <= LONGEST.get(case.impl, case.seq)]


def listed_cases(name: ListName, given: Mapping[str, Sequence[Any]]) -> list[AttentionCase]:
    """The shapes of a named list, each with every combination of the axes that are given.

    Raises:
        UsageError: an axis of the shapes, or a window, which not all of them can have.
    """
    if fixed := [axis for axis in given if axis in (*LISTED, "window")]:
        raise UsageError(
            f"--case {name} has shapes of its own, and --{fixed[0].replace('_', '-')} is given too; leave one of them "
            "out (--impl, --dtype and --deterministic apply to every shape of a list)"
        )
    shapes = itertools.product(LISTS[name], expand(given))
    return [AttentionCase(**dict(zip(LISTED, shape, strict=True)), **values) for shape, values in shapes]


FusedShape = Literal["tiny", "GPT-2", "small", "2.7B", "8B"]

FUSED_SHAPES: Mapping[FusedShape, Sizes] = {
    "tiny": Sizes(tokens=12, d_model=64, heads=4, vocab_size=301),
    "GPT-2": Sizes(tokens=8192, d_model=768, heads=12, vocab_size=50_257),
    "small": Sizes(tokens=16_384, d_model=768, heads=12, vocab_size=10_000),
    "2.7B": Sizes(tokens=8192, d_model=2560, heads=32, vocab_size=10_000),
    "8B": Sizes(tokens=32_768, d_model=4096, heads=32, vocab_size=151_936),
}
"""tiny is for Triton's interpreter; GPT-2's vocabulary is odd; 8B is the model of CS336's leaderboard of 2026 with its
context."""


@dataclass(frozen=True)
class FusedCase:
    """A cell of the grid: an operator of a decoder's step, forward and backward."""

    impl: FusedImpl = "ours"
    """Implementation; those that an operator does not have are left out."""
    operator: FusedOperator = "rope"
    """Operator to compute."""
    shape: FusedShape = "small"
    """Model that the sizes come from: tokens, d_model, heads and vocabulary."""
    dtype: ElementDtype = "bf16"
    """Type of all tensors."""

    @property
    def sizes(self) -> Sizes:
        """The numbers behind `shape`."""
        return FUSED_SHAPES[self.shape]


FUSED_AXES: Mapping[str, Sequence[Any]] = {
    "operator": tuple(FUSED),
    "shape": ("GPT-2", "small", "2.7B", "8B"),
    "dtype": ("bf16",),
    "impl": get_args(FusedImpl),
}
"""Axes that are measured where nothing is said: everything."""
FUSED_INTERPRETED: Mapping[str, Sequence[Any]] = {**FUSED_AXES, "shape": ("tiny",), "dtype": ("fp32", "fp16")}
"""The same where ours runs in Triton's interpreter."""


def fused_cases(axes: Mapping[str, Sequence[Any]]) -> list[FusedCase]:
    """Every combination of the axes that there is.

    Raises:
        UsageError: there is none.
    """
    cases = [FusedCase(**values) for values in expand(axes)]
    found = [case for case in cases if case.impl in FUSED[case.operator].forms]
    if not found:
        have = "; ".join(f"{name}: {', '.join(FUSED[name].forms)}" for name in axes["operator"])
        raise UsageError(f"no such implementation of these operators: {', '.join(axes['impl'])}; there are {have}")
    return found


@dataclass(frozen=True)
class CollectiveCase:
    """A cell of the grid."""

    collective: CollectiveName = "all-reduce"
    """Collective that the ranks call together."""
    world_size: int = 0
    """Ranks of a group; 0 for all that torchrun started."""
    dtype: ElementDtype = "fp32"
    """Type of the elements."""
    size_mb: float = 100.0
    """Megabytes (10^6 bytes) of the full tensor, which is reduced or sent, or comes out of a gather."""
    tensors: int = 1
    """Tensors of equal sizes that the payload is divided into. One call takes all of them, as training's calls take the
    gradients of a bucket. Gloo packs them for the journey."""
    groups: Grouping = "one"
    """one: the first ranks, the others waiting. rows and columns: all ranks, in groups of world-size that do the same
    at once. Rows are consecutive ranks, as those that divide a replica. Columns are ranks as far apart as can be, as
    those that average over replicas."""

    @property
    def elements(self) -> int:
        """Elements of all tensors: the largest number within the size that gives every rank an equal part of each."""
        # Rounded down to whole parts: a collective whose ranks hold unequal parts would be another one.
        parts = self.world_size * self.tensors
        return int(self.size_mb * 10**6) // ITEM_BYTES[self.dtype] // parts * parts

    @property
    def payload_bytes(self) -> int:
        """Bytes of the full tensor."""
        return self.elements * ITEM_BYTES[self.dtype]


COLLECTIVE_AXES: Mapping[str, Sequence[Any]] = {"collective": COLLECTIVES, "size_mb": (1.0, 10.0, 100.0, 1000.0)}
"""Axes whose defaults have several values."""


def collective_cases(axes: Mapping[str, Sequence[Any]], started: int) -> list[CollectiveCase]:
    """Every combination of the axes' values, for as many ranks as torchrun started.

    Raises:
        UsageError: more ranks than were started, ranks left over by groups, or a size too small to divide.
    """
    cases = [CollectiveCase(**values | {"world_size": values["world_size"] or started}) for values in expand(axes)]
    for case in cases:
        if not 1 <= case.world_size <= started:
            raise UsageError(
                f"world-size is {case.world_size}, and torchrun started {started} process"
                f"{'' if started == 1 else 'es'}; start as many as the largest (torchrun --nproc-per-node)"
            )
        if case.groups != "one" and case.world_size == started:
            raise UsageError(
                f"{case.groups} of {started} ranks are all that torchrun started, in one group; give a smaller "
                "--world-size, or --groups one"
            )
        if case.groups != "one" and started % case.world_size:
            raise UsageError(
                f"{case.groups} of {case.world_size} ranks cannot be made of the {started} that torchrun started; give "
                f"a --world-size that divides {started}, or --groups one"
            )
        if case.tensors < 1:
            raise UsageError(f"tensors is {case.tensors}; expected 1 or more")
        if case.tensors > 1 and case.collective == "broadcast":
            raise UsageError(
                "a broadcast sends one tensor, and tensors is more; give --collective all-reduce,all-gather,"
                "reduce-scatter besides --tensors"
            )
        if case.elements < 1:
            raise UsageError(
                f"size-mb is {case.size_mb:g}, less than one element of each tensor for each of {case.world_size} "
                "ranks; give megabytes, such as 1,10,100"
            )
    return cases
