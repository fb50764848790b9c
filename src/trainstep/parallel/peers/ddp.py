"""torch.nn.parallel.DistributedDataParallel.

Settings that no source is named for have theirs on that class's page of torch's documentation.

gradient_as_bucket_view: on. A gradient is a view of its bucket: it is held once, and copied neither in nor out.

static_graph: on where it holds. It spares the search of each step's graph, and buckets are ready as the first step
found them. It promises that every step uses the same parameters in the same way. It is off where one process found
that some share of a batch gave some parameter no gradient, as which ones may change from step to step;
find_unused_parameters, which searches each graph, is on then. A workload that uses each parameter in every step, but
not always as often, breaks the promise, and DDP's error is its row. Reentrant checkpointing, which static_graph would
allow, is not used here.

Buffers are not broadcast before each forward, which is on by default and keeps statistics such as batch
normalisation's alike. A decoder's buffers, where it has any, are constants (tables of rotations), and ours sends none
while training either.

bucket_cap_mb: tuned over the sizes that ours is tuned over (`schemes.BUCKETS_MB`). At 25, the default, it is left out,
since then alone the first bucket is 1 MiB, so that sending begins early.

Compiled, blocks are compiled before wrapping, as for ours. Dynamo's DDPOptimizer, on by default, then splits their
graphs where buckets end, so that sending overlaps with backward (note "Distributed Data Parallel").
"""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn

from trainstep.parallel.process import Process

DEFAULT_MB = 25.0
"""torch's own."""


def distributed_data_parallel(
    module: nn.Module, process: Process, *, bucket_mb: float, allow_unused: bool
) -> nn.parallel.DistributedDataParallel:
    """The module, wrapped.

    Args:
        bucket_mb: torch counts 2²⁰ bytes a megabyte, ours 10⁶.
        allow_unused: whether some step may give a parameter no gradient.
    """
    known = inspect.signature(nn.parallel.DistributedDataParallel).parameters
    broadcast = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"  # until torch 2.12
    settings: dict[str, Any] = {
        "bucket_cap_mb": None if bucket_mb == DEFAULT_MB else int(bucket_mb),
        "gradient_as_bucket_view": True,
        "static_graph": not allow_unused,
        "find_unused_parameters": allow_unused,
        broadcast: False,
    }
    device_ids = [process.device.index] if process.device.type == "cuda" else None
    return nn.parallel.DistributedDataParallel(module, device_ids=device_ids, process_group=process.group, **settings)
