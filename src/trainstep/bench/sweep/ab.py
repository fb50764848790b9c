"""`trainstep bench ab`: several fresh processes per arm, in random order, until the interval of the ratio is narrow.

What a process gets once (memory layout, clocks, what else runs) is shared by all of its steps, so one process is one
sample of an arm. Every round starts each arm once, in an order drawn anew, so that drift reaches all arms alike.
"""

from __future__ import annotations

import itertools
import math
import random
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from trainstep.base.errors import UsageError
from trainstep.base.stats import ratio_of_runs, run_deviation, smallest_found, verdict
from trainstep.bench.sweep.alone import step_alone
from trainstep.rows import RatioRow, StepRow
from trainstep.rows.records import Scalar, make_row

FEWEST = 5
"""Rounds before the first look at the interval: below, it is narrow by chance too often."""
LOOKING = 0.965
"""Confidence of every interval that may end the rounds. To stop when an interval happens to be narrow costs coverage:
simulated, 95 % intervals end with 93 to 96 %, and these with 95 % or more (`tests/bench/sweep/test_ab.py`)."""


@dataclass(frozen=True)
class Arm:
    """A case of those that are compared."""

    name: str
    """The value of the flag that differs; `A` and `A again` where none does."""
    settings: Mapping[str, Scalar]
    """Flags of `bench step`, without dashes."""
    is_checked: bool = True
    """True if the run is checked before it is timed: the first one is, and later ones are the same step."""


def arms_of(axes: Mapping[str, Sequence[Scalar]], aa: bool) -> tuple[str, list[Arm]]:
    """The flag that has several values, and an arm for each; with `aa` two arms of one case, of the flag `nothing`.

    Raises:
        UsageError: another number of flags than one, or than none with `aa`, has several values.
    """
    varied = [name for name, values in axes.items() if len(values) > 1]
    if len(varied) != (not aa):
        raise UsageError(
            f"several values for {', '.join(f'--{name}' for name in varied) or 'no flag'}; expected "
            + ("none with --aa, which compares a case with itself" if aa else "one flag, whose values are compared")
        )
    settings = {name: values[0] for name, values in axes.items() if values}
    if aa:
        return "nothing", [Arm(name, settings) for name in ("A", "A again")]
    if len(set(axes[varied[0]])) < len(axes[varied[0]]):
        raise UsageError(f"--{varied[0]} has a value twice; to compare a case with itself give it once, and --aa")
    return varied[0], [Arm(str(value), {**settings, varied[0]: value}) for value in axes[varied[0]]]


def run_arms(
    flag: str,
    arms: Sequence[Arm],
    run_alone: Callable[[Arm, int], StepRow],
    *,
    width: float,
    max_runs: int,
    seed: int = 0,
) -> Iterator[StepRow | RatioRow]:
    """Run each arm again and again; yield a row per run as it ends, and at last one per pair of arms.

    Args:
        flag: what the arms differ in.
        run_alone: an arm, and the number of the run from 0 → its row, of a process of its own.
        width: the rounds end when every ratio's interval is narrower than this share of the ratio.
        max_runs: they end with this many of each arm in any case, and with a run that fails.
        seed: of the order within each round.
    """
    order, count = random.Random(seed), itertools.count()
    runs: list[list[StepRow]] = [[] for _ in arms]
    for done in range(1, max_runs + 1):
        for index in order.sample(range(len(arms)), len(arms)):
            runs[index].append(
                replace(run_alone(replace(arms[index], is_checked=done == 1), number := next(count)), run=number)
            )
            yield runs[index][-1]
        if any(each[-1].status != "ok" for each in runs):
            break
        pairs = [ratio_row(flag, arms[a], arms[b], runs[a], runs[b]) for a, b in _pairs(arms)]
        if done >= FEWEST and max(_width(each) for each in pairs) < width:
            break
    yield from (ratio_row(flag, arms[a], arms[b], runs[a], runs[b]) for a, b in _pairs(arms))


def _pairs(arms: Sequence[Arm]) -> Iterator[tuple[int, int]]:
    return itertools.combinations(range(len(arms)), 2)


def _width(row: RatioRow) -> float:
    if row.speedup is None or row.speedup_low is None or row.speedup_high is None:
        return math.inf
    return (row.speedup_high - row.speedup_low) / row.speedup


def ratio_row(flag: str, old: Arm, new: Arm, before: Sequence[StepRow], after: Sequence[StepRow]) -> RatioRow:
    """Two arms: the ratio with its interval between runs, and the difference that would have been found."""
    case: dict[str, Scalar] = {"flag": flag, "old": old.name, "new": new.name}
    if failed := [row for row in (*before, *after) if row.status != "ok"]:
        why = failed[0]
        return make_row(RatioRow, case, {}, status=why.status, reason=why.reason, environment=why.environment)
    sides = [[row.samples["step"] for row in rows] for rows in (before, after)]
    ratio, deviation = ratio_of_runs(sides[0], sides[1], LOOKING), run_deviation(*sides)
    medians = [[statistics.median(run) for run in side] for side in sides]
    is_known = ratio.interval is not None
    settings = {name: value for name, value in before[0].case.items() if name not in ("run", "repeat", flag)}
    return make_row(
        RatioRow,
        settings | case,
        {
            "old_ms": statistics.median(medians[0]),
            "new_ms": statistics.median(medians[1]),
            "speedup": ratio.value,
            "speedup_low": ratio.interval.low if ratio.interval else None,
            "speedup_high": ratio.interval.high if ratio.interval else None,
            "verdict": verdict(ratio),
            "runs": len(before),
            "run_deviation": deviation if is_known else None,
            "smallest_found": smallest_found(deviation, len(before)) if len(before) >= 3 else None,
        },
        samples={"old": medians[0], "new": medians[1]},
        environment=before[0].environment,
    )


def run_alone(arm: Arm, number: int, out: Path) -> StepRow:
    """Run `bench step` in a process of its own, whose output and rows stay in a folder of `out`."""
    return step_alone(arm.settings if arm.is_checked else {**arm.settings, "no_check": True}, out, number)
