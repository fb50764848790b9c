"""`trainstep bench parallel`: one workload under every scheme of data parallel training, on all ranks at once.

First every scheme's gradients, updates and a few steps are compared with one process on the whole batch; no speed is
shown of one that does not agree. Then they are timed in turns: in every round each is built anew, in an order drawn
anew, so that drift reaches all alike, and one scheme's memory is not another's. All ranks time the same steps, and a
step lasts as long as on the slowest rank.
What a step waits for other ranks is measured in the timed steps (`waits`). Each rank's memory is taken at three
moments, and its collectives are recorded, beside what `plan.communication` says of both. When all are timed, one step
of each may be recorded by the profiler, in a run of its own, so that nothing of the profiler is in the times.
"""

from __future__ import annotations

import dataclasses
import random
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from trainstep.base.errors import UsageError
from trainstep.base.precision import PRECISIONS
from trainstep.base.stats import summarize
from trainstep.bench.parallel import ParallelCase
from trainstep.bench.parallel.batches import same_on_all_ranks
from trainstep.bench.parallel.planned import moments, planned_bytes
from trainstep.bench.parallel.ratios import ratios_alike, with_speedups
from trainstep.bench.parallel.trace import trace_rows, traced_step
from trainstep.bench.parallel.waits import Transfers, Waits
from trainstep.check.ranks import RANKS_DIFFER, compare_with_one_process
from trainstep.check.verdict import Verdict
from trainstep.measure.collectives import Collective
from trainstep.measure.environment import describe, gpu_state
from trainstep.measure.memory import GIB
from trainstep.measure.outcome import Failure, attempt_on_all_ranks, failed_row
from trainstep.measure.step import phase_samples
from trainstep.measure.timing import Timing, device_clock, time_steps, time_window
from trainstep.parallel.process import Process
from trainstep.parallel.replicas import (
    local_gradients,
    local_state,
    local_weights,
    transports_of,
    uncounted_bytes,
    wait_for_parameters,
)
from trainstep.plan.communication import COLLECTIVES, bytes_sent
from trainstep.rows import ParallelFamilyRow, ParallelRatioRow, ParallelRow, ParallelTraceRow
from trainstep.rows.records import Scalar, SoFar, Status, Times, make_row
from trainstep.step.batches import count_tokens, tensors_of
from trainstep.step.training_step import TrainingStep

COMPUTING = ("forward", "loss", "backward", "optimizer")
"""Phases that compute, and may wait for other ranks on the way."""
LAUNCHES = 5
"""Steps with a synchronisation around each, which tell how long the host takes to launch one. Where nothing waits
between steps it runs ahead of the device until that holds it up."""


def run_cases(
    cases: Sequence[ParallelCase],
    process: Process,
    traces: Path | None = None,
    *,
    rounds: int = 1,
    on_part: Callable[[str], object] = lambda part: None,
) -> Iterator[ParallelRow | ParallelRatioRow | ParallelTraceRow | ParallelFamilyRow | SoFar]:
    """Measure schemes, all of one workload and configuration but for compilation. All ranks must iterate; rank 0 gets
    the rows.

    After every round come the rows of what has been measured so far, so that a run that is killed leaves them.

    Args:
        traces: folder for traces of one step of each scheme that was timed, recorded after all are; None records none.
        rounds: how often each scheme is built and timed.
        on_part: told what is done next: of a large model judging takes minutes before the first time.

    Raises:
        UsageError: nothing to run, or a configuration that cannot be compared (fp16: its scaler skips steps).
    """
    if not cases or cases[0].steps < 1 or cases[0].warmup < 0 or rounds < 1:
        raise UsageError("nothing to run: name at least one scheme, one step and one round, and a warm-up of 0 or more")
    precision = cases[0].config.precision
    if PRECISIONS[precision].needs_scaler:
        raise UsageError(
            f"{precision} needs a scaler that skips steps, so schemes cannot be compared step by step; use bf16"
        )
    source, batches = same_on_all_ranks(cases[0].source, cases[0].whole(process.world_size), process)
    cases = [dataclasses.replace(each, source=source) for each in cases]
    comparison = compare_with_one_process(cases, process, on_part)
    beside = {"batches": batches, "share_difference": comparison.share_difference}
    agreements = {
        dataclasses.replace(case, allow_unused=comparison.allow_unused): found
        for case, found in comparison.cases.items()
    }
    results: Mapping[ParallelCase, Result] = {}
    rows: dict[ParallelCase, ParallelRow] = {}
    for results in time_in_turns(agreements, process, rounds, on_part):
        if process.rank == 0:
            counts = {"num_parameters": comparison.num_parameters, "frozen": comparison.frozen}
            rows = {case: parallel_row(case, process, each, **counts, beside=beside) for case, each in results.items()}
            yield SoFar([*with_speedups(list(rows.values())), *ratios_alike(rows.values())])
    if process.rank == 0:
        yield from with_speedups(list(rows.values()))
        yield from ratios_alike(rows.values())
    if traces is None:
        return
    for case in (each for each in agreements if isinstance(results[each], Timed)):
        compiled = f"-{case.config.compile}" if case.config.compile != cases[0].config.compile else ""
        on_part(f"{case.label}: a step is recorded")
        label = case.scheme.label.replace(" ", "-")
        file = traces / f"trace-{label}{compiled}.json.gz"
        found = attempt_on_all_ranks(partial(traced_step, partial(case.build, process), process, file), process)
        if process.rank == 0:
            yield from trace_rows(rows[case], found, trace=file.name)


