"""`trainstep bench collectives`: time of every collective, by size, type and number of ranks, on all ranks.

Each case is first checked: the tensors hold small whole numbers, whose sums are exact. Then all ranks that take part,
in one group or in several that do the same beside each other, are lined up before every call (on a GPU by a small
all-reduce in the same stream, so that what is timed starts at the same moment on every device), and each takes its own
time. A call lasts as long as on its slowest rank. How long it keeps a rank's cores busy is told too: over Gloo that is
time which computation beside it does not have. At the end a line of overhead and bandwidth is fitted for every
collective.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from statistics import mean, median
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from trainstep.base.config import PhaseContext
from trainstep.base.errors import UsageError
from trainstep.base.stats import summarize
from trainstep.bench.cases import CollectiveCase
from trainstep.measure.environment import describe, gpu_state
from trainstep.measure.outcome import Failure, classify, failed_row
from trainstep.measure.timing import device_clock, time_steps
from trainstep.parallel.collectives import all_gather_slices, all_reduce_sum, reduce_scatter_sum
from trainstep.parallel.process import Process
from trainstep.parallel.slices import slice_of
from trainstep.plan.communication import CollectiveName, Link, bus_factor
from trainstep.rows import CollectiveFitRow, CollectiveRow
from trainstep.rows.records import Times, by_case, make_row
from trainstep.step.casting import DTYPES


@dataclass(frozen=True)
class _Part:
    """A rank's part in a case."""

    milliseconds: list[float] = field(default_factory=list)  # of every timed call
    cpu_ms: float = 0.0  # of its median one, of all threads of the rank
    wrong: bool = False
    failure: Failure | None = None


def run_cases(
    cases: Sequence[CollectiveCase], process: Process, *, warmup: int, steps: int
) -> Iterator[CollectiveRow | CollectiveFitRow]:
    """Measure case by case. All ranks must iterate; rank 0 gets the rows, each when it is known, the others none."""
    if warmup < 0 or steps < 1:
        raise UsageError(f"warmup is {warmup} and steps {steps}; expected at least 0 and 1")
    layouts = {(case.world_size, case.groups): _members(case, process) for case in cases}
    groups = {layout: _own_group(members, process) for layout, members in layouts.items()}
    rows = []
    for case in cases:
        part = _take_part(case, process, groups[case.world_size, case.groups], warmup, steps)
        parts: list[_Part | None] = [None] * process.world_size
        dist.all_gather_object(parts, part, group=process.group)
        if process.rank == 0:
            rows.append(_row(case, process, [each for each in parts if each is not None]))
            yield rows[-1]
    if process.rank == 0:
        yield from _fits(rows)


def _members(case: CollectiveCase, process: Process) -> list[list[int]]:
    """The ranks of every group that takes part."""
    size, every = case.world_size, range(process.world_size)
    if case.groups == "one":
        return [list(every[:size])]
    number = len(every) // size
    if case.groups == "columns":
        return [list(every[first::number]) for first in range(number)]
    return [list(every[first : first + size]) for first in every[::size]]


def _own_group(members: Sequence[Sequence[int]], process: Process) -> dist.ProcessGroup | None:
    """This rank's; None where it is in none."""
    if len(members[0]) == process.world_size:
        return process.group
    groups = [dist.new_group(list(each)) for each in members]  # every rank must take part in making each
    own = [group for each, group in zip(members, groups, strict=True) if process.rank in each]
    return own[0] if own and isinstance(own[0], dist.ProcessGroup) else None


def _take_part(
    case: CollectiveCase, process: Process, group: dist.ProcessGroup | None, warmup: int, steps: int
) -> _Part | None:
    if group is None:
        return None
    tensors, failure = [], None
    try:
        memory = torch.empty(case.elements, dtype=DTYPES[case.dtype], device=process.device)
        tensors = list(memory.chunk(case.tensors))
    except RuntimeError as error:
        failure = classify(error)
    together = group if case.groups == "one" else process.group
    failures: list[Failure | None] = [None] * together.size()
    dist.all_gather_object(failures, failure, group=together)
    failed = next((each for each in failures if each is not None), None)
    if failed is not None:
        return _Part(failure=failed)
    call = _CALLS[case.collective]
    for tensor in tensors:
        _fill(tensor, group.rank() % 2 + 1)
    call(tensors, group)
    wrong = not all(_is_right(case, tensor, group) for tensor in tensors)
    wrongs = [False] * together.size()
    dist.all_gather_object(wrongs, wrong, group=together)
    if any(wrongs):
        return _Part(wrong=wrong)
    for tensor in tensors:
        tensor.zero_()
    line_up = partial(dist.all_reduce, torch.zeros(1, device=process.device), group=together)
    clock = device_clock(process.device)
    busy: list[float] = []

    def timed(_: PhaseContext) -> None:
        begin = time.process_time()
        call(tensors, group)
        busy.append(1e3 * (time.process_time() - begin))

    timing = time_steps(timed, device=clock, warmup=warmup, steps=steps, cover=line_up)
    return _Part([sample.ms for sample in timing.samples], median(busy[warmup:]))


_CALLS: dict[str, Callable[[list[Tensor], dist.ProcessGroup], object]] = {
    "all-reduce": lambda tensors, group: all_reduce_sum(tensors, group).wait(),
    "all-gather": lambda tensors, group: all_gather_slices(tensors, group).wait(),
    "reduce-scatter": lambda tensors, group: reduce_scatter_sum(tensors, group).wait(),
    "broadcast": lambda tensors, group: dist.broadcast(tensors[0], group=group, group_src=0),
}


