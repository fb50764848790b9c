"""Activation checkpointing of a module's blocks, from outside: what forward keeps, and what backward computes again.

Chen et al. 2016 (arXiv:1604.06174): keep the inputs of segments of the network, and run a segment again when backward
reaches it. Here every block is a segment. A policy replaces the blocks' `forward`. It adds and renames no module, so
parameters keep their names, and hooks and compilation apply as before.

A `Policy` says of each block by itself what it keeps, computes again, or sends to host memory (`offloading`).

A block is run again in the state in which it ran first (`repeating`): with the random numbers, the key-value
cache and the attributes of then. So loss and gradients are the same, bit for bit where the kernels are deterministic.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch._compile import _disable_dynamo
from torch.utils.checkpoint import CheckpointError, checkpoint

from trainstep.base.config import check_policy
from trainstep.base.errors import UnsupportedError, UsageError
from trainstep.checkpointing.keeping import FirstRun, Keeping, contexts_of
from trainstep.checkpointing.offloading import Offloading
from trainstep.checkpointing.policies import Policy, policy_of
from trainstep.checkpointing.repeating import Block, Repeated, unrepeatable
from trainstep.checkpointing.writes import refusing_writes
from trainstep.step.blocks import find_stacks

Forward = Callable[..., Any]


class Checkpointing:
    """`module`, its blocks keeping their activations as `policy` says.

    Args:
        module: anything with blocks in an `nn.ModuleList` (see `find_blocks`), not yet checkpointed. `block.compile()`
            and `module.compile()` come before.
        policy: "none", "every-1", "selective", "@FILE", or a `Policy`.

    Raises:
        UsageError: no such policy, or one of blocks that the module does not have.
        UnsupportedError: the module has no blocks, or is compiled as a whole and sends activations to host memory.
    """

    def __init__(self, module: nn.Module, policy: str | Policy) -> None:
        self._latest = ""  # the block that was run again last
        self._blocks: list[Block] = []
        self.offloading = Offloading()
        if isinstance(policy, str):
            check_policy(policy)
        self.policy: Policy | None = policy_of(policy) if isinstance(policy, str) else policy
        """Policy of each block by itself; None where all do alike."""
        if policy == "none":
            return
        stacks = find_stacks(module)
        if not stacks:
            missing = "needs blocks in an nn.ModuleList, and this module has none; use none"
            raise UnsupportedError(f"checkpointing={policy} {missing}")
        names = {block: name for name, block in module.named_modules()}
        blocks = {names[block]: block for stack in stacks for block in stack}
        if self.policy is not None:
            self._apply(module, self.policy, blocks)
        else:
            for name, block in blocks.items():
                self._run_again(name, block, Keeping(None) if policy == "selective" else None)
        for outer in module.modules():
            modules = set(outer.modules())
            inside = [each for each in self._blocks if each.module in modules]
            if inside and outer._compiled_call_impl is not None:
                object.__setattr__(outer, "_compiled_call_impl", refusing_writes(outer._compiled_call_impl, inside))

    def _run_again(self, name: str, module: nn.Module, keeping: Keeping | None) -> None:
        block = Block(name, module)
        self._blocks.append(block)
        module.forward = functools.partial(self._run, block, keeping, module.forward)

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
                self._run_again(name, block, Keeping(own.kept) if own.kept else None)
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
            UnsupportedError: torch found such a difference.
        """
        try:
            yield
        except CheckpointError as error:
            raise unrepeatable(self._latest, error) from error

    def _run(self, block: Block, keeping: Keeping | None, function: Forward, *args: Any, **kwargs: Any) -> Any:
        """Run `function`, keeping its arguments and what `keeping` says; under `no_grad` there is nothing to keep."""
        if torch.compiler.is_compiling():
            options: dict[str, Any] = (
                {} if keeping is None else {"context_fn": functools.partial(contexts_of, keeping.names)}
            )
            try:  # where the compiler gives up in here, it leaves all of this method to Python
                return checkpoint(function, *args, use_reentrant=False, **options, **kwargs)
            finally:
                pass
        return self._run_eagerly(block, keeping, function, *args, **kwargs)

    @_disable_dynamo
    def _run_eagerly(self, block: Block, keeping: Keeping | None, function: Forward, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return checkpoint(function, *args, use_reentrant=False, **kwargs)
        first = None if keeping is None else FirstRun(keeping)
        repeated = Repeated(block, args, kwargs, None if first is None else first.contexts, self._note)
        result = checkpoint(function, *args, use_reentrant=False, context_fn=repeated.contexts, **kwargs)
        if first is not None:
            first.check(block.name)
        return result

    def _note(self, block: str) -> None:
        self._latest = block
