"""The repeated blocks of any module, found the way people write them: as elements of an `nn.ModuleList`; and activation
checkpointing, applied to them from outside: what forward keeps, and what backward computes again.

Chen et al. 2016 (arXiv:1604.06174): keep the inputs of segments of the network, and run a segment again when backward
reaches it. The segments are blocks. Each policy replaces the blocks' `forward`; no
module is added or renamed, so parameters keep their names, and hooks and compilation apply as before.

A group of several blocks is run by the call of its first block; the calls of the others hand on what they get. That is
the same computation only if the model passes each block's output straight to the next, with the same further arguments.
Each call checks it (compiled code excepted, where tensors have no identity to check).

Random numbers are drawn again as they were, so dropout gives the same loss and gradients, bit for bit where the
kernels are deterministic.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from trainstep.config import blocks_per_checkpoint
from trainstep.errors import UnsupportedError

Forward = Callable[..., Any]


def find_blocks(module: nn.Module) -> list[nn.Module]:
    """The elements of the outermost ModuleLists (or Sequentials of one repeated class), in order of definition.

    Lists inside a block are part of that block. A module without such lists has no blocks. An element without a forward
    of its own, such as an `nn.ModuleDict` of a layer's parts, cannot be compiled, checkpointed or sharded as one, so
    the blocks are those inside it, if any.
    """
    blocks: list[nn.Module] = []
    for child in module.children():
        if isinstance(child, nn.ModuleList) or _repeats_one_class(child):
            for element in child.children():
                blocks.extend([element] if is_called(element) else find_blocks(element))
        else:
            blocks.extend(find_blocks(child))
    return blocks


def is_called(module: nn.Module) -> bool:
    """Whether the module has a `forward`, as ModuleList and ModuleDict have not."""
    return type(module).forward is not nn.Module.forward or "forward" in vars(module)


def _repeats_one_class(module: nn.Module) -> bool:
    if not isinstance(module, nn.Sequential) or len(module) < 2:
        return False
    classes = {type(child) for child in module}
    return len(classes) == 1 and any(True for child in module for _ in child.children())


def without_numbers(name: str) -> str:
    """A module's dotted name with its numbers replaced, so that alike modules share it: `blocks.*.attention.query`."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", name)


def checkpoint_blocks(module: nn.Module, policy: str) -> None:
    """Make `module`'s blocks keep their activations as `policy` says: "none", "every-K", "selective" or "recursive".

    `module` is anything with blocks in an `nn.ModuleList` (see `find_blocks`), not yet checkpointed or compiled.

    Raises:
        UsageError: no such policy.
        UnsupportedError: the module has no blocks.
    """
    size = blocks_per_checkpoint(policy)
    if policy == "none":
        return
    blocks = find_blocks(module)
    if not blocks:
        missing = "needs blocks in an nn.ModuleList, and this module has none; use none"
        raise UnsupportedError(f"checkpointing={policy} {missing}")
    if policy == "selective":
        for block in blocks:
            block.forward = functools.partial(_checkpoint, block.forward, context_fn=_selective_contexts)
    elif policy == "recursive":
        _Group(blocks, _halves)
    else:
        assert size is not None, f"policy {policy} has no size"
        for start in range(0, len(blocks), size):
            _Group(blocks[start : start + size], _whole)


def _checkpoint(function: Forward, *args: Any, context_fn: Any = None, **kwargs: Any) -> Any:
    """Run `function`, keeping its arguments only; under `no_grad` there is nothing to keep."""
    options = {} if context_fn is None else {"context_fn": context_fn}
    return checkpoint(function, *args, use_reentrant=False, **options, **kwargs)


_NOT_A_CHAIN = (
    "checkpointing several blocks together needs a model that passes each block's output, one tensor, straight to the "
    "next as its first argument, with the same further arguments; this one does not, so use every-1 or selective"
)


class _Group:
    def __init__(self, blocks: Sequence[nn.Module], run: Callable[[Sequence[Forward], Any], Any]) -> None:
        self._forwards = [block.forward for block in blocks]
        self._run = run
        self._expected: tuple[Any, ...] = ()
        blocks[0].forward = self._first
        for index, block in enumerate(blocks[1:], start=1):
            hand_on = functools.partial(self._other, index)
            hand_on.hands_on = True  # type: ignore[attr-defined] # its call computes nothing and needs no parameters
            block.forward = hand_on

    def _first(self, *args: Any, **kwargs: Any) -> Any:
        if len(self._forwards) == 1:
            return _checkpoint(self._forwards[0], *args, **kwargs)
        if not args:
            raise UnsupportedError(_NOT_A_CHAIN)
        calls = [functools.partial(_with_arguments, forward, args[1:], kwargs) for forward in self._forwards]
        output = self._run(calls, args[0])
        if not torch.compiler.is_compiling():
            self._expected = ((output, *args[1:]), kwargs)
        return output

    def _other(self, index: int, *args: Any, **kwargs: Any) -> Any:
        """The work is done: hand on the output, if it is the group's and the arguments are those the group ran with."""
        if torch.compiler.is_compiling():
            return args[0]
        expected = self._expected
        if index == len(self._forwards) - 1:
            self._expected = ()  # keep nothing alive between steps
        if not expected or not args or _identities(*args, **kwargs) != _identities(*expected[0], **expected[1]):
            self._expected = ()
            raise UnsupportedError(_NOT_A_CHAIN)
        return args[0]


def _with_arguments(forward: Forward, others: tuple[Any, ...], keywords: dict[str, Any], x: Any) -> Any:
    if not isinstance(x, Tensor):
        raise UnsupportedError(_NOT_A_CHAIN)
    return forward(x, *others, **keywords)


def _identities(*args: Any, **kwargs: Any) -> Any:
    return [*map(id, args)], {name: id(value) for name, value in kwargs.items()}


def _in_turn(calls: Sequence[Forward], x: Any) -> Any:
    for call in calls:
        x = call(x)
    return x


def _whole(calls: Sequence[Forward], x: Any) -> Any:
    return checkpoint(functools.partial(_in_turn, calls), x, use_reentrant=False)


def _halves(calls: Sequence[Forward], x: Any) -> Any:
    """Keep the inputs of both halves; backward runs a half again, which keeps the inputs of its halves, and so on.

    log2(n) inputs are alive at a time, and a block is run once more for every level above it.
    """
    if len(calls) == 1:
        return calls[0](x)
    middle = len(calls) // 2
    for half in (calls[:middle], calls[middle:]):
        x = checkpoint(functools.partial(_halves, half), x, use_reentrant=False)
    return x


_KEPT_OPERATIONS = ("mm", "addmm", "bmm", "baddbmm", "linear", "convolution")
_KEPT_PREFIXES = ("_scaled_dot_product", "_flash_attention_forward", "_efficient_attention_forward")


def _keep_products(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Keep results of matrix products and fused attention, ours included; compute everything else again."""
    namespace, _, name = operation.name().partition("::")
    name = name.partition(".")[0]
    kept = name in _KEPT_OPERATIONS or name.startswith(_KEPT_PREFIXES) or namespace == "trainstep"
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


def _selective_contexts() -> Any:
    return create_selective_checkpoint_contexts(_keep_products)
