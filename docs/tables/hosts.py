"""The table of steps between two hosts, measured and as the plan has them (`docs/measure_hosts.py`).

The plan's time of what is sent comes from the collectives that were timed at the same bandwidth, as many at once as the
scheme has. What it hides behind is the step's own computation, as the step without communication measured it: no
datasheet knows the CPU it ran on. What the host does for communication besides is counted as well, at the rate of a
large copy: gradients are divided before Gloo's all-reduce adds them, and FSDP packs them. What FSDP sends is taken to
hide behind nothing, and so is what replicas average: over Gloo its ranks agree before each call, and what they say
waits behind what is under way between the hosts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from tables import results
from tables.alone import alone_ms
from trainstep.base.config import ModelConfig
from trainstep.base.schemes import SCHEMES
from trainstep.plan.communication import Link, collective_seconds
from trainstep.plan.machine import GIB, Cluster, Machine
from trainstep.plan.measured import network_links
from trainstep.plan.parallelism import Exchange, exchange_seconds, scaled
from trainstep.plan.roofline import PhaseSeconds, StepSeconds
from trainstep.plan.strategies import Layout, kept_groups
from trainstep.report.numbers import number
from trainstep.report.subjects.workload import where
from trainstep.report.tables import Table, text_table
from trainstep.rows import CeilingRow, CollectiveFitRow, ParallelRow
from trainstep.rows.records import Row

AnyRow = TypeVar("AnyRow", bound=Row)
NAME = "cpu-hosts"
SHAPE = {"vocab_size": 1000, "d_model": 384, "d_ff": 1536, "num_layers": 3, "num_heads": 6}
MODEL = ModelConfig(**SHAPE)
"""That `docs/measure_hosts.py` takes steps of."""
GROUPS = MODEL.num_layers + 2  # of its parameters under fsdp: blocks, the embedding and the head
LIST = 30
"""Tensors of the model, and of the lists that a plan is made of; FSDP's gradients are packed into one buffer."""
COLUMNS = (
    *("Mbit/s", "scheme", "hosts × ranks", "without communication (ms)", "communication, measured (ms)"),
    *("planned (ms)", "off (%)"),
)


@dataclass(frozen=True)
class Held:
    """A step's communication, measured and planned."""

    mbit: int
    scheme: str
    ranks_each: int
    alone_ms: float
    measured_ms: float
    planned_ms: float

    @property
    def error(self) -> float:
        return self.planned_ms / self.measured_ms - 1


def held() -> list[Held]:
    """Every scheme at every bandwidth.

    Raises:
        NotMeasuredError: nothing was measured yet.
    """
    kinds = (ParallelRow, CollectiveFitRow, CeilingRow)
    rows, fits, copies = (results(NAME, kind) for kind in kinds)
    bandwidths = sorted({int(row.environment["mbit"]) for row in rows})
    return [each for mbit in bandwidths for each in _held(mbit, *(_at(mbit, each) for each in (rows, fits, copies)))]


def _at(mbit: int, rows: Sequence[AnyRow]) -> list[AnyRow]:
    return [row for row in rows if row.environment["mbit"] == mbit]


def _held(
    mbit: int, rows: Sequence[ParallelRow], fits: Sequence[CollectiveFitRow], copies: Sequence[CeilingRow]
) -> list[Held]:
    found = []
    (copied,) = copies
    for row in rows:
        if not SCHEMES[row.scheme].communicates:
            continue
        ranks_each = row.world_size // 2
        (single,) = [each for each in rows if each.scheme == "single" and each.world_size == row.world_size]
        alone = alone_ms(row, rows)
        assert row.status == "ok", row
        assert row.step_ms is not None
        assert alone is not None
        at_once = [fit for fit in fits if (fit.groups is None) == (ranks_each == 1)]
        packs = SCHEMES[row.scheme].planned_as in ("fsdp", "hsdp")
        alike = [fit for fit in at_once if fit.tensors == (None if packs and fit.collective != "all-gather" else LIST)]
        if packs:  # what a list costs besides its bytes is its messages', and a group has its share of them
            alike = [_a_groups_share(fit) for fit in alike]
        planned = 1e3 * _planned_s(row, single, _cluster(alike, ranks_each, copied))
        found.append(Held(mbit, row.label, ranks_each, alone, row.step_ms - alone, planned))
    return found


