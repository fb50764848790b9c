"""Which schemes of data parallel training there are to compare. Imports no torch."""

from __future__ import annotations

from typing import Literal, get_args

from trainstep.plan.communication import Scheme as PlannedScheme

SchemeName = Literal[
    "single", "naive", "flat", "overlapped", "bucketed-1", "bucketed-10", "bucketed-25", "bucketed-100",
    "bucketed-1000", "sharded-optimizer", "sharded-optimizer-1000", "fsdp", "fsdp-collectives", "torch-ddp",
    "torch-zero", "torch-fsdp2",
]  # fmt: skip
"""single: every rank by itself, without communication. naive: one call per parameter after backward; flat: a single
call; overlapped: one per parameter during backward; bucketed-N: N MB per call, during backward. sharded-optimizer: its
gradients in calls of 25 MB; sharded-optimizer-N: of N MB. fsdp: by copies between GPUs of one host; fsdp-collectives:
by NCCL, as between hosts. torch-*: PyTorch's own DistributedDataParallel, ZeroRedundancyOptimizer and fully_shard."""

SCHEMES: tuple[SchemeName, ...] = get_args(SchemeName)

_PLANNED: dict[str, PlannedScheme] = {
    "sharded-optimizer": "sharded optimizer",
    "sharded-optimizer-1000": "sharded optimizer",
    "fsdp": "fsdp",
    "fsdp-collectives": "fsdp",
    "torch-zero": "sharded optimizer",
    "torch-fsdp2": "fsdp",
}


def planned_scheme(name: SchemeName) -> PlannedScheme | None:
    """What `plan.communication` calls a scheme; None for the one without communication."""
    return None if name == "single" else _PLANNED.get(name, "ddp")