def time_in_turns(
    agreements: Mapping[ParallelCase, Verdict | Failure | None],
    process: Process,
    rounds: int,
    on_part: Callable[[str], object] = lambda part: None,
) -> Iterator[Mapping[ParallelCase, Result]]:
    """Build and time the cases that agree, once a round; one that fails is left out from then on.

    Yields every case's result so far: first those of cases that are not timed, if there are any, then after each round
    those of all. All ranks draw the same orders.
    """
    taken: dict[ParallelCase, list[Sequence[RankMeasurement]]] = {}
    results: dict[ParallelCase, Result] = {}
    right: dict[ParallelCase, Verdict | None] = {}
    for case, agreement in agreements.items():
        if isinstance(agreement, Failure) or (agreement is not None and not agreement.holds):
            results[case] = agreement
        else:
            taken[case], right[case] = [], agreement
    if results:
        yield dict(results)
    draw = random.Random(0)
    for number in range(1, rounds + 1):
        if taken:
            on_part(f"{len(taken)} are timed, round {number} of {rounds}")
        for case in draw.sample(list(taken), len(taken)):
            ranks = attempt_on_all_ranks(partial(measure, case, process), process)
            if isinstance(ranks, Failure):
                del taken[case]
                results[case] = ranks
            else:
                taken[case].append(ranks)
                results[case] = Timed(taken[case], right[case])
        yield {case: results[case] for case in agreements}


@dataclass(frozen=True)
class RankMeasurement:
    """Measurements of one rank."""

    timing: Timing
    memory: Mapping[str, int]
    """Bytes, at the moments start, before_step and after_step: `MOMENT_weights`, `MOMENT_gradients` and
    `MOMENT_optimizer_state`; on a GPU also `MOMENT`, all that is allocated, `peak`, the most of it in a step, and
    `peak_reserved`, the most that torch's allocator held."""
    collectives: Sequence[Collective]
    """Collectives of one step."""
    tokens: int | None
    """In this rank's batch; None where it is not known."""
    waited: Sequence[Mapping[str, float]] = ()
    """Milliseconds that each timed step waited for other ranks by phase, but for the phase "communication"."""
    all_communication_ms: float | None = None
    """In which a call was under way, of the step whose collectives are recorded."""
    samples: int = 0
    """In this rank's batch: rows of its tensors."""
    transport: str | None = None
    """Transport of our shards and gradients within a replica."""
    transport_between: str | None = None
    """Transport of gradients between replicas."""
    gpu: Mapping[str, Scalar] = field(default_factory=dict)
    """State of the GPU right after the last timed step."""
    launches: Timing | None = None
    """Times of a window, in which nothing waits: steps with a synchronisation around each."""


@dataclass(frozen=True)
class Timed:
    """A scheme that was measured."""

    rounds: Sequence[Sequence[RankMeasurement]]
    """All ranks of each."""
    agreement: Verdict | None
    """None for single, which has nothing to agree with."""


