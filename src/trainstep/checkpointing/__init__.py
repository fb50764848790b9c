"""Memory traded for time: which activations of a module's blocks are kept, computed again, or sent to the host.

`Checkpointing(module, policy)` applies a `Policy` to the blocks. With `UpdatesInBackward` the optimizer updates each
block in backward. Every name is imported on first use, so policies can be read without torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainstep.checkpointing.policies import BlockPolicy, Policy
    from trainstep.checkpointing.recomputing import Checkpointing
    from trainstep.checkpointing.updating import UpdatesInBackward

__all__ = ["BlockPolicy", "Checkpointing", "Policy", "UpdatesInBackward"]

_HOME = {"BlockPolicy": "policies", "Checkpointing": "recomputing", "Policy": "policies"}
_HOME |= {"UpdatesInBackward": "updating"}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
