"""Results of a block's operations that are kept where all else of the block is computed again in backward.

`torch.utils.checkpoint` takes two contexts, one for the first run and one for the other. Torch's own
(`create_selective_checkpoint_contexts`) ask a policy about every operation of both runs; compiled code has those, as
the compiler knows them. Eager code has modes of our own, which ask about the operators alone of which something is
kept: of a block's hundred operations most are counted and passed on, and the host, which often sets the pace of eager
code, is free again sooner.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import SAC_IGNORED_OPS, CheckpointPolicy, create_selective_checkpoint_contexts

from trainstep.base.errors import UsageError

_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "linear", "convolution", "_grouped_mm")
_PREFIXES = ("_scaled_dot_product", "_flash_attention_forward", "_efficient_attention_forward", "trainstep::flash")
_IGNORED = frozenset(map(id, SAC_IGNORED_OPS))
"""Operations that torch's checkpointing itself calls, more often in one run than in the other. Told by their identity:
operators live as long as torch does, and to hash one takes longer than to count it."""

_CASTS = frozenset([id(torch.ops.aten._to_copy.default)])
"""Autocast may have cached a weight's cast in one run of a block that is called twice, and not in the other."""


class Keeping:
    """Choice of the results to keep.

    Args:
        names: operators with their numbers, as `BlockPolicy.kept` has them; None keeps all matrix products and fused
            attention, ours included.
    """

    def __init__(self, names: tuple[str, ...] | None) -> None:
        self.names = names
        self._numbers: defaultdict[str, set[int]] = defaultdict(set)
        for name in names or ():
            operator, _, number = name.rpartition("#")
            self._numbers[operator].add(int(number))
        self._operators: dict[int, str | None] = {}

    def operator(self, operation: Any) -> str | None:
        """The operator's name, if any result of it may be kept."""
        key = id(operation)
        if key not in self._operators:
            name = operator_name(operation)
            looked_at = is_product(name) if self.names is None else name in self._numbers
            self._operators[key] = name if looked_at else None
        return self._operators[key]

    def keeps(self, operator: str, number: int, call: tuple[Any, Sequence[Any], Mapping[str, Any]]) -> bool:
        """True if the result of an operator's call of this number, (operation, args, kwargs), is kept."""
        return (self.names is None or number in self._numbers[operator]) and can_be_kept(*call)


class _Held:
    """A result, detached: no graph hangs on it, and as a view it can be given back. A change in place is told."""

    def __init__(self, result: Any) -> None:
        self._version: int | None = None
        if isinstance(result, Tensor):
            with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
                result = result.detach()  # with the version counter of what it is a view of
            self._version = result._version
        self._result = result

    def get(self) -> Any:
        if self._version is not None and self._result._version != self._version:
            raise RuntimeError("a result that a checkpointed block keeps has been changed in place")
        return self._result


class FirstRun(TorchDispatchMode):
    """Around the first run of one call of a block: detaches what is kept and holds it for the other."""

    def __init__(self, keeping: Keeping) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.keeping = keeping
        self.counts: defaultdict[str, int] = defaultdict(int)  # of those of which something is kept, by name
        self.ran: defaultdict[int, int] = defaultdict(int)  # of all operations
        self.held: dict[tuple[str, int], Any] = {}  # None once it was used

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compiled code inside is called as it is, as under torch's own contexts."""
        return True

    def contexts(self) -> tuple[TorchDispatchMode, TorchDispatchMode]:
        """Contexts that `torch.utils.checkpoint` enters around the first run, and around the other."""
        return self, _Again(self)

    def check(self, block: str) -> None:
        """After the first run.

        Raises:
            UsageError: an operation whose result is to be kept did not run.
        """
        for name in sorted(self.keeping.names or ()):
            operator, _, number = name.rpartition("#")
            if int(number) >= (count := self.counts.get(operator, 0)):
                raise UsageError(
                    f"the checkpointing policy keeps {name} of {block}, which runs {operator} {count} times; make the "
                    "policy for this model, attention and precision"
                )

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if (key := id(func)) in _IGNORED:
            return result
        self.ran[key] += 1
        operator = self.keeping.operator(func)
        if operator is not None:
            number = self.counts[operator]
            self.counts[operator] += 1
            if self.keeping.keeps(operator, number, (func, args, kwargs or {})):
                self.held[operator, number] = tree_map(_Held, result)
        return result


class _Again(TorchDispatchMode):
    """Around the run in backward: gives back what is held."""

    def __init__(self, first: FirstRun) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._first = first
        self._counts: defaultdict[str, int] = defaultdict(int)
        self._ran: defaultdict[int, int] = defaultdict(int)

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __enter__(self) -> Any:
        self._counts.clear()
        self._ran.clear()
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (key := id(func)) in _IGNORED:
            return func(*args, **(kwargs or {}))
        self._ran[key] += 1
        operator = self._first.keeping.operator(func)
        may_differ = operator is None and key in _CASTS
        if self._ran[key] > (before := self._first.ran.get(key, 0)) and not may_differ:
            ran = f"{operator_name(func)} ran {before} times in forward, and runs again in backward"
            raise RuntimeError(f"{ran}: the block does something else than it did")
        if operator is None:
            return func(*args, **(kwargs or {}))
        number = self._counts[operator]
        self._counts[operator] += 1
        if (operator, number) not in self._first.held:
            return func(*args, **(kwargs or {}))
        held, self._first.held[operator, number] = self._first.held[operator, number], None
        if held is None:
            raise RuntimeError("backward came to a checkpointed block again, where what it keeps was used already")
        return tree_map(_Held.get, held)


def contexts_of(names: tuple[str, ...] | None) -> Any:
    """The same for compiled code: torch's own contexts. A function of plain values, which the compiler can read."""
    keeping = Keeping(names)
    counts: dict[bool, defaultdict[str, int]] = {False: defaultdict(int), True: defaultdict(int)}

    def choose(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        operator = keeping.operator(operation)
        if operator is None:
            return CheckpointPolicy.PREFER_RECOMPUTE
        number = counts[context.is_recompute][operator]
        counts[context.is_recompute][operator] += 1
        kept = keeping.keeps(operator, number, (operation, args, kwargs))
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(choose)


def operator_name(operation: Any) -> str:
    """Name of an operator in `BlockPolicy.kept`: `mm` for `aten::mm.default`, others with their library's name."""
    namespace, _, name = operation.name().partition("::")
    name = name.partition(".")[0]
    return name if namespace == "aten" else f"{namespace}::{name}"


def is_product(name: str) -> bool:
    """True if an operator, as `operator_name` writes it, is a matrix product or fused attention, ours included."""
    return name in _PRODUCTS or name.startswith(_PREFIXES)


def can_be_kept(operation: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """True if an operation's result may stand in for running it again.

    Not where it writes into memory that is there, as products in compiled code do: it may write there again. Nor where
    it draws random numbers: those drawn after it would be other ones, if it did not draw its own again.
    """
    if _writes(operation):
        return False
    if torch.Tag.nondeterministic_seeded not in getattr(operation, "tags", ()):
        return True
    names = [argument.name for argument in operation._schema.arguments]
    if "dropout_p" not in names:
        return False
    place = names.index("dropout_p")
    return not (args[place] if place < len(args) else kwargs.get("dropout_p", 0.0))


def _writes(operation: Any) -> bool:
    schema = getattr(operation, "_schema", None)  # operators of a higher order have none
    return schema is not None and schema.is_mutable