Result = Timed | Verdict | Failure
"""A scheme's measurement; or how far it is from one process, where that is too far; or why it failed."""


def measure(case: ParallelCase, process: Process) -> RankMeasurement:
    """Build the case's step, time it, and take one more step for memory and collectives. All ranks call it."""
    on_gpu = process.device.type == "cuda"
    step = case.build(process)
    memory = _held("start", step, process.device)
    batch = step.next_batch()
    warmup = max(case.warmup, 1)  # the optimizer's state is there from the second step on
    device = device_clock(process.device)
    waits = Waits(step)
    take_one = waits.around(lambda phase: step(batch, phase=phase))
    take = one_by_one = partial(time_steps, take_one, device=device)
    if case.sustained:
        take = partial(time_window, take_one, device=device, at_end=partial(wait_for_parameters, step.replica))
    with waits.watching():
        if case.do_bench is None:
            timing = take(warmup=warmup, steps=case.steps)
        else:
            estimate = min(sample.wall_ms for sample in take(warmup=1, steps=2).samples)  # one may compile once more
            slowest: list[float] = [estimate] * process.world_size
            dist.all_gather_object(slowest, estimate, group=process.group)
            warmup, steps = case.do_bench.counts(max(slowest))
            timing = take(warmup=max(warmup - 2, 0), steps=steps)  # the estimate was the first two
    waited = waits.ms(len(timing.samples))
    gpu = gpu_state(process.device)
    launches = one_by_one(warmup=0, steps=LAUNCHES) if case.sustained and on_gpu else None
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(process.device)
    hooks = [
        step.optimizer.register_step_pre_hook(lambda *_: memory.update(_held("before_step", step, process.device))),
        step.optimizer.register_step_post_hook(lambda *_: memory.update(_held("after_step", step, process.device))),
    ]
    transfers = Transfers(process.device)
    with transfers.watching() as collectives:
        step(batch)
        device.synchronize()
    for hook in hooks:
        hook.remove()
    if on_gpu:
        memory["peak"] = torch.cuda.max_memory_allocated(process.device) + uncounted_bytes(step.replica)
        memory["peak_reserved"] = torch.cuda.max_memory_reserved(process.device) + uncounted_bytes(step.replica)
    transport, between = transports_of(step.replica)
    return RankMeasurement(
        timing,
        memory,
        collectives,
        count_tokens(batch),
        waited=waited,
        all_communication_ms=transfers.ms(),
        samples=max(map(len, tensors_of(batch)), default=0),
        transport=transport,
        transport_between=between,
        gpu=gpu,
        launches=launches,
    )


def _held(moment: str, step: TrainingStep, device: torch.device) -> dict[str, int]:
    """Bytes on this rank now: by kind, and on a GPU all that is held."""
    kinds = {
        "weights": [*local_weights(step.replica), *step.replica.module.buffers()],
        "gradients": local_gradients(step.replica),
        "optimizer_state": local_state(step.replica),
    }
    found = {
        f"{moment}_{kind}": sum((each.to_local() if isinstance(each, DTensor) else each).nbytes for each in tensors)
        for kind, tensors in kinds.items()
    }
    if device.type == "cuda":
        found[moment] = torch.cuda.memory_allocated(device) + uncounted_bytes(step.replica)
    return found


def _check_columns(found: Verdict) -> dict[str, Any]:
    """The verdict's fields of a `ParallelRow`."""
    columns = found.columns()
    del columns["not_checked"]  # such a row has it as its reason
    return columns | {"gradient_allowed": columns.pop("error_budget"), "ranks_agree": RANKS_DIFFER not in found.faults}


