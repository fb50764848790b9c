"""Rates of a device, taken from measured rows.

`calibrated` takes from any results of trainstep, in place of a datasheet's figures:

    ceiling          rates of a large product per precision, and of a large copy
    collective fit   overhead and bus bandwidth of the all-reduce (else of another collective) over most ranks of one
                     host; of every collective between hosts, from ranks on several. Of as many ranks, those of groups
                     that were timed at once
    change, step     what the host takes to launch a block, from steps whose forward was bound by launching; and the
                     fraction of a copy's bandwidth that the optimizer reaches, from the step that reached most
    parallel         what the host takes to launch a whole step of a strategy, for each of the model's blocks

What none of the records tells stays as the datasheet and `plan.machine` have it. Imports no torch.
"""

from __future__ import annotations

import dataclasses
from collections import ChainMap, defaultdict
from collections.abc import Iterable, Sequence
from statistics import median
from typing import Any

from trainstep.base.config import SIZES
from trainstep.base.errors import UsageError
from trainstep.base.hardware import DeviceSpec, require_device
from trainstep.base.precision import PRECISIONS
from trainstep.base.schemes import SCHEMES, Strategy
from trainstep.plan.communication import CollectiveName, Link
from trainstep.plan.machine import GIB, Machine, machine_of
from trainstep.plan.roofline import OPTIMIZER_BYTES
from trainstep.rows import CeilingRow, CollectiveFitRow, ParallelRow, StepRow
from trainstep.rows.records import Row, of_kind
from trainstep.rows.steps import MeasuredStep

LAUNCH_BOUND = 0.97
"""Share of the forward phase spent launching it: then the host sets the pace (notebook/lab-log.md)."""


def calibrated(records: Sequence[Row], spec: DeviceSpec | None = None) -> Machine:
    """The machine on which the records were measured.

    Args:
        records: of any kinds.
        spec: its datasheet; by default that of the device that the records name.

    Raises:
        UsageError: records of several devices, of one without a datasheet, or none that says anything.
    """
    devices = {str(row.environment["device"]) for row in records if row.environment.get("device")}
    if len(devices) > 1:
        names = ", ".join(sorted(devices))
        raise UsageError(f"the calibration is of several devices: {names}; give one device's files")
    if spec is None:
        if not devices:
            raise UsageError("the calibration names no device; say which with --device")
        spec = require_device(devices.pop())
    elif other := devices - {spec.name}:
        wrong = f"the calibration is of {other.pop()}, not of {spec.name}"
        raise UsageError(f"{wrong}; leave out --device, or give its own")
    machine = machine_of(spec)
    rates = _ceilings(records, machine)
    machine = dataclasses.replace(machine, **rates)
    network = network_links([row for row in of_kind(records, CollectiveFitRow) if row.backend == "nccl"])
    schemes = scheme_launches(records)
    found = {
        "rates": rates,
        "connections": _link(records),
        "launches": _launches(records),
        "the optimizer's bandwidth": _optimizer(records, machine),
        **({"the network": {"network": network}} if network else {}),
    }
    if schemes:
        found[f"launches of data parallel steps ({_launched(schemes)})"] = {"scheme_launch_s": schemes}
    basis = f"measured on {spec.name}: {', '.join(name for name, each in found.items() if each)}"
    if not any(found.values()):
        raise UsageError(
            "the calibration has neither ceilings, nor fits of collectives, nor timed steps of named sizes; expected "
            "the results.jsonl of `trainstep analyze` or `trainstep bench collectives`"
        )
    if rest := [name for name, each in found.items() if not each]:
        basis += f"; by the {spec.source} and fractions measured on an H200: {', '.join(rest)}"
    return dataclasses.replace(machine, **ChainMap(*found.values()), basis=basis)


def _ceilings(records: Sequence[Row], machine: Machine) -> dict[str, Any]:
    rows = [row for row in of_kind(records, CeilingRow) if row.status == "ok"]
    copies = [_positive(row, "gb_s") * 1e9 for row in rows if row.operation == "copy"]
    products: dict[str, float] = {}
    for row in rows:
        if row.operation == "matmul" and row.precision is not None:
            products[row.precision] = max(products.get(row.precision, 0.0), _positive(row, "tflops") * 1e12)
    found: dict[str, Any] = {}
    if products:
        reached = {name: products[each.rate] for name, each in PRECISIONS.items() if each.rate in products}
        found["matmul_flops"] = {**machine.matmul_flops, **reached}
    if copies:
        found["copy_bytes_per_s"] = max(copies)
    memory = [row.environment.get("device_memory_gib") for row in rows]
    if sizes := [each for each in memory if isinstance(each, int | float)]:
        found["memory_bytes"] = int(min(sizes) * GIB)
    return found


