"""Activation checkpointing of a module's blocks, from outside: what forward keeps, and what backward computes again.

Chen et al. 2016 (arXiv:1604.06174): keep the inputs of segments of the network, and run a segment again when backward
reaches it. The segments are blocks. Each policy replaces the blocks' `forward`; no
module is added or renamed, so parameters keep their names, and hooks and compilation apply as before.

A group of several blocks is run by the call of its first block; the calls of the others hand on what they get. That is
the same computation only if the model passes each block's output straight to the next, with the same further arguments.
Each call checks it (compiled code excepted, where tensors have no identity to check).

A `Policy` says of each block by itself what it keeps, computes again, or sends to host memory (`trainstep.offloading`).

A block is run again in the state in which it ran first (`trainstep.repeating`): with the random numbers, the key-value
cache and the attributes of then. So loss and gradients are the same, bit for bit where the kernels are deterministic.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointError, CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from trainstep.blocks import find_stacks
from trainstep.config import blocks_per_checkpoint
from trainstep.errors import UnsupportedError, UsageError
from trainstep.offloading import Offloading
from trainstep.policies import Policy, policy_of
from trainstep.repeating import Repeated, unrepeatable

Forward = Callable[..., Any]


class Checkpointing:
    """`module`, its blocks keeping their activations as `policy` says.

    Args:
        module: anything with blocks in an `nn.ModuleList` (see `find_blocks`), not yet checkpointed. `block.compile()`
            and `module.compile()` come before.
        policy: "none", "every-K", "selective", "recursive", "@FILE", or a `Policy`.

    Raises:
        UsageError: no such policy, or one of blocks that the module does not have.
        UnsupportedError: the module has no blocks, or is compiled as a whole and sends activations to host memory.
    """

    def __init__(self, module: nn.Module, policy: str | Policy) -> None:
        self._latest = ""  # the block that was run again last
        self._groups: list[_Group] = []
        self.offloading = Offloading()
        if isinstance(policy, str):
            size, of_each = blocks_per_checkpoint(policy), policy_of(policy)
        else:
            size, of_each = None, policy
        self.policy: Policy | None = of_each
        """What each block does by itself; None where all do alike."""
        if policy == "none":
            return
        stacks = find_stacks(module)
        if not stacks:
            missing = "needs blocks in an nn.ModuleList, and this module has none; use none"
            raise UnsupportedError(f"checkpointing={policy} {missing}")
        names = {block: name for name, block in module.named_modules()}
        if of_each is not None:
            self._apply(module, of_each, {names[block]: block for stack in stacks for block in stack})
            return
        for stack in stacks:
            per_group = 1 if policy == "selective" else len(stack) if policy == "recursive" else size
            assert per_group is not None, f"policy {policy} has no size"
            for start in range(0, len(stack), per_group):
                part = {names[block]: block for block in stack[start : start + per_group]}
                run = functools.partial(self._run, part, _selective_contexts if policy == "selective" else None)
                how = _halves if policy == "recursive" and len(part) > 1 else _whole
                self._groups.append(_Group(part, functools.partial(how, run)))

    def _apply(self, module: nn.Module, policy: Policy, blocks: dict[str, nn.Module]) -> None:
        if unknown := [name for name in policy.blocks if name not in blocks]:
            has = f"this module has {len(blocks)} blocks, {next(iter(blocks))} to {list(blocks)[-1]}"
            raise UsageError(
                f"the checkpointing policy is about {unknown[0]}, and {has}; make the policy for this model"
            )
        compiled = [each for each in module.modules() if each._compiled_call_impl is not None]
        for name, own in policy.blocks.items():
            block = blocks[name]
            if own.recompute:
                run = functools.partial(self._run_keeping, {name: block}, own.kept)
                self._groups.append(_Group({name: block}, functools.partial(_whole, run)))
            inside = [
                outer for outer in compiled if outer is not block and any(block is each for each in outer.modules())
            ]
            if own.host and inside:
                raise UnsupportedError(
                    f"checkpointing: the policy sends activations of {name} to host memory, which compiled code "
                    "around the block would hide; use --compile blocks or off"
                )
        if any(own.host for own in policy.blocks.values()):
            for name, block in blocks.items():
                self.offloading.install(name, block, policy.blocks[name].host if name in policy.blocks else ())

    @contextmanager
    def named_errors(self) -> Iterator[None]:
        """Around backward: what torch finds to differ in a block that was run again names the block.

        Raises:
            UnsupportedError: that, or a group of blocks was run of which the model called some only.
        """
        for group in self._groups:
            group.check_complete()
        try:
            yield
        except CheckpointError as error:
            raise unrepeatable(self._latest, error) from error

    def _run(self, blocks: dict[str, nn.Module], context_fn: Any, function: Forward, *args: Any, **kwargs: Any) -> Any:
        """Run `function`, keeping its arguments only; under `no_grad` there is nothing to keep."""
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            options = {} if context_fn is None else {"context_fn": context_fn}
            return checkpoint(function, *args, use_reentrant=False, **options, **kwargs)
        repeated = Repeated(blocks, args, kwargs, context_fn, self._note)
        return checkpoint(function, *args, use_reentrant=False, context_fn=repeated.contexts, **kwargs)

    def _run_keeping(self, blocks: dict[str, nn.Module], kept: tuple[str, ...], *call: Any, **kwargs: Any) -> Any:
        """`_run`, with the results of the operations in `kept`."""
        if not kept:
            return self._run(blocks, None, *call, **kwargs)
        if torch.compiler.is_compiling():
            return self._run(blocks, functools.partial(_named_contexts, kept), *call, **kwargs)
        named = _Named(kept)
        result = self._run(blocks, named.contexts, *call, **kwargs)
        if torch.is_grad_enabled():
            named.check(next(iter(blocks)))
        return result

    def _note(self, block: str) -> None:
        self._latest = block


class _Group:
    def __init__(self, blocks: dict[str, nn.Module], run: Callable[[Sequence[Forward], Any], Any]) -> None:
        self._names = list(blocks)
        self._forwards = [block.forward for block in blocks.values()]
        self._run = run
        self._expected: tuple[Any, ...] = ()
        self._next = 1  # the index of the block that hands on next
        self._drawn: Any = None
        first, *others = blocks.values()
        first.forward = self._first
        for index, block in enumerate(others, start=1):
            hand_on = functools.partial(self._other, index)
            hand_on.hands_on = True  # type: ignore[attr-defined] # its call computes nothing and needs no parameters
            block.forward = hand_on

    def _first(self, *args: Any, **kwargs: Any) -> Any:
        if len(self._forwards) == 1:
            return self._run(self._forwards, *args, **kwargs)
        if not args:
            raise _not_a_chain(f"{self._names[0]} gets no positional argument")
        output = self._run([self._chained(place) for place in range(len(self._forwards))], *args, **kwargs)
        if not torch.compiler.is_compiling():
            self._expected, self._next, self._drawn = ((output, *args[1:]), kwargs), 1, _random_state(output)
        return output

    def check_complete(self) -> None:
        """Raise `UnsupportedError` where the last pass left out blocks that the group ran."""
        if self._expected:
            self._expected = ()
            raise _not_a_chain(f"{self._names[self._next]} was not called after {self._names[self._next - 1]}")

    def _chained(self, place: int) -> Forward:
        def call(x: Any, *others: Any, **keywords: Any) -> Any:
            if not isinstance(x, Tensor):
                raise _not_a_chain(f"{self._names[place - 1]} returns a {type(x).__name__}")
            return self._forwards[place](x, *others, **keywords)

        return call

    def _other(self, index: int, *args: Any, **kwargs: Any) -> Any:
        """The work is done: hand on the output, if it is the group's and the arguments are those the group ran with."""
        if torch.compiler.is_compiling():
            return args[0]
        difference = self._difference(index, self._expected, args, kwargs)
        self._next = index + 1
        if difference or self._next == len(self._forwards):
            self._expected = ()  # keep nothing alive between steps
        if difference:
            raise _not_a_chain(difference)
        return args[0]

    def _difference(self, index: int, expected: tuple[Any, ...], args: Any, kwargs: Any) -> str:
        """How a block's call differs from what the group did; empty if it does not."""
        here, first = self._names[index], self._names[0]
        if not expected or index != self._next:
            return f"{here} is not called after {self._names[index - 1]}"
        if not args or args[0] is not expected[0][0]:
            return f"{here} gets something else than {self._names[index - 1]} returned"
        names = [*range(1, max(len(args), len(expected[0]))), *dict.fromkeys([*expected[1], *kwargs])]
        given, before = ({**dict(enumerate(each)), **named} for each, named in ((args, kwargs), expected))
        missing = object()
        for name in names:
            if given.get(name, missing) is not before.get(name, missing):
                argument = f"argument {name}" if isinstance(name, int) else name
                return f"{here} gets another {argument} than {first}"
        if self._drawn != _random_state(args[0]):
            return f"random numbers are drawn between {self._names[index - 1]} and {here}"
        return ""


