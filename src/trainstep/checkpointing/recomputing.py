"""Activation checkpointing of a module's blocks, from outside: what forward keeps, and what backward computes again.

Chen et al. 2016 (arXiv:1604.06174): keep the inputs of segments of the network, and run a segment again when backward
reaches it. The segments are blocks. Each policy replaces the blocks' `forward`; no
module is added or renamed, so parameters keep their names, and hooks and compilation apply as before.

A group of several blocks is run by the call of its first block; the calls of the others hand on what they get. That is
the same computation only if the model passes each block's output straight to the next, with the same further arguments.
Each call checks it (compiled code excepted, where tensors have no identity to check).

A `Policy` says of each block by itself what it keeps, computes again, or sends to host memory (`offloading`).

A block is run again in the state in which it ran first (`repeating`): with the random numbers, the key-value
cache and the attributes of then. So loss and gradients are the same, bit for bit where the kernels are deterministic.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.utils.checkpoint import CheckpointError, checkpoint

from trainstep.base.config import blocks_per_checkpoint
from trainstep.base.errors import UnsupportedError, UsageError
from trainstep.checkpointing.keeping import FirstRun, Keeping, contexts_of
from trainstep.checkpointing.offloading import Offloading
from trainstep.checkpointing.policies import Policy, policy_of
from trainstep.checkpointing.repeating import Blocks, Repeated, unrepeatable
from trainstep.checkpointing.writes import refusing_writes
from trainstep.step.blocks import find_stacks

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
        self._blocks: list[Blocks] = []
        self.offloading = Offloading()
        if isinstance(policy, str):
            size, of_each = blocks_per_checkpoint(policy), policy_of(policy)
        else:
            size, of_each = None, policy
        self.policy: Policy | None = of_each
        """Policy of each block by itself; None where all do alike."""
        if policy == "none":
            return
        stacks = find_stacks(module)
        if not stacks:
            missing = "needs blocks in an nn.ModuleList, and this module has none; use none"
            raise UnsupportedError(f"checkpointing={policy} {missing}")
        names = {block: name for name, block in module.named_modules()}
        if of_each is not None:
            self._apply(module, of_each, {names[block]: block for stack in stacks for block in stack})
        else:
            for stack in stacks:
                self._apply_alike(policy, size, {names[block]: block for block in stack})
        for outer in module.modules():
            modules = set(outer.modules())
            inside = [each for each in self._blocks if modules & set(each.named.values())]
            if inside and outer._compiled_call_impl is not None:
                object.__setattr__(outer, "_compiled_call_impl", refusing_writes(outer._compiled_call_impl, inside))

    def _apply_alike(self, policy: str | Policy, size: int | None, stack: dict[str, nn.Module]) -> None:
        per_group = 1 if policy == "selective" else len(stack) if policy == "recursive" else size
        assert per_group is not None, f"policy {policy} has no size"
        for start in range(0, len(stack), per_group):
            part = dict([*stack.items()][start : start + per_group])
            if policy == "recursive" and len(part) > 1:
                self._groups.append(_Group(part, self._halves(part)))
            else:
                run = functools.partial(self._run, self._made(part), Keeping(None) if policy == "selective" else None)
                self._groups.append(_Group(part, functools.partial(_whole, run)))

    def _made(self, part: dict[str, nn.Module]) -> Blocks:
        self._blocks.append(Blocks(part))
        return self._blocks[-1]

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
                run = functools.partial(self._run, self._made({name: block}), Keeping(own.kept) if own.kept else None)
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

    def _halves(self, part: dict[str, nn.Module]) -> Callable[..., Any]:
        """Keep the inputs of both halves; backward runs a half again, which keeps the inputs of its halves, and so on.

        log2(n) inputs are alive at a time, and a block is run once more for every level above it.
        """
        if len(part) == 1:
            return _in_turn
        middle = len(part) // 2
        halves = []
        for place in (slice(middle), slice(middle, None)):
            half = dict([*part.items()][place])
            halves.append((place, functools.partial(self._run, self._made(half), None), self._halves(half)))

        def run(calls: Sequence[Forward], x: Any, *others: Any, **keywords: Any) -> Any:
            for place, keep, inner in halves:
                x = keep(functools.partial(inner, calls[place]), x, *others, **keywords)
            return x

        return run

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

    def _run(self, blocks: Blocks, keeping: Keeping | None, function: Forward, *args: Any, **kwargs: Any) -> Any:
        """Run `function`, keeping its arguments and what `keeping` says; under `no_grad` there is nothing to keep."""
        if torch.compiler.is_compiling():
            options: dict[str, Any] = (
                {} if keeping is None else {"context_fn": functools.partial(contexts_of, keeping.names)}
            )
            try:  # where the compiler gives up in here, it leaves all of this method to Python
                return checkpoint(function, *args, use_reentrant=False, **options, **kwargs)
            finally:
                pass
        return self._run_eagerly(blocks, keeping, function, *args, **kwargs)

    @_disable_dynamo
    def _run_eagerly(
        self, blocks: Blocks, keeping: Keeping | None, function: Forward, *args: Any, **kwargs: Any
    ) -> Any:
        if not torch.is_grad_enabled():
            return checkpoint(function, *args, use_reentrant=False, **kwargs)
        first = None if keeping is None else FirstRun(keeping)
        repeated = Repeated(blocks, args, kwargs, None if first is None else first.contexts, self._note)
        result = checkpoint(function, *args, use_reentrant=False, context_fn=repeated.contexts, **kwargs)
        if first is not None:
            first.check(blocks.first)
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
        """Say how a block's call differs from what the group did; empty if it does not."""
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
    """State of torch's generators of the CPU and of the output's GPU."""
    is_on_gpu = isinstance(output, Tensor) and output.is_cuda
    offset = torch.cuda.default_generators[output.get_device()].get_offset() if is_on_gpu else 0
    return torch.get_rng_state().numpy().tobytes(), offset


def _in_turn(calls: Sequence[Forward], x: Any, *others: Any, **keywords: Any) -> Any:
    for call in calls:
        x = call(x, *others, **keywords)
    return x


def _whole(run: Forward, calls: Sequence[Forward], *args: Any, **kwargs: Any) -> Any:
    return run(calls[0] if len(calls) == 1 else functools.partial(_in_turn, calls), *args, **kwargs)