def _fill(tensor: Tensor, number: int) -> None:
    """`number` and twice that in turn: sums over up to 64 ranks are exact even in bfloat16."""
    tensor.fill_(number)
    tensor[1::2] *= 2


def _is_right(case: CollectiveCase, tensor: Tensor, group: dist.ProcessGroup) -> bool:
    """True if this rank has what it should after one call on filled tensors."""
    ranks = range(group.size())
    numbers = [rank % 2 + 1 for rank in ranks]
    if case.collective != "all-gather":
        numbers = [numbers[0] if case.collective == "broadcast" else sum(numbers)] * group.size()
    own = [group.rank()] if case.collective == "reduce-scatter" else ranks
    size = tensor.numel() // group.size()
    return all(_holds(slice_of(tensor, rank, group.size()), rank * size, numbers[rank]) for rank in own)


def _holds(part: Tensor, start: int, number: int) -> bool:
    """True if a part that began at `start` of a filled tensor is as `_fill` would have made it with `number`."""
    even, odd = part[start % 2 :: 2], part[(start + 1) % 2 :: 2]
    return bool((even == number).all()) and bool((odd == 2 * number).all())


def _row(case: CollectiveCase, process: Process, parts: Sequence[_Part]) -> CollectiveRow:
    backend = "nccl" if process.device.type == "cuda" else "gloo"
    members = _members(case, process)
    hosts = max(len({rank * process.hosts // process.world_size for rank in each}) for each in members)
    columns: dict[str, Any] = {**asdict(case), "backend": backend}
    columns["hosts"] = hosts if hosts > 1 else None
    columns["tensors"] = case.tensors if case.tensors > 1 else None
    columns["groups"] = case.groups if case.groups != "one" else None
    environment = describe(process.device)
    failure = next((part.failure for part in parts if part.failure is not None), None)
    if failure is not None:
        return failed_row(CollectiveRow, columns, failure, environment)
    if wrong := tuple(rank for rank, part in enumerate(parts) if part.wrong):
        reason = f"rank {', '.join(map(str, wrong))} did not get what it should"
        return CollectiveRow(**columns, wrong_ranks=wrong, status="wrong", reason=reason, environment=environment)
    slowest = [max(times) for times in zip(*(part.milliseconds for part in parts), strict=True)]
    by_rank = [median(part.milliseconds) for part in parts]
    summary = summarize(slowest)
    bytes_per_s = case.payload_bytes / (summary.median / 1e3)
    return CollectiveRow(
        **columns,
        times={"time": Times.of(summary)},
        n=summary.n,
        payload_bytes=case.payload_bytes,
        fastest_rank_ms=min(by_rank),
        slowest_rank_ms=max(by_rank),
        slowest_rank=by_rank.index(max(by_rank)),
        cpu_ms=mean(part.cpu_ms for part in parts),
        algorithm_gb_s=bytes_per_s / 1e9,
        bus_gb_s=bytes_per_s * bus_factor(case.collective, case.world_size) / 1e9,
        **gpu_state(process.device),  # type: ignore[arg-type]  # columns of `GpuState`
        samples={"time": slowest} | {f"rank {rank}": part.milliseconds for rank, part in enumerate(parts)},
        environment=environment,
    )


@dataclass(frozen=True)
class Fit:
    """A latency–bandwidth line through measured times."""

    link: Link
    worst_error: float  # the largest relative difference between the line and a measured time


def fit_link(collective: CollectiveName, world_size: int, points: Sequence[tuple[int, float]]) -> Fit | None:
    """Least squares of relative errors, over (payload bytes, seconds): t = overhead + bytes on a link / bus bandwidth.

    Relative, so that a microsecond counts as much at a megabyte as a millisecond at a gigabyte. An overhead below zero
    is no overhead: then the line goes through zero. None for one rank, for fewer than two sizes, or where larger
    payloads are not slower, so that there is no bandwidth.
    """
    if len({size for size, _ in points}) < 2 or world_size < 2:
        return None
    on_link = np.array([size * bus_factor(collective, world_size) for size, _ in points])
    seconds = np.array([time for _, time in points])
    columns = np.stack([np.ones_like(on_link), on_link], axis=1) / seconds[:, None]
    overhead, per_byte = np.linalg.lstsq(columns, np.ones_like(seconds), rcond=None)[0]
    if overhead < 0:
        overhead = 0.0
        per_byte = np.linalg.lstsq(columns[:, 1:], np.ones_like(seconds), rcond=None)[0][0]
    if per_byte <= 0:
        return None
    errors = np.abs((overhead + per_byte * on_link) / seconds - 1)
    return Fit(Link(float(overhead), float(1 / per_byte)), float(errors.max()))


def _fits(rows: Sequence[CollectiveRow]) -> Iterator[CollectiveFitRow]:
    """A line of overhead and bandwidth for each collective, and all that a case has besides its size."""
    for group in by_case(rows, "size_mb"):
        measured = [row for row in group if row.status == "ok"]
        points = [(row.payload_bytes or 0, row.times["time"].median / 1e3) for row in measured]
        first = group[0]
        fit = fit_link(first.collective, first.world_size, points)  # type: ignore[arg-type]  # a row has it as text
        if fit is not None:
            case = {name: value for name, value in first.case.items() if name != "size_mb"}
            values = {"sizes": len(points), "worst_error": fit.worst_error}
            values["cpu_share"] = median((row.cpu_ms or 0.0) / row.times["time"].median for row in measured)
            values |= {"overhead_us": fit.link.overhead_s * 1e6, "bus_gb_s": fit.link.bus_bytes_per_s / 1e9}
            yield make_row(CollectiveFitRow, case, values, environment=first.environment)