def _not_a_chain(what: str) -> UnsupportedError:
    return UnsupportedError(
        f"{what}, so use every-1 or selective: checkpointing several blocks together needs a model that passes each "
        "block's output, one tensor, straight to the next as its first argument, with the same further arguments"
    )


def _random_state(output: Any) -> tuple[bytes, int]:
    """Where torch's generators of the CPU and of the output's GPU are."""
    is_on_gpu = isinstance(output, Tensor) and output.is_cuda
    offset = torch.cuda.default_generators[output.get_device()].get_offset() if is_on_gpu else 0
    return torch.get_rng_state().numpy().tobytes(), offset


def _in_turn(calls: Sequence[Forward], x: Any, *others: Any, **keywords: Any) -> Any:
    for call in calls:
        x = call(x, *others, **keywords)
    return x


def _whole(run: Forward, calls: Sequence[Forward], *args: Any, **kwargs: Any) -> Any:
    return run(calls[0] if len(calls) == 1 else functools.partial(_in_turn, calls), *args, **kwargs)


def _halves(run: Forward, calls: Sequence[Forward], x: Any, *others: Any, **keywords: Any) -> Any:
    """Keep the inputs of both halves; backward runs a half again, which keeps the inputs of its halves, and so on.

    log2(n) inputs are alive at a time, and a block is run once more for every level above it.
    """
    if len(calls) == 1:
        return calls[0](x, *others, **keywords)
    middle = len(calls) // 2
    for half in (calls[:middle], calls[middle:]):
        x = run(functools.partial(_halves, run, half), x, *others, **keywords)
    return x


