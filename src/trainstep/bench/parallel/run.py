"""`trainstep bench parallel`: one workload under every scheme of data parallel training, on all ranks at once.

First every scheme trains a few steps and is compared with one process on the whole batch; no speed is shown of one that
does not agree. Then each is timed. All ranks time the same steps, and a step lasts as long as on the slowest rank.
What communication costs is the difference to the same step without any ("single"). When all are timed, one step of each
may be recorded by the profiler, in a run of its own, so that nothing of the profiler is in the times.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from trainstep.bench.outcome import Failure, attempt, attempt_on_all_ranks
from trainstep.bench.parallel.check import Agreement, Expected, agreement, expected, part_of
from trainstep.bench.parallel.names import SchemeName
from trainstep.bench.parallel.plan import moments, planned_bytes
from trainstep.bench.parallel.schemes import local_gradients, local_state, parallelize
from trainstep.bench.parallel.trace import trace_record, traced_step
from trainstep.bench.step import case_columns, count_tokens, phase_samples
from trainstep.config import StepConfig
from trainstep.errors import UsageError
from trainstep.measure.collectives import Collective, recorded_collectives
from trainstep.measure.environment import describe, gpu_state
from trainstep.measure.memory import GIB
from trainstep.measure.phases import PhaseContext
from trainstep.measure.stats import summarize
from trainstep.measure.timing import Timing, device_clock, time_steps
from trainstep.parallel.process import Process
from trainstep.plan.communication import COLLECTIVES, RankBytes, bytes_sent
from trainstep.report.records import Record, Scalar
from trainstep.schemes import uncounted_bytes
from trainstep.training_step import TrainingStep
from trainstep.workload import WorkloadSource


@dataclass(frozen=True)
class ParallelCase:
    """One scheme."""

    source: WorkloadSource
    config: StepConfig
    """The batch is one rank's, where the workload lets it be chosen; a user's own is divided among the ranks."""
    scheme: SchemeName
    warmup: int = 5
    steps: int = 10

    def columns(self, world_size: int) -> dict[str, Scalar]:
        """The columns that identify the case's row."""
        return case_columns(self.source, self.config) | {"scheme": self.scheme, "world_size": world_size}

    def whole(self, world_size: int) -> StepConfig:
        """The configuration whose workload has the batch of all ranks."""
        if not self.source.is_builtin:
            return self.config
        return dataclasses.replace(self.config, batch=self.config.batch * world_size)


@dataclass(frozen=True)
class _Part:
    """What one rank measured."""

    timing: Timing
    memory: dict[str, int]
    collectives: list[Collective]
    tokens: int | None


def run_cases(cases: Sequence[ParallelCase], process: Process, traces: Path | None = None) -> Iterator[Record]:
    """Measure scheme by scheme, all of one workload and configuration. All ranks must iterate; rank 0 gets the records.

    Args:
        cases: the schemes.
        process: this rank.
        traces: folder for the traces of one step of each scheme that was timed, recorded after all are; None records
            none.

    Raises:
        UsageError: nothing to run, or a configuration that cannot be compared (fp16: its scaler skips steps).
    """
    if not cases or cases[0].steps < 1 or cases[0].warmup < 0:
        raise UsageError("nothing to run: name at least one scheme and one step, and a warm-up of 0 or more")
    first = cases[0]
    if first.config.precision == "fp16":
        raise UsageError("fp16 needs a scaler that skips steps, so schemes cannot be compared step by step; use bf16")
    agreements, parameters = _agreements(cases, process)
    single: float | None = None
    timed: dict[ParallelCase, Record | None] = {}  # all ranks know which, rank 0 how long
    for case in cases:
        found = agreements[case.scheme]
        result: Any = found
        if isinstance(found, Agreement) and found.holds:
            result = attempt_on_all_ranks(partial(_measure, case, process), process)
        if isinstance(result, list):
            timed[case] = None
        if process.rank == 0:
            record = _record(case, process, found, result, parameters, single)
            if case.scheme == "single" and record.status == "ok":
                single = float(record.values["step_ms"] or 0)
            if case in timed:
                timed[case] = record
            yield record
    if traces is not None:
        yield from _traces(timed, process, traces)


def _traces(timed: Mapping[ParallelCase, Record | None], process: Process, folder: Path) -> Iterator[Record]:
    """One step of each scheme under the profiler, beside its row."""
    for case, row in timed.items():
        file = folder / f"trace-{case.scheme}.json.gz"
        found = attempt_on_all_ranks(partial(traced_step, partial(_build, case, process), process, file), process)
        if row is not None:
            step_ms = float(row.values["step_ms"] or 0)
            yield trace_record(row.case, found, row.environment, step_ms=step_ms, trace=file.name)


def _agreements(cases: Sequence[ParallelCase], process: Process) -> tuple[dict[SchemeName, Agreement | Failure], int]:
    """How each scheme compares with one process, and, on rank 0, how many parameters there are."""
    first = cases[0]
    world_size, whole = process.world_size, first.whole(process.world_size)
    wanted: list[Expected | Failure | None] = [None]
    if process.rank == 0:
        wanted = [attempt(partial(expected, first.source, whole, world_size))]
    failures = [wanted[0] if isinstance(wanted[0], Failure) else None]
    dist.broadcast_object_list(failures, group=process.group, group_src=0)
    if failures[0] is not None:
        raise UsageError(f"one process could not train on the whole batch, to compare with: {failures[0].reason}")
    known = wanted[0] if isinstance(wanted[0], Expected) else None
    found: dict[SchemeName, Agreement | Failure] = {}
    for case in cases:
        if case.scheme == "single":  # it trains on its own batch alone: another model, and only a time to compare with
            found[case.scheme] = Agreement(0.0, 0.0, 0.0, 0.0)
            continue
        results = attempt_on_all_ranks(partial(_agree, case, known, process), process)
        found[case.scheme] = results if isinstance(results, Failure) else results[0]
    return found, sum(value.numel() for value in known.parameters.values()) if known is not None else 0


