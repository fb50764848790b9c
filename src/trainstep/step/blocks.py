"""The repeated blocks of any module, found the way people write them: as elements of an `nn.ModuleList`."""

from __future__ import annotations

import re
from functools import lru_cache

from torch import nn
from torch.nn.utils.parametrize import ParametrizationList


def find_blocks(module: nn.Module) -> list[nn.Module]:
    """The elements of the outermost ModuleLists (or Sequentials of one repeated class), in order of definition.

    Lists inside a block are part of that block. A module without such lists has no blocks. An element without a forward
    of its own, such as an `nn.ModuleDict` of a layer's parts, cannot be compiled, checkpointed or sharded as one, so
    the blocks are those inside it, if any. A list that torch made, of a weight's parametrizations, is none.
    """
    return [block for stack in find_stacks(module) for block in stack]


def blocks_in_runs(module: nn.Module, count: int) -> list[list[nn.Module]]:
    """The blocks of `find_blocks`, so many in a row together; the last of a list may be fewer."""
    stacks = find_stacks(module)
    return [stack[first : first + count] for stack in stacks for first in range(0, len(stack), count)]


def find_stacks(module: nn.Module) -> list[list[nn.Module]]:
    """The blocks of `find_blocks` by the list they lie in: an encoder's and a decoder's are two stacks."""
    stacks: list[list[nn.Module]] = []
    for child in module.children():
        if isinstance(child, nn.ModuleList) or _repeats_one_class(child):
            stacks += _stacks_of_list(child)
        else:
            stacks += find_stacks(child)
    return stacks


def _stacks_of_list(elements: nn.Module) -> list[list[nn.Module]]:
    if isinstance(elements, ParametrizationList):
        return []
    called, others = [], []
    for element in elements.children():
        if is_called(element):
            called.append(element)
        else:  # a layer as a list of its parts, or as a dict
            others += _stacks_of_list(element) if isinstance(element, nn.ModuleList) else find_stacks(element)
    return [called, *others] if called else others


def is_called(module: nn.Module) -> bool:
    """True if the module has a `forward`, as ModuleList and ModuleDict have not."""
    return type(module).forward is not nn.Module.forward or "forward" in vars(module)


def _repeats_one_class(module: nn.Module) -> bool:
    if not isinstance(module, nn.Sequential) or len(module) < 2:
        return False
    classes = {type(child) for child in module}
    return len(classes) == 1 and any(True for child in module for _ in child.children())


@lru_cache(4096)  # a profile asks for each of a million kernels
def without_numbers(name: str) -> str:
    """A module's dotted name with its numbers replaced, so that alike modules share it: `blocks.*.attention.query`."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", name)
