"""Measured records → the `Machine` that plans are made for: rates of this device in place of a datasheet's.

Taken from any results of trainstep:

    ceiling          rates of a large product per precision, and of a large copy
    collective fit   overhead and bus bandwidth of the all-reduce (else of another collective) over most ranks
    rung, step       what the host takes to launch a block, from steps whose forward was bound by launching; and the
                     fraction of a copy's bandwidth that the optimizer reaches, from the step that reached most

What none of the records tells stays as the datasheet and `plan.machine` have it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from statistics import median
from typing import Any

from trainstep.config import SIZES
from trainstep.errors import UsageError
from trainstep.hardware import DeviceSpec, require_device
from trainstep.kinds import CeilingRow, CollectiveFitRow, StepRow
from trainstep.kinds.steps import MeasuredStep
from trainstep.plan.communication import Link
from trainstep.plan.machine import LaunchKey, Machine, machine_of
from trainstep.plan.roofline import OPTIMIZER_BYTES
from trainstep.precision import PRECISIONS
from trainstep.records import Row, of_kind

LAUNCH_BOUND = 0.97
"""Of the forward phase spent launching it: then the host sets the pace (docs/lab-log.md)."""


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
        raise UsageError(
            f"the calibration is of several devices: {', '.join(sorted(devices))}; give one device's files"
        )
    if spec is not None and devices - {spec.name}:
        raise UsageError(
            f"the calibration is of {devices.pop()}, not of {spec.name}; leave out --device, or give its own"
        )
    if spec is None:
        if not devices:
            raise UsageError("the calibration names no device; say which with --device")
        spec = require_device(devices.pop())
    machine = machine_of(spec)
    found = [_ceilings(records, machine), _link(records), _launches(records)]
    with_rates = dataclasses.replace(machine, **found[0])
    found.append(_optimizer(records, with_rates))
    if not any(found):
        raise UsageError(
            "the calibration has neither ceilings, nor fits of collectives, nor timed steps of named sizes; expected "
            "the results.jsonl of `trainstep analyze` or `trainstep bench collectives`"
        )
    sources = ("rates", "connections", "launches", "the optimizer's bandwidth")
    measured = [name for name, each in zip(sources, found, strict=True) if each]
    rest = [name for name, each in zip(sources, found, strict=True) if not each]
    basis = f"measured on {spec.name}: {', '.join(measured)}"
    if rest:
        basis += f"; by the {spec.source} and fractions measured on an H200: {', '.join(rest)}"
    for each in found[1:]:
        with_rates = dataclasses.replace(with_rates, **each)
    return dataclasses.replace(with_rates, basis=basis)


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
    sizes = [each for each in memory if isinstance(each, (int, float))]
    if sizes:
        found["memory_bytes"] = int(min(sizes) * 2**30)
    return found


def _link(records: Sequence[Row]) -> dict[str, Any]:
    rows = [row for row in of_kind(records, CollectiveFitRow) if row.backend == "nccl"]
    if not rows:
        return {}
    best = max(rows, key=lambda row: (row.collective == "all-reduce", row.world_size))
    return {"link": Link(_positive(best, "overhead_us") / 1e6, _positive(best, "bus_gb_s") * 1e9)}


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
    bound: dict[LaunchKey, list[tuple[float, float]]] = {}
    for row in _timed(records):
        forward, backward = row.times["forward"].median, row.times["backward"].median
        if row.checkpointing is None and row.times["forward_issue"].median > LAUNCH_BOUND * forward:
            layers = 1e3 * SIZES[str(row.workload)].num_layers
            bound.setdefault((str(row.compile), str(row.attention)), []).append((forward / layers, backward / layers))
    if not bound:
        return {}
    return {
        "launch_s": {
            key: (median(forward for forward, _ in pairs), median(backward for _, backward in pairs))
            for key, pairs in bound.items()
        }
    }


def _optimizer(records: Sequence[Row], machine: Machine) -> dict[str, Any]:
    reached: dict[str, float] = {}
    stored_half = {name for name, each in PRECISIONS.items() if each.is_stored_half}
    for row in _timed(records):
        name = str(row.optimizer)
        moved = OPTIMIZER_BYTES[name] * SIZES[str(row.workload)].num_parameters
        if row.precision not in stored_half:
            fraction = moved / (row.times["optimizer"].median / 1e3) / machine.copy_bytes_per_s
            reached[name] = max(reached.get(name, 0.0), fraction)
    return {"optimizer_fraction": {**machine.optimizer_fraction, **reached}} if reached else {}


def _positive(row: Row, name: str) -> float:
    value = row.values.get(name)
    if not isinstance(value, (int, float)) or value < 0:
        raise UsageError(f"a {row.kind} row of the calibration has {name} = {value!r}; expected a positive number")
    return float(value)