def _agree(case: ParallelCase, wanted: Expected | None, process: Process) -> Agreement:
    return agreement(_build(case, process), wanted, process)


def _build(case: ParallelCase, process: Process) -> TrainingStep:
    config = dataclasses.replace(case.whole(process.world_size), device=str(process.device))
    workload = part_of(case.source.build(config), process.rank, process.world_size)
    return TrainingStep(workload, config, partial(parallelize, case.scheme, process, config))


def _measure(case: ParallelCase, process: Process) -> _Part:
    on_gpu = process.device.type == "cuda"
    memory: dict[str, int] = {}
    step = _build(case, process)
    memory |= _memory("start", step, process.device)
    batch = step.next_batch()

    def run(phase: PhaseContext) -> None:
        step(batch, phase=phase)

    run_warmup = max(case.warmup, 1)  # the optimizer's state is there from the second step on
    timing = time_steps(run, device=device_clock(process.device), warmup=run_warmup, steps=case.steps)
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(process.device)
    hooks = [
        step.optimizer.register_step_pre_hook(lambda *_: memory.update(_memory("before_step", step, process.device))),
        step.optimizer.register_step_post_hook(lambda *_: memory.update(_memory("after_step", step, process.device))),
    ]
    with recorded_collectives() as collectives:
        step(batch)
    for hook in hooks:
        hook.remove()
    if on_gpu:
        memory["peak"] = torch.cuda.max_memory_allocated(process.device) + uncounted_bytes(step.replica)
    return _Part(timing, memory, collectives, count_tokens(batch))


def _memory(when: str, step: TrainingStep, device: torch.device) -> dict[str, int]:
    """Bytes on this rank by kind, and all that is held."""
    held = {
        "weights": [*step.replica.module.parameters(), *step.replica.module.buffers()],
        "gradients": local_gradients(step.replica),
        "optimizer_state": local_state(step.replica),
    }
    found = {f"{when}_{kind}": sum(_local_bytes(tensor) for tensor in tensors) for kind, tensors in held.items()}
    if device.type == "cuda":
        found[when] = torch.cuda.memory_allocated(device) + uncounted_bytes(step.replica)
    return found


def _local_bytes(tensor: Tensor) -> int:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).nbytes


def _record(
    case: ParallelCase,
    process: Process,
    found: Agreement | Failure,
    result: Any,
    parameters: int,
    single: float | None,
) -> Record:
    columns, environment = case.columns(process.world_size), describe(process.device)
    if isinstance(found, Failure) or isinstance(result, Failure):
        failure = found if isinstance(found, Failure) else result
        return Record("parallel", columns, status=failure.status, reason=failure.reason, environment=environment)
    checked: dict[str, Scalar] = {} if case.scheme == "single" else dataclasses.asdict(found)
    if not found.holds:
        reason = (
            f"after a few steps its loss is off by {found.loss_error:.3g} ({found.loss_allowed:.3g} allowed) and its "
            f"parameters by {found.update_error:.3g} of their movement ({found.update_allowed:.3g} allowed)"
        )
        return Record("parallel", columns, checked, status="wrong", reason=reason, environment=environment)
    parts: list[_Part] = result
    slowest = max(parts, key=lambda part: summarize([sample.wall_ms for sample in part.timing.samples]).median)
    samples = phase_samples(slowest.timing)
    values = checked | {"n": len(slowest.timing.samples)} | gpu_state(process.device)
    for name, milliseconds in samples.items():
        values |= summarize(milliseconds).columns(name)
    step_ms = float(values["step_ms"] or 0)
    values["exposed_ms"] = None if single is None or case.scheme == "single" else step_ms - single
    tokens = [part.tokens for part in parts if part.tokens is not None]
    values["tokens_per_s"] = 1e3 * sum(tokens) / step_ms if tokens else None
    values |= _traffic(case, parts[0], parameters, process) | _memory_values(parts)
    if case.source.is_builtin:  # a user's own optimizer may keep any state
        values |= moments(_plan(case, parameters, process))
    return Record("parallel", columns, values, samples, environment=environment)


def _traffic(case: ParallelCase, part: _Part, parameters: int, process: Process) -> dict[str, Scalar]:
    """Collectives of one step, and bytes that a rank sends for them over a ring, beside what the scheme must send."""
    sent = sum(_sent(call, process.world_size) for call in part.collectives)
    floor = _plan(case, parameters, process).sent if case.scheme != "single" else 0
    return {
        "collectives": len(part.collectives),
        "sent_gib": sent / process.world_size / GIB,
        "sent_floor_gib": floor / GIB,
    }


def _plan(case: ParallelCase, parameters: int, process: Process) -> RankBytes:
    return planned_bytes(
        case.scheme,
        parameters,
        process.world_size,
        precision=case.config.precision,
        optimizer=case.config.optimizer,
        model=case.source.model,
        peer_copies=case.scheme == "fsdp" and process.device.type == "cuda",
    )


def _sent(call: Collective, world_size: int) -> int:
    """By all ranks together."""
    name = "reduce-scatter" if call.name == "all-to-all" else call.name  # of each buffer, all but the own share
    return bytes_sent(name, call.bytes, world_size) if name in COLLECTIVES else 0


def _memory_values(parts: Sequence[_Part]) -> dict[str, Scalar]:
    """On the rank that holds most."""
    names = dict.fromkeys(name for part in parts for name in part.memory)
    return {f"{name}_gib": max(part.memory[name] for part in parts) / GIB for name in names}
