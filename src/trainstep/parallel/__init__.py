"""What happens between ranks: data parallel training of any `nn.Module`, with torch.distributed.

`join_group` starts a process that torchrun launched; the wrappers and the optimizer are imported on first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainstep.parallel.ddp import DistributedDataParallel
    from trainstep.parallel.process import Process, join_group

__all__ = ["DistributedDataParallel", "Process", "join_group"]

_HOME = {
    "DistributedDataParallel": "trainstep.parallel.ddp",
    "Process": "trainstep.parallel.process",
    "join_group": "trainstep.parallel.process",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
