"""Communication between ranks: data parallel training of any `nn.Module`, with torch.distributed.

`join_group` starts a process that torchrun launched (`process`). Three ways to train, each opening with its schedule:
`ddp` averages gradients; `zero` divides the optimizer's state and work as well; `fsdp` divides everything. They stand
on `collectives` and `transport`. The names below are imported on first use.

One word for one thing, here and in the names of the code:

rank, world size
    One process of a process group, and how many there are.
share
    A rank's part of the global batch.
slice
    One of `world size` equal stretches of a tensor's memory: what a reduce-scatter leaves on a rank and an all-gather
    takes from it (`slices.slice_of`). The sharded optimizer updates slices of parameters.
shard
    The rows of a parameter that a rank keeps under FSDP; in the module its place is taken by the whole while gathered.
replicated
    The same on every rank: parameters that FSDP does not cut.
replica
    One of several copies of a model that is sharded over a part of the ranks (`ranks.Ranks`).
piece
    A parameter, and what of it this rank's sharded optimizer updates: its slice, all of it, or nothing.
bucket
    Tensors that travel in one call: a `GradientBucket` in backward, a `ParameterBucket` in the sharded optimizer's
    step.
group
    In `process`, `collectives`, `ddp` and `transport` the *process group*: the ranks that communicate. In `zero` a
    *parameter group*, as in torch.optim: parameters with hyper-parameters of their own. In `fsdp` a *gather group*:
    parameters that are gathered and freed together, for the calls of its *units*, usually one block.
"""

from typing import TYPE_CHECKING

from trainstep.base.lazy import on_first_use

if TYPE_CHECKING:
    from trainstep.parallel.ddp.wrapper import DistributedDataParallel
    from trainstep.parallel.fsdp.checkpoint import load_checkpoint, save_checkpoint
    from trainstep.parallel.fsdp.wrapper import FullyShardedDataParallel
    from trainstep.parallel.process import Process, join_group
    from trainstep.parallel.zero.optimizer import ShardedOptimizer

__all__ = ["DistributedDataParallel", "FullyShardedDataParallel", "Process", "ShardedOptimizer", "join_group"]
__all__ += ["load_checkpoint", "save_checkpoint"]

_HOME = {"DistributedDataParallel": "ddp.wrapper", "FullyShardedDataParallel": "fsdp.wrapper"}
_HOME |= {"Process": "process", "ShardedOptimizer": "zero.optimizer", "join_group": "process"}
_HOME |= dict.fromkeys(("load_checkpoint", "save_checkpoint"), "fsdp.checkpoint")
__getattr__, __dir__ = on_first_use(__name__, _HOME)
