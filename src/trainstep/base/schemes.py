"""The schemes of data parallel training, each once: what `bench parallel` compares, what `train` trains with, and what
the planner calls it. Imports no torch; `trainstep.parallel.replicas` builds them.

To add a scheme: its entry here, and its wrapper in `trainstep.parallel.replicas.build`, unless it is another
setting of one that is there. A peer's settings, with their sources, are a file of `trainstep.parallel.peers`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from trainstep.base.errors import UnsupportedError

DataParallel = Literal["ddp", "sharded optimizer", "zero-2", "fsdp", "hsdp"]
"""State that a rank keeps, as the planner calls it: everything; a slice of the optimizer's state (ZeRO-1); of gradients
too (ZeRO-2, planned only); of weights too (ZeRO-3); the same within a replica, of which there are several (hybrid)."""
Strategy = Literal["single", DataParallel, "fsdp + tp"]
"""Strategies that the planner predicts; fsdp + tp has tensor parallelism beside FSDP and is planned only."""
STRATEGIES: tuple[Strategy, ...] = get_args(Strategy)
Wrapper = Literal["none", "ddp", "sharded-optimizer", "fsdp", "torch-ddp", "torch-zero", "torch-fsdp2"]
"""Wrappers of a module and its optimizer. torch-*: PyTorch's own DistributedDataParallel, the same with
ZeroRedundancyOptimizer, and fully_shard."""

TrainScheme = Literal["auto", "single", "ddp", "sharded-optimizer", "fsdp", "hsdp"]
"""Values of `train --scheme`: `auto`, and every scheme with `in_train`."""


@dataclass(frozen=True)
class Scheme:
    name: str  # on the command line and in rows
    wrapper: Wrapper
    planned_as: DataParallel | None  # what the planner calls it; None without communication
    bucket_mb: float | None = 25.0
    """Megabytes of gradients per call: 0 for a call per parameter, inf for a single call (ddp, sharded-optimizer and
    torch's); None: what the wrapper takes by default (ours)."""
    overlap: bool = True  # whether gradients are sent during backward, not after it (ddp)
    overlap_gather: bool = False  # whether parameters are gathered beside the next forward (sharded-optimizer)
    transport: Literal["auto", "collectives"] = "auto"
    """Transport of shards and gradients: auto takes copies between GPUs of one host where it can (ours)."""
    narrow_reduce: bool = False
    """True if gradients are summed in the 16 bits they are computed in, not in float32 (torch-fsdp2)."""
    is_hybrid: bool = False
    """True if there are replicas, each sharded over some of the ranks: those of a host (fsdp, torch-fsdp2)."""
    replicas: int | None = None  # how many, where that is known
    blocks_per_group: int = 1  # that are gathered together (fsdp, torch-fsdp2)
    peer: str | None = None  # of torch's own: the scheme that this is another setting of, or itself
    in_bench: bool = True  # whether `bench parallel` compares it
    in_train: bool = False  # whether `train` offers it
    is_planned: bool = False  # its time is predicted, and notebook/theory.md holds that against measurements

    @property
    def label(self) -> str:
        """The name, with the number of replicas if there are any, and of blocks that are gathered together."""
        label = self.name if self.replicas is None else f"{self.name}-{self.replicas}"
        return label if self.blocks_per_group == 1 else f"{label} by {self.blocks_per_group} blocks"

    @property
    def communicates(self) -> bool:
        return self.wrapper != "none"

    @property
    def shards_weights(self) -> bool:
        """True if a rank has only a part of the weights between uses."""
        return self.wrapper in ("fsdp", "torch-fsdp2")

    @property
    def copies_gradients(self) -> bool:
        """True if gradients are copied into buckets that stay allocated, as in torch's DistributedDataParallel."""
        return self.wrapper in ("torch-ddp", "torch-zero")

    def by_blocks(self, counts: Sequence[int]) -> Sequence[Scheme]:
        """The scheme with each number of blocks that are gathered together, if it gathers any."""
        counts = counts if self.shards_weights else (1,)
        return [dataclasses.replace(self, blocks_per_group=each) for each in dict.fromkeys(counts)]

    def on(self, ranks: int, hosts: int, replicas: int | None = None) -> Scheme:
        """The scheme with its number of replicas, if it has any: the one given, else `usual_replicas`."""
        return dataclasses.replace(self, replicas=replicas or usual_replicas(ranks, hosts)) if self.is_hybrid else self

    def choices(self, replicas: Sequence[int]) -> Sequence[int | None]:
        """Numbers of replicas, of these, that the scheme is to be tried with; None: the usual one."""
        return tuple(dict.fromkeys(replicas)) if self.is_hybrid and replicas else (None,)

    def check(self, ranks: int = 1) -> None:
        """Raise `UnsupportedError` where the ranks make no replicas."""
        if self.is_hybrid and self.replicas is None:
            raise UnsupportedError(
                f"{ranks} rank{'s' if ranks > 1 else ''} cannot be laid out as replicas of several ranks each: start 4 "
                "or another even number on one host, or as many on every host; or say --replicas"
            )
        if self.replicas is not None and ranks % self.replicas:
            raise UnsupportedError(f"{ranks} ranks do not divide into {self.replicas} replicas; choose --replicas anew")


def usual_replicas(ranks: int, hosts: int) -> int | None:
    """A replica for each host, or two on a single host where each has two ranks at least; None where neither goes."""
    if hosts > 1:
        return hosts if ranks % hosts == 0 else None
    return 2 if ranks >= 4 and ranks % 2 == 0 else None


BUCKETS_MB = (1, 10, 25, 100, 1000)
"""Bucket sizes that tuning tries: the same for ours and for torch's."""

_ALL = (
    Scheme("single", "none", None, in_train=True, is_planned=True),  # every rank by itself
    Scheme("ddp", "ddp", "ddp", in_bench=False, in_train=True),  # with the bucket that train's flags say
    Scheme("naive", "ddp", "ddp", bucket_mb=0, overlap=False, transport="collectives"),  # one collective each
    Scheme("flat", "ddp", "ddp", bucket_mb=math.inf, overlap=False, transport="collectives"),
    Scheme("overlapped", "ddp", "ddp", bucket_mb=0, transport="collectives"),
    *(Scheme(f"bucketed-{mb}", "ddp", "ddp", bucket_mb=mb, is_planned=mb in (25, 1000)) for mb in BUCKETS_MB),
    Scheme("sharded-optimizer", "sharded-optimizer", "sharded optimizer", in_train=True, is_planned=True),
    Scheme("sharded-optimizer-1000", "sharded-optimizer", "sharded optimizer", bucket_mb=1000, is_planned=True),
    Scheme(
        "sharded-optimizer-1000-overlapped",
        "sharded-optimizer",
        "sharded optimizer",
        bucket_mb=1000,
        overlap_gather=True,
    ),
    Scheme("fsdp", "fsdp", "fsdp", in_train=True, is_planned=True),
    Scheme("fsdp-collectives", "fsdp", "fsdp", transport="collectives", is_planned=True),  # by NCCL, as between hosts
    Scheme("hsdp", "fsdp", "hsdp", is_hybrid=True, in_train=True, is_planned=True),
    *(
        Scheme("torch-ddp" if mb == 25 else f"torch-ddp-{mb}", "torch-ddp", "ddp", bucket_mb=mb, peer="torch-ddp")
        for mb in BUCKETS_MB
    ),
    Scheme("torch-zero", "torch-zero", "sharded optimizer", peer="torch-zero"),
    Scheme("torch-zero-1000", "torch-zero", "sharded optimizer", bucket_mb=1000, peer="torch-zero"),
    Scheme("torch-fsdp2", "torch-fsdp2", "fsdp", peer="torch-fsdp2"),
    Scheme("torch-fsdp2-bf16-reduce", "torch-fsdp2", "fsdp", narrow_reduce=True, peer="torch-fsdp2-bf16-reduce"),
    Scheme("torch-hsdp", "torch-fsdp2", "hsdp", is_hybrid=True, peer="torch-hsdp"),
)

SCHEMES: Mapping[str, Scheme] = {each.name: each for each in _ALL}  # by name, in the order of tables
BENCH_SCHEMES: tuple[str, ...] = tuple(each.name for each in _ALL if each.in_bench)