def _link(records: Sequence[Row]) -> dict[str, Any]:
    rows = [row for row in of_kind(records, CollectiveFitRow) if row.backend == "nccl" and row.hosts is None]
    if not rows:
        return {}
    best = max(rows, key=lambda row: (row.collective == "all-reduce", row.world_size, row.groups is not None))
    return {"link": _link_of(best)}


def network_links(rows: Sequence[CollectiveFitRow]) -> dict[CollectiveName, Link]:
    """Costs of a call between hosts, for one rank of each, by collective; of most ranks, where there are several."""
    crossing = [row for row in rows if row.hosts is not None]
    between = sorted(crossing, key=lambda row: (row.world_size, row.groups is not None))
    return {row.collective: _link_of(row, row.world_size // (row.hosts or 1)) for row in between}  # type: ignore[misc]


def _link_of(row: CollectiveFitRow, connections: int = 1) -> Link:
    """Link of one of the connections that share what is sent."""
    return Link(_positive(row, "overhead_us") / 1e6, _positive(row, "bus_gb_s") * 1e9 / connections)


def _timed(records: Sequence[Row]) -> list[MeasuredStep]:
    """Full steps of named sizes on a GPU."""
    return [
        row
        for row in of_kind(records, MeasuredStep)
        if row.status == "ok"
        and not (isinstance(row, StepRow) and row.mode != "step")
        and row.workload in SIZES
        and "forward_issue" in row.times
    ]


def _launches(records: Sequence[Row]) -> dict[str, Any]:
    bound: defaultdict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
    for row in _timed(records):
        forward, backward = row.times["forward"].median, row.times["backward"].median
        if row.checkpointing is None and row.times["forward_issue"].median > LAUNCH_BOUND * forward:
            layers = 1e3 * SIZES[str(row.workload)].num_layers
            bound[str(row.compile), str(row.attention)].append((forward / layers, backward / layers))
    medians = {key: tuple(map(median, zip(*pairs, strict=True))) for key, pairs in bound.items()}
    return {"launch_s": medians} if medians else {}


def scheme_launches(records: Iterable[Row]) -> dict[tuple[Strategy, str, str, int], float]:
    """(strategy, compile, precision, blocks a group) → seconds of the host for each block, to launch a step of ours
    that checkpoints nothing: of the scheme that takes least."""
    found: defaultdict[tuple[Strategy, str, str, int], list[float]] = defaultdict(list)
    for row in of_kind(records, ParallelRow):
        scheme, model = SCHEMES.get(str(row.scheme)), SIZES.get(str(row.workload))
        if row.status != "ok" or scheme is None or model is None or "issue" not in row.times:
            continue
        alone = scheme.communicates and row.world_size == 1
        if scheme.peer is None and not alone and row.case.get("checkpointing") in (None, "none"):
            how = str(row.compile), str(row.precision), row.blocks_per_group or 1
            found[scheme.planned_as or "single", *how].append(row.times["issue"].median / 1e3 / model.num_layers)
    return {key: min(each) for key, each in found.items()}


def _launched(launches: Iterable[tuple[Strategy, str, str, int]]) -> str:
    """Say of which steps they are."""
    steps = dict.fromkeys(f"compile {compiled}, {precision}" for _, compiled, precision, _ in launches)
    blocks = ", ".join(map(str, sorted({blocks for *_, blocks in launches})))
    return "; ".join([*steps, f"blocks a group {blocks}"])


def _optimizer(records: Sequence[Row], machine: Machine) -> dict[str, Any]:
    reached: dict[str, float] = {}
    for row in _timed(records):
        name, precision = str(row.optimizer), PRECISIONS.get(str(row.precision))
        if precision is not None and precision.is_stored_half:
            continue
        moved = OPTIMIZER_BYTES[name] * SIZES[str(row.workload)].num_parameters
        fraction = moved / (row.times["optimizer"].median / 1e3) / machine.copy_bytes_per_s
        reached[name] = max(reached.get(name, 0.0), fraction)
    return {"optimizer_fraction": {**machine.optimizer_fraction, **reached}} if reached else {}


def _positive(row: Row, name: str) -> float:
    value = row.values.get(name)
    if not isinstance(value, (int, float)) or value < 0:
        raise UsageError(f"a {row.kind} row of the calibration has {name} = {value!r}; expected a positive number")
    return float(value)
