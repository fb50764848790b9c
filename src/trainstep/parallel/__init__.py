"""What happens between ranks: data parallel training of any `nn.Module`, with torch.distributed.

`join_group` starts a process that torchrun launched; the wrappers and the optimizer are imported on first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainstep.parallel.ddp import DistributedDataParallel
    from trainstep.parallel.fsdp import FullyShardedDataParallel
    from trainstep.parallel.process import Process, join_group
    from trainstep.parallel.sharded_optimizer import ShardedOptimizer
    from trainstep.parallel.sharding.checkpoint import load_checkpoint, save_checkpoint

__all__ = [
    "DistributedDataParallel",
    "FullyShardedDataParallel",
    "Process",
    "ShardedOptimizer",
    "join_group",
    "load_checkpoint",
    "save_checkpoint",
]

_HOME = {
    "DistributedDataParallel": "trainstep.parallel.ddp",
    "FullyShardedDataParallel": "trainstep.parallel.fsdp",
    "Process": "trainstep.parallel.process",
    "ShardedOptimizer": "trainstep.parallel.sharded_optimizer",
    "join_group": "trainstep.parallel.process",
    "load_checkpoint": "trainstep.parallel.sharding.checkpoint",
    "save_checkpoint": "trainstep.parallel.sharding.checkpoint",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
