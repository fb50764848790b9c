"""Rates that one GPU and its connections reach: to predict with, from a datasheet or from measurements.

A datasheet's peak is never reached. Without measurements of the device itself its peaks are multiplied with the
fractions that were measured on an H200 (`ATTAINABLE`); that they carry over to other devices is an assumption. A
calibration replaces them, see `trainstep.plan.measured`. Imports no torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from trainstep.base.errors import UsageError
from trainstep.base.hardware import DeviceSpec
from trainstep.base.precision import PRECISIONS
from trainstep.base.schemes import Strategy
from trainstep.plan.communication import CollectiveName, Link

GIB = 2**30

ATTAINABLE: Mapping[str, float] = {"fp32": 0.76, "tf32": 0.83, "bf16": 0.79, "copy": 0.88, "link": 0.72, "network": 0.8}
"""Fractions of the datasheet's peaks: large products by the units they run on, a large copy and a large all-reduce over
NVLink as measured on H200s; of the network's nothing was measured, and 0.8 is an assumption."""

OPTIMIZER_FRACTION: Mapping[str, float] = {"adamw-foreach": 0.91, "adamw-fused": 0.83, "sgd": 0.91}
"""Share of a copy's bandwidth that the optimizer reaches: measured on an H200, but for sgd, which is taken as
foreach."""

LINK_OVERHEAD_S, NETWORK_OVERHEAD_S = 30e-6, 50e-6
"""Overheads of a call within a node, as between two H200s, and of one that leaves it, an assumption."""
LINK_HOP_S, NETWORK_HOP_S = 1e-6, 5e-6
"""Seconds that each further hand-over from rank to rank adds: assumptions."""

INTERFERENCE = 0.42
"""By how much of the time that communication is hidden it slows the computation that hides it: NCCL takes
multiprocessors and bandwidth. From one case on two H200s, bucketed data parallel training of 2.7B: 26 ms of 62."""

LESSER: Mapping[Strategy, Strategy] = {"zero-2": "sharded optimizer", "fsdp + tp": "fsdp"}
"""Strategies that no scheme of ours takes, and what the host launches at least under them."""


@dataclass(frozen=True)
class Machine:
    """A GPU as it is, not as it is advertised."""

    name: str
    matmul_flops: Mapping[str, float]  # FLOP/s of a large product, per precision
    copy_bytes_per_s: float  # of a large copy, bytes read plus bytes written
    memory_bytes: int
    multiprocessors: int
    peak_flops: Mapping[str, float]  # the datasheet's: what utilisation is a fraction of
    link: Link  # between GPUs of one node
    by_collective: Mapping[CollectiveName, Link] = field(default_factory=dict)
    """`link`, of collectives that were measured by themselves. `plan.measured` leaves it empty: within a host FSDP's
    gathers are copies, which no collective tells."""
    network: Mapping[CollectiveName, Link] = field(default_factory=dict)
    """Between GPUs of several nodes, for one GPU of each, where it was measured."""
    optimizer_fraction: Mapping[str, float] = field(default_factory=lambda: dict(OPTIMIZER_FRACTION))
    launch_s: Mapping[tuple[str, str], tuple[float, float]] = field(default_factory=dict)
    """(compile, attention) → what launching one block's forward and backward takes the host, where it was measured."""
    scheme_launch_s: Mapping[tuple[Strategy, str, str, int], float] = field(default_factory=dict)
    """(strategy, compile, precision, blocks that are gathered together) → what launching a whole step takes the host
    for each of the model's blocks, likewise."""
    interference: float = INTERFERENCE  # seconds that computing loses for each second of communication hidden behind it
    basis: str = ""  # where these figures come from, in a sentence

    def scheme_launch_seconds(
        self, strategy: Strategy, compiled: str, precision: str, blocks: int, blocks_per_group: int = 1
    ) -> float:
        """At least, of a whole step of so many blocks: of the strategy, or where it was not measured of what it does
        more than; else zero."""
        for each, together in ((strategy, blocks_per_group), (LESSER.get(strategy), blocks_per_group), ("single", 1)):
            if each is not None and (each, compiled, precision, together) in self.scheme_launch_s:
                return blocks * self.scheme_launch_s[each, compiled, precision, together]
        return 0.0

    def launch_seconds(self, compiled: str, attention: str) -> tuple[float, float]:
        """(forward, backward) of a block; of the same compilation where the attention was not measured, else zeros."""
        attention = "sdpa" if attention == "auto" else attention
        alike = [value for (mode, _), value in self.launch_s.items() if mode == compiled]
        return self.launch_s.get((compiled, attention), min(alike, default=(0.0, 0.0)))


def machine_of(spec: DeviceSpec) -> Machine:
    """A device by its datasheet and `ATTAINABLE`."""
    peaks = {each: spec.peak_tflops(each) * 1e12 for each in PRECISIONS}
    return Machine(
        name=spec.name,
        matmul_flops={each: peak * ATTAINABLE[PRECISIONS[each].rate] for each, peak in peaks.items()},
        copy_bytes_per_s=spec.bandwidth_gb_s * 1e9 * ATTAINABLE["copy"],
        memory_bytes=int(spec.memory_gib * GIB),
        multiprocessors=spec.multiprocessors,
        peak_flops=peaks,
        link=Link(LINK_OVERHEAD_S, spec.link_gb_s * 1e9 * ATTAINABLE["link"]),
        basis=f"{spec.source}, times what an H200 reaches of its own datasheet; launches by the host are not counted",
    )


@dataclass(frozen=True)
class Cluster:
    """Nodes of equal GPUs, each GPU with its own connection to the network."""

    machine: Machine
    gpus_per_node: int
    nodes: int
    network_bytes_per_s: float  # what one GPU can send to other nodes, by collectives that were not measured

    def __post_init__(self) -> None:
        for name in ("gpus_per_node", "nodes", "network_bytes_per_s"):
            if not getattr(self, name) > 0 or math.isinf(getattr(self, name)):
                raise UsageError(f"{name} is {getattr(self, name)}; expected a positive number")

    @property
    def gpus(self) -> int:
        return self.gpus_per_node * self.nodes

    def group_link(self, collective: CollectiveName, ranks: int, stride: int = 1) -> Link:
        """Cost of a call for a group of `ranks` GPUs, every `stride`-th one of the cluster, all such groups at once.

        Rings go through every GPU of a node before they leave it, as many rings as the group has GPUs in the node. So a
        group sends through all of its network connections, and the slower of link and network sets the pace. Each
        hand-over beyond the first costs a hop; an all-reduce takes a tree instead where that has fewer.
        """
        here = max(1, min(ranks, self.gpus_per_node // stride))
        nodes = math.ceil(ranks / here)
        link = self.machine.by_collective.get(collective, self.machine.link)
        rates = [link.bus_bytes_per_s] if here > 1 else []
        overhead = link.overhead_s
        if nodes > 1:
            network = self.machine.network.get(collective, Link(NETWORK_OVERHEAD_S, self.network_bytes_per_s))
            overhead = network.overhead_s
            rates.append(here * network.bus_bytes_per_s)
        hops = max(0, ranks - nodes - 1) * LINK_HOP_S + max(0, nodes - 1) * NETWORK_HOP_S
        if collective == "all-reduce":
            tree = max(0, here - 2) * LINK_HOP_S + math.log2(nodes) * NETWORK_HOP_S
            hops = 2 * min(hops, tree)
        return Link(overhead + hops, min(rates, default=link.bus_bytes_per_s))
