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
from collections.abc import Sequence

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


def hosts_table() -> Table:
    """Each scheme's communication at each bandwidth, measured and planned.

    Raises:
        NotMeasuredError: nothing was measured yet.
    """
    rows, fits = results(NAME, ParallelRow), results(NAME, CollectiveFitRow)
    millions = next(row.start_weights_gib or 0 for row in rows if row.scheme == "single") * GIB / 4e6
    title = (
        f"Two hosts as network namespaces of one machine, Gloo between them; a decoder of {millions:.1f} M "
        f"parameters in fp32; {where([*rows, *fits])}"
    )
    cells = []
    for copied in sorted(results(NAME, CeilingRow), key=lambda row: int(row.environment["mbit"])):
        mbit = copied.environment["mbit"]
        at_mbit = [row for row in rows if row.environment["mbit"] == mbit]
        for row in at_mbit:
            if SCHEMES[row.scheme].communicates:
                (single,) = (each for each in at_mbit if (each.scheme, each.world_size) == ("single", row.world_size))
                ranks_each, alone = row.world_size // 2, alone_ms(row, at_mbit)
                assert row.step_ms is not None
                assert alone is not None
                measured = row.step_ms - alone
                alike = _of_scheme([fit for fit in fits if fit.environment["mbit"] == mbit], row, ranks_each)
                planned = 1e3 * _planned_s(row, single, _cluster(alike, ranks_each, copied))
                off = f"{100 * (planned / measured - 1):+.1f}"
                numbers = map(number, (alone, measured, planned))
                cells.append((f"{mbit:,}", row.label, f"2 × {ranks_each}", *numbers, off))
    return text_table("hosts", title, COLUMNS, cells)


def _of_scheme(fits: Sequence[CollectiveFitRow], row: ParallelRow, ranks_each: int) -> list[CollectiveFitRow]:
    """The collectives that were timed as the scheme calls them."""
    at_once = [fit for fit in fits if (fit.groups is None) == (ranks_each == 1)]
    packs = SCHEMES[row.scheme].planned_as in ("fsdp", "hsdp")
    alike = [fit for fit in at_once if fit.tensors == (None if packs and fit.collective != "all-gather" else LIST)]
    # what a list costs besides its bytes is its messages', and a group has its share of them
    lists = GROUPS if packs else 1
    return [
        dataclasses.replace(fit, overhead_us=fit.overhead_us / lists) if fit.tensors and fit.overhead_us else fit
        for fit in alike
    ]


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


TABLES = {"hosts": hosts_table}
