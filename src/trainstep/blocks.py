"""The repeated blocks of any module, found the way people write them: as elements of an `nn.ModuleList`."""

from __future__ import annotations

import re

from torch import nn


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
