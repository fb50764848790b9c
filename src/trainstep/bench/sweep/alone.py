"""Runs of `bench step` in processes of their own: those of `bench ab`, and those whose first step must be cold.

A process pays once for loading kernels, for its libraries' handles and for memory that the allocator keeps. A warm-up
of 0 shows these costs only where nothing ran before in the process, neither another case nor the check.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path

from trainstep.base.files import remove
from trainstep.bench.step import StepCase
from trainstep.bench.sweep.cases import Case
from trainstep.bench.sweep.run import run_here
from trainstep.rows import StepRow
from trainstep.rows.records import Scalar, make_row, of_kind, read_records
from trainstep.rows.row import Row
from trainstep.rows.steps import Checked

_CHECK = {each.name for each in fields(Checked)} - {each.name for each in fields(Row)}


def step_alone(settings: Mapping[str, Scalar], out: Path, number: int) -> StepRow:
    """Run `bench step` for one case and return its row. A process that ends badly gives a row without a case.

    Args:
        settings: flags of `bench step`, without dashes.
        out: the folder of the whole command. The run's output and rows stay below it.
        number: of the run, from 0.
    """
    runs = out.resolve() / "runs"
    if runs.is_symlink():
        remove(runs)
    case = Case("bench step", settings, runs / str(number))
    (_,) = run_here([case])
    ended = case.finished()
    assert ended, "a case that has ended has a row"
    if ended[-1].status == "ok":
        (row,) = of_kind(read_records(case.folder / "results.jsonl"), StepRow)
        return row
    return make_row(StepRow, {}, {}, status=ended[-1].status, reason=ended[-1].reason)


def cold_records(
    cases: Sequence[StepCase], model_of: Callable[[StepCase], Mapping[str, Scalar]], out: Path, *, check: bool
) -> Iterator[StepRow]:
    """Yield a row per case, each from a process of its own, which checks the step after it has timed it.

    Cases of equal settings share one check, which the first of them makes.

    Args:
        model_of: gives the flags that name a case's model.
        out: the folder of the whole command.
        check: whether steps are checked at all.
    """
    checked: dict[StepCase, StepRow] = {}
    for number, case in enumerate(cases):
        key = replace(case, mode="step", warmup=0, repeat=0)
        before = checked.get(key)
        if before is not None and before.status == "wrong":
            yield replace(before, **case.columns())
            continue
        own = {"mode": case.mode, "warmup": case.warmup, "steps": case.steps, "sustained": case.sustained}
        own |= {"no_check": before is not None or not check}
        row = step_alone({**model_of(case), **vars(case.config), **own}, out, number)
        row = replace(row, **case.columns())  # each run is pass 0 of its process
        if before is not None:
            row = replace(row, **{name: getattr(before, name) for name in _CHECK})
        elif row.status in ("ok", "wrong"):
            checked[key] = row
        yield row
