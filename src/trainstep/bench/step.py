"""`trainstep bench step`: phases, memory and throughput of one training step, case by case over a grid."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from trainstep.base.config import PHASES_OF_MODE, StepConfig, StepMode
from trainstep.base.errors import UsageError
from trainstep.base.stats import summarize
from trainstep.bench.cases import expand
from trainstep.check.step import StepCheck, plain_form
from trainstep.check.verdict import Verdict
from trainstep.measure.environment import describe
from trainstep.measure.outcome import Failure, attempt, failed_row
from trainstep.measure.step import StepMeasurement, case_columns, measure_step, measured_fields, phase_samples
from trainstep.rows import StepRow
from trainstep.rows.records import Times
from trainstep.step.workload import WorkloadSource, resolve_device


@dataclass(frozen=True)
class StepCase:
    """A cell of the grid."""

    source: WorkloadSource
    config: StepConfig
    mode: StepMode = "step"
    warmup: int = 5
    steps: int = 10
    repeat: int = 0
    """Number of the pass over the grid, from 0."""
    sustained: bool = False
    """Timed without a synchronisation between steps."""

    def columns(self) -> dict[str, Any]:
        """The settings of the case's row."""
        own = {"mode": self.mode, "warmup": self.warmup, "steps": self.steps, "repeat": self.repeat}
        timing = {"timing": "sustained"} if self.sustained else {}
        return case_columns(self.source, self.config) | own | timing


def step_cases(
    sources: Sequence[WorkloadSource],
    axes: Mapping[str, Sequence[Any]],
    *,
    modes: Sequence[StepMode] = ("step",),
    warmups: Sequence[int] = (5,),
    steps: int = 10,
    repeat: int = 1,
    sustained: bool = False,
) -> list[StepCase]:
    """Every combination of workloads, `StepConfig` axes, modes and warm-ups, `repeat` times over.

    Passes over the grid follow one another (A B A B), so that a drift of the machine reaches every case alike.
    """
    if not sources or steps < 1 or repeat < 1 or not warmups or min(warmups) < 0:
        raise UsageError(
            f"nothing to run: {len(sources)} workloads, steps {steps}, repeat {repeat}, warm-ups {list(warmups)}; "
            "expected at least one workload, one step and one pass, and warm-ups of 0 or more"
        )
    points = itertools.product(range(repeat), sources, expand(axes), modes, warmups)
    return [
        StepCase(source, StepConfig(**values), mode, warmup, steps, index, sustained)
        for index, source, values, mode, warmup in points
    ]


Judged = dict[tuple[WorkloadSource, StepConfig], Verdict | Failure]


def run_cases(cases: Iterable[StepCase], *, check: bool = True, judge: StepCheck | None = None) -> Iterator[StepRow]:
    """Measure case by case and yield each row when it is known; a case that fails, or is wrong, is a row too.

    Neighbours that differ only in their warm-up share one run: each row is the window of it that such a case would have
    been, first step included for a warm-up of 0. Before a configuration is first timed it is judged beside the plain
    step of its workload (`check.step`), and with it all others of the grid that have the same plain step. `judge` does
    that for those whose plain step is its own. With a warm-up of 0 the check comes after the run, as it would warm the
    process. Only the first run of a process has a cold first step, so `bench step` gives every such case a process.
    """
    every = list(cases)
    verdicts: Judged = {}
    for _, group in itertools.groupby(every, key=lambda case: dataclasses.replace(case, warmup=0)):
        alike = list(group)
        run = max(alike, key=lambda case: case.warmup)
        key = run.source, run.config
        measure = partial(
            measure_step, run.source, run.config, run.mode, run.warmup, run.steps, sustained=run.sustained
        )
        is_cold = key not in verdicts and any(case.warmup == 0 for case in alike)
        before = attempt(measure) if is_cold else None
        if check and key not in verdicts:
            verdicts |= _judge_alike(run, every, judge)
        found = verdicts.get(key)
        is_wrong = isinstance(found, Verdict) and not found.is_right
        if is_wrong:
            before = Failure("wrong", str(found))
        result = attempt(measure) if before is None else before
        for case in alike:
            yield _record(case, result, found)


def _judge_alike(
    case: StepCase, cases: Sequence[StepCase], judge: StepCheck | None
) -> dict[tuple[WorkloadSource, StepConfig], Verdict | Failure]:
    """Verdicts on all configurations of the grid whose plain step is that of `case`, so that it is taken once."""
    plain = plainest(case.config)
    if judge is None or (judge.source, judge.plain) != (case.source, plain):
        judge = StepCheck(case.source, plain)
    alike = [each.config for each in cases if each.source == case.source and plainest(each.config) == plain]
    return {(case.source, config): attempt(partial(judge.judge, config)) for config in dict.fromkeys(alike)}


def plainest(config: StepConfig) -> StepConfig:
    """Plain form that a step is checked beside: nothing is computed twice."""
    return dataclasses.replace(plain_form(config), checkpointing="none")


def _record(case: StepCase, result: StepMeasurement | Failure, judged: Verdict | Failure | None) -> StepRow:
    environment = describe(resolve_device(case.config.device))
    check: dict[str, Any] = {"not_checked": "not asked for"}
    if isinstance(judged, Failure):
        check = {"not_checked": f"{judged.status}: {judged.reason}"}
    elif judged is not None:
        check = judged.columns()
    if isinstance(result, Failure):
        return dataclasses.replace(failed_row(StepRow, case.columns(), result, environment), **check)
    window = result.timing.window(case.warmup, case.steps)
    assert set(window.samples[0].laps) == set(PHASES_OF_MODE[case.mode]), "a phase went unmeasured"
    fields = measured_fields(result, window, case.config.precision)
    samples: dict[str, Sequence[float]] = dict(phase_samples(window))
    if batch_ms := result.batch_ms[case.warmup : case.warmup + case.steps]:
        samples["batch"] = batch_ms
        fields["times"]["batch"] = Times.of(summarize(batch_ms), spread=False)
    if result.losses:
        samples["training_loss"] = result.losses
    return StepRow(**case.columns(), **fields, **check, samples=samples, environment=environment)