_KEPT_OPERATIONS = ("mm", "addmm", "bmm", "baddbmm", "linear", "convolution", "_grouped_mm")
_KEPT_PREFIXES = ("_scaled_dot_product", "_flash_attention_forward", "_efficient_attention_forward", "trainstep::flash")


def _keep_products(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Keep results of matrix products and fused attention, ours included; compute everything else again.

    So are products that are written into memory which is there, as compiled code does: it may write there again; and
    attention with dropout.
    """
    kept = is_product(operator_name(operation)) and can_be_kept(operation, args, kwargs)
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


class _Named:
    """Keeps results by operator and number, as `BlockPolicy.kept` names them; of one call of one block."""

    def __init__(self, kept: tuple[str, ...]) -> None:
        self._kept = frozenset(kept)
        self._counts: dict[bool, dict[str, int]] = {}  # of the first run, and of the one in backward

    def contexts(self) -> Any:
        """What `torch.utils.checkpoint` enters around the first run and around the other."""
        self._counts = {False: defaultdict(int), True: defaultdict(int)}
        return create_selective_checkpoint_contexts(self._choose)

    def check(self, block: str) -> None:
        """Raise `UsageError` if an operation that is to be kept did not run."""
        for name in sorted(self._kept):
            operator, _, number = name.rpartition("#")
            if int(number) >= (count := self._counts[False][operator]):
                raise UsageError(
                    f"the checkpointing policy keeps {name} of {block}, which runs {operator} {count} times; make the "
                    "policy for this model, attention and precision"
                )

    def _choose(self, context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        counts, operator = self._counts[context.is_recompute], operator_name(operation)
        name = f"{operator}#{counts[operator]}"
        counts[operator] += 1
        kept = name in self._kept and can_be_kept(operation, args, kwargs)
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


def _named_contexts(kept: tuple[str, ...]) -> Any:
    return _Named(kept).contexts()


def operator_name(operation: Any) -> str:
    """As `BlockPolicy.kept` writes it: `mm` for `aten::mm.default`, others with their library's name."""
    namespace, _, name = operation.name().partition("::")
    name = name.partition(".")[0]
    return name if namespace == "aten" else f"{namespace}::{name}"


def is_product(name: str) -> bool:
    """Whether an operator, as `operator_name` writes it, is a matrix product or fused attention, ours included."""
    return name in _KEPT_OPERATIONS or name.startswith(_KEPT_PREFIXES)


def can_be_kept(operation: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether an operation's result may stand in for running it again.

    Not where it writes into memory that is there. Nor where it draws random numbers: those drawn after it would be
    other ones, if it did not draw its own again.
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


def _selective_contexts() -> Any:
    return create_selective_checkpoint_contexts(_keep_products)