def _a_groups_share(fit: CollectiveFitRow) -> CollectiveFitRow:
    if fit.tensors is None or fit.overhead_us is None:
        return fit
    return dataclasses.replace(fit, overhead_us=fit.overhead_us / GROUPS)


def _cluster(fits: Sequence[CollectiveFitRow], ranks_each: int, copied: CeilingRow) -> Cluster:
    """Two hosts, each collective at what it took while the other groups did the same.

    With one rank on each all calls go between them; with more, HSDP's, what is gathered and scattered stays within.
    """
    network = network_links(fits)
    inside = {
        fit.collective: Link((fit.overhead_us or 0) / 1e6, (fit.bus_gb_s or 0) * 1e9)
        for fit in fits
        if fit.hosts is None
    }
    assert copied.gb_s is not None
    nothing: dict[str, float] = {}
    link = inside.get("all-reduce", network["all-reduce"])
    rate = copied.gb_s * 1e9
    machine = Machine("a CPU", nothing, rate, 0, 1, nothing, link, by_collective=inside, network=network)
    return Cluster(machine, ranks_each, 2, network["all-reduce"].bus_bytes_per_s)


def _planned_s(row: ParallelRow, single: ParallelRow, cluster: Cluster) -> float:
    assert single.start_weights_gib is not None
    size = single.start_weights_gib * GIB
    if row.scheme == "flat":  # after backward, in one call
        divided = 2 * size / cluster.machine.copy_bytes_per_s  # read and written
        return divided + collective_seconds("all-reduce", round(size), 2, cluster.group_link("all-reduce", 2))
    planned_as = SCHEMES[row.scheme].planned_as
    assert planned_as is not None
    layout = Layout(planned_as, row.world_size, replicas=row.replicas or 1)
    forward, backward, optimizer = (single.times[name].median / 1e3 for name in ("forward", "backward", "optimizer"))
    compute = StepSeconds(
        PhaseSeconds(forward, 0.0), PhaseSeconds(backward, 0.0), PhaseSeconds(optimizer * layout.updated, 0.0)
    )
    if layout.shards_weights:
        return _fsdp_s(layout, size, compute, cluster)
    _, exposed = exchange_seconds(layout, cluster, compute, Exchange(size, size, size, GROUPS))
    return exposed


def _fsdp_s(layout: Layout, size: float, compute: StepSeconds, cluster: Cluster) -> float:
    """Of the ranks that divide the model, and of what replicas average; `size`: bytes of the weights."""
    ranks, kept = layout.parts, 4 * kept_groups(MODEL)
    within, again = Layout("fsdp", ranks), size - kept  # gathered in backward as well
    moved = Exchange(size, size, size, GROUPS, not_again=kept)
    busy, _ = exchange_seconds(within, cluster if layout.replicas == 1 else scaled(cluster, ranks), compute, moved)
    # shards laid where the others' come, gradients packed, the sum of its own rows taken from them: read and written
    rate = cluster.machine.copy_bytes_per_s
    busy += 2 * ((size + again) / ranks + size + size / ranks) / rate
    if layout.replicas == 1:
        return busy
    link = cluster.group_link("all-reduce", layout.replicas, ranks)
    calls = Link(GROUPS * link.overhead_s, link.bus_bytes_per_s)
    divided = 2 * size / ranks / rate
    return busy + divided + collective_seconds("all-reduce", round(size / ranks), layout.replicas, calls)


def hosts_table() -> Table:
    """Measured and planned, a row for each scheme and bandwidth."""
    rows = results(NAME, ParallelRow)
    every = [*rows, *results(NAME, CollectiveFitRow)]
    millions = next(row.start_weights_gib or 0 for row in rows if row.scheme == "single") * GIB / 4e6
    title = (
        f"Two hosts as network namespaces of one machine, Gloo between them; a decoder of {millions:.1f} M "
        f"parameters in fp32; {where(every)}"
    )
    cells = [
        (
            f"{each.mbit:,}", each.scheme, f"2 × {each.ranks_each}", number(each.alone_ms), number(each.measured_ms),
            number(each.planned_ms), f"{100 * each.error:+.1f}",
        )
        for each in held()
    ]  # fmt: skip
    return text_table("hosts", title, COLUMNS, cells)


TABLES: Mapping[str, Callable[[], Table]] = {"hosts": hosts_table}
