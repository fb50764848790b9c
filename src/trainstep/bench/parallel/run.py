"""`trainstep bench parallel`: one workload under every scheme of data parallel training, on all ranks at once.

First every scheme trains a few steps and is compared with one process on the whole batch; no speed is shown of one that
does not agree. Then each is timed. All ranks time the same steps, and a step lasts as long as on the slowest rank.
What communication costs is the difference to the same step without any ("single"). When all are timed, one step of each
may be recorded by the profiler, in a run of its own, so that nothing of the profiler is in the times.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

from trainstep.bench.check.parallel import Agreement, compare_with_one_process
from trainstep.bench.outcome import Failure, attempt_on_all_ranks
from trainstep.bench.parallel.measure import Result, Timed, measure, parallel_row
from trainstep.bench.parallel.trace import trace_row, traced_step
from trainstep.bench.parallel_case import ParallelCase
from trainstep.errors import UsageError
from trainstep.kinds import ParallelRow, ParallelTraceRow
from trainstep.parallel.process import Process
from trainstep.precision import PRECISIONS


def run_cases(
    cases: Sequence[ParallelCase], process: Process, traces: Path | None = None
) -> Iterator[ParallelRow | ParallelTraceRow]:
    """Measure scheme by scheme, all of one workload and configuration. All ranks must iterate; rank 0 gets the rows.

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
    precision = cases[0].config.precision
    if PRECISIONS[precision].needs_scaler:
        raise UsageError(
            f"{precision} needs a scaler that skips steps, so schemes cannot be compared step by step; use bf16"
        )
    comparison = compare_with_one_process(cases, process)
    single_ms: float | None = None
    timed: list[ParallelCase] = []
    rows: dict[ParallelCase, ParallelRow] = {}  # on rank 0
    for case in [dataclasses.replace(each, allow_unused=comparison.allow_unused) for each in cases]:
        result = _measured(case, comparison.schemes[case.scheme], process)
        if isinstance(result, Timed):
            timed.append(case)
        if process.rank == 0:
            row = parallel_row(case, process, result, num_parameters=comparison.num_parameters, single_ms=single_ms)
            if not case.scheme.communicates and isinstance(result, Timed):
                single_ms = row.times["step"].median
            rows[case] = row
            yield row
    if traces is not None:
        yield from _traced(timed, rows, process, traces)


def _measured(case: ParallelCase, agreement: Agreement | Failure | None, process: Process) -> Result:
    """Measure a scheme on all ranks, if it ran and agreed with one process."""
    if isinstance(agreement, Failure) or (agreement is not None and not agreement.holds):
        return agreement
    ranks = attempt_on_all_ranks(partial(measure, case, process), process)
    return ranks if isinstance(ranks, Failure) else Timed(ranks, agreement)


def _traced(
    cases: Sequence[ParallelCase], rows: Mapping[ParallelCase, ParallelRow], process: Process, folder: Path
) -> Iterator[ParallelTraceRow]:
    """One step of each scheme under the profiler, beside its row."""
    for case in cases:
        file = folder / f"trace-{case.scheme.name}.json.gz"
        found = attempt_on_all_ranks(partial(traced_step, partial(case.build, process), process, file), process)
        if process.rank == 0:
            yield trace_row(rows[case], found, trace=file.name)