def parallel_row(
    case: ParallelCase,
    process: Process,
    result: Result,
    *,
    num_parameters: int,
    frozen: int = 0,
    beside: Mapping[str, Scalar] = MappingProxyType({}),
) -> ParallelRow:
    """The row of a scheme, on rank 0, but for its speed-up. One that does not agree shows by how much, and no speed.

    `num_parameters` is the model's, of which `frozen` are not trained; `beside` are columns that all schemes of the
    workload share.
    """
    environment = describe(process.device)
    columns: dict[str, Any] = case.columns(process.world_size)
    if isinstance(result, Failure):
        return failed_row(ParallelRow, columns, result, environment, beside)
    if isinstance(result, Verdict):
        values, said = {**beside, **_check_columns(result)}, str(result)
        status: Status = "wrong" if said else "unsupported"
        return make_row(
            ParallelRow, columns, values, status=status, reason=said or result.not_told, environment=environment
        )
    slowest = [max(ranks, key=step_ms) for ranks in result.rounds]
    samples: dict[str, list[float]] = {}
    for rank in slowest:
        for name, milliseconds in _samples(rank).items():
            samples.setdefault(name, []).extend(milliseconds)
    times = {name: Times.of(summarize(milliseconds), spread=False) for name, milliseconds in samples.items()}
    first = result.rounds[0]
    step, tokens = times["step"].median, [each.tokens for each in first if each.tokens is not None]
    communicates, collectives = case.scheme.communicates, first[0].collectives
    plan = planned_bytes(
        case.scheme,
        num_parameters,
        process.world_size,
        frozen=frozen,
        precision=case.config.precision,
        optimizer=case.config.optimizer,
        model=case.source.model,
        peer_copies=first[0].transport == "peer-copies",
    )
    measured: dict[str, Any] = {
        **beside,
        **({} if result.agreement is None else _check_columns(result.agreement)),
        "n": len(samples["step"]),
        "rounds": len(result.rounds),
        "exposed_share": times["exposed_communication"].median / step if "exposed_communication" in times else None,
        "all_communication_ms": _median(rank.all_communication_ms for rank in slowest),
        "samples_per_s": 1e3 * sum(each.samples for each in (first if communicates else first[:1])) / step or None,
        "tokens_per_s": 1e3 * sum(tokens) / step if tokens else None,
        "transport": first[0].transport,
        "transport_between": first[0].transport_between,
        "collectives": len(collectives),
        "sent_gib": sum(_sent(call, process.world_size) for call in collectives) / GIB,
        "sent_floor_gib": plan.sent / GIB if communicates else 0.0,
        **_memory(first),
        **(moments(plan) if case.source.is_builtin else {}),  # a user's own optimizer may keep any state
        **slowest[-1].gpu,
    }
    return ParallelRow(**columns, times=times, **measured, samples=samples, environment=environment)


def step_ms(rank: RankMeasurement) -> float:
    """The median of its steps, by the host's clock."""
    return summarize([step.wall_ms for step in rank.timing.samples]).median


def _median(values: Iterable[float | None]) -> float | None:
    found = [each for each in values if each is not None]
    return statistics.median(found) if found else None


def _sent(call: Collective, world_size: int) -> float:
    """By a rank, over a ring of those that make the call."""
    name = "reduce-scatter" if call.name == "all-to-all" else call.name  # of each buffer, all but the own share
    ranks = call.ranks or world_size
    return bytes_sent(name, call.bytes, ranks) / ranks if name in COLLECTIVES else 0


def _memory(ranks: Sequence[RankMeasurement]) -> dict[str, Scalar]:
    """On the rank that holds most."""
    names = dict.fromkeys(name for each in ranks for name in each.memory)
    return {f"{name}_gib": max(each.memory[name] for each in ranks) / GIB for name in names}


def _samples(rank: RankMeasurement) -> dict[str, list[float]]:
    """Samples of a step, its phases, and on a GPU their launches: `issue`, `wait` and each phase's `_issue`, which a
    window has of other steps. Where waits were marked, also what a step waits for other ranks, and each phase without
    that."""
    found, launches = phase_samples(rank.timing), rank.launches or rank.timing
    if rank.waited:
        after_backward = found.get("communication", [0.0] * len(rank.waited))
        waits = zip(after_backward, rank.waited, strict=True)
        found["exposed_communication"] = [most + sum(each.values()) for most, each in waits]
        for phase in [each for each in COMPUTING if each in found]:
            pairs = zip(found[phase], rank.waited, strict=True)
            found[f"{phase}_computing"] = [whole - each.get(phase, 0.0) for whole, each in pairs]
    if "wait" in found:
        told = phase_samples(launches) | {"issue": [sample.issue_ms for sample in launches.samples]}
        found |= {name: each for name, each in told.items() if name == "wait" or name.endswith("issue")}
    return found
