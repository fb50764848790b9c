"""Memory traded for time: which activations of a module's blocks are kept, computed again, or sent to the host.

`Checkpointing(module, policy)` applies a `Policy` to the blocks. With `UpdatesInBackward` the optimizer updates each
block in backward. Every name is imported on first use, so policies can be read without torch.
"""

from typing import TYPE_CHECKING

from trainstep.base.lazy import on_first_use

if TYPE_CHECKING:
    from trainstep.checkpointing.policies import BlockPolicy, Policy
    from trainstep.checkpointing.recomputing import Checkpointing
    from trainstep.checkpointing.updating import UpdatesInBackward

__all__ = ["BlockPolicy", "Checkpointing", "Policy", "UpdatesInBackward"]

_HOME = {"BlockPolicy": "policies", "Checkpointing": "recomputing", "Policy": "policies"}
_HOME |= {"UpdatesInBackward": "updating"}
__getattr__, __dir__ = on_first_use(__name__, _HOME)
