"""State that modules save beside their tensors, by `get_extra_state`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.nn.modules.module import _EXTRA_STATE_KEY_SUFFIX


def is_extra_state(name: str) -> bool:
    """True if a name of a state dict is that of a module's extra state."""
    return name.rpartition(".")[2] == _EXTRA_STATE_KEY_SUFFIX


def set_extra_states(module: nn.Module, state: Mapping[str, Any]) -> None:
    """Hand the extra states in a module's state dict to the modules inside that they are of."""
    for name in filter(is_extra_state, state):
        module.get_submodule(name.rpartition(".")[0]).set_extra_state(state[name])
