"""What came of a scheme, on all ranks, as its row."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from trainstep.bench.outcome import Failure
from trainstep.bench.parallel.case import ParallelCase
from trainstep.bench.parallel.check import Agreement
from trainstep.bench.parallel.measure import RankMeasurement
from trainstep.bench.parallel.plan import moments, planned_bytes
from trainstep.bench.step import phase_samples
from trainstep.measure.collectives import Collective
from trainstep.measure.environment import describe, gpu_state
from trainstep.measure.memory import GIB
from trainstep.parallel.process import Process
from trainstep.plan.communication import COLLECTIVES, RankBytes, bytes_sent
from trainstep.records import Record, Scalar
from trainstep.stats import summarize

KIND = "parallel"


@dataclass(frozen=True)
class Timed:
    """A scheme that was measured."""

    ranks: Sequence[RankMeasurement]
    """By rank."""
    agreement: Agreement | None
    """None for single, which has nothing to agree with."""


Result = Timed | Agreement | Failure
"""What came of a scheme: it was measured, or it does not agree with one process and is off by so much, or it failed."""


def row_of(
    case: ParallelCase, process: Process, result: Result, *, num_parameters: int, single_ms: float | None
) -> Record:
    """The row of a scheme. One that does not agree shows by how much, and no speed.

    Args:
        case: the scheme.
        process: rank 0.
        result: what came of it.
        num_parameters: of the model.
        single_ms: the step without communication, where it was timed before.
    """
    columns, environment = case.columns(process.world_size), describe(process.device)
    if isinstance(result, Failure):
        return Record(KIND, columns, status=result.status, reason=result.reason, environment=environment)
    if isinstance(result, Agreement):
        reason = (
            f"after a few steps its loss is off by {result.loss_error:.3g} ({result.loss_allowed:.3g} allowed) and its "
            f"parameters by {result.update_error:.3g} of their movement ({result.update_allowed:.3g} allowed)"
        )
        values = dataclasses.asdict(result)
        return Record(KIND, columns, values, status="wrong", reason=reason, environment=environment)
    samples = phase_samples(_slowest(result.ranks).timing)
    values = _values(case, process, result, samples, num_parameters, single_ms)
    return Record(KIND, columns, values, samples, environment=environment)


def step_ms(row: Record) -> float:
    """The median step of a row that was timed, in milliseconds."""
    median = row.values["step_ms"]
    assert isinstance(median, float), f"a median of {median!r}"
    return median


def _slowest(ranks: Sequence[RankMeasurement]) -> RankMeasurement:
    """The rank that a step lasts as long as."""
    return max(ranks, key=lambda each: summarize([sample.wall_ms for sample in each.timing.samples]).median)


def _values(
    case: ParallelCase,
    process: Process,
    timed: Timed,
    samples: dict[str, list[float]],
    num_parameters: int,
    single_ms: float | None,
) -> dict[str, Scalar]:
    values: dict[str, Scalar] = {} if timed.agreement is None else dataclasses.asdict(timed.agreement)
    values["n"] = len(samples["step"])
    values |= gpu_state(process.device)
    for name, milliseconds in samples.items():
        values |= summarize(milliseconds).columns(name)
    median = summarize(samples["step"]).median
    values["exposed_ms"] = None if single_ms is None or not case.scheme.communicates else median - single_ms
    tokens = [each.tokens for each in timed.ranks if each.tokens is not None]
    values["tokens_per_s"] = 1e3 * sum(tokens) / median if tokens else None
    plan = _plan(case, process, num_parameters)
    values |= _traffic(case, timed.ranks[0].collectives, plan, process.world_size) | _memory(timed.ranks)
    if case.source.is_builtin:  # a user's own optimizer may keep any state
        values |= moments(plan)
    return values


def _plan(case: ParallelCase, process: Process, num_parameters: int) -> RankBytes:
    return planned_bytes(
        case.scheme,
        num_parameters,
        process.world_size,
        precision=case.config.precision,
        optimizer=case.config.optimizer,
        model=case.source.model,
        peer_copies=case.scheme.takes_peer_copies and process.device.type == "cuda",
    )


def _traffic(
    case: ParallelCase, collectives: Sequence[Collective], plan: RankBytes, world_size: int
) -> dict[str, Scalar]:
    """Collectives of one step, and bytes that a rank sends for them over a ring, beside those that are planned."""
    sent = sum(_sent(call, world_size) for call in collectives)
    return {
        "collectives": len(collectives),
        "sent_gib": sent / world_size / GIB,
        "sent_floor_gib": plan.sent / GIB if case.scheme.communicates else 0.0,
    }


def _sent(call: Collective, world_size: int) -> int:
    """By all ranks together."""
    name = "reduce-scatter" if call.name == "all-to-all" else call.name  # of each buffer, all but the own share
    return bytes_sent(name, call.bytes, world_size) if name in COLLECTIVES else 0


def _memory(ranks: Sequence[RankMeasurement]) -> dict[str, Scalar]:
    """On the rank that holds most."""
    names = dict.fromkeys(name for each in ranks for name in each.memory)
    return {f"{name}_gib": max(each.memory[name] for each in ranks) / GIB for name in names}
