"""Runs of two versions of a script in turns, B A A B: a machine that grows slower meanwhile does so for both alike."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from trainstep.base.stats import Ratio, ratio_of_runs, verdict
from trainstep.ladder.single import Taken
from trainstep.ladder.workloads import WIDE

MOST_ROUNDS = 3
"""Times that B A A B is run, at most."""
AsShown = Callable[[Sequence[Taken]], list[Sequence[float]]]
"""Runs → the time of each that is held against those of others."""


def times(runs: Sequence[Taken]) -> list[Sequence[float]]:
    """Milliseconds of a step of each run, by its total."""
    return [(run.ms_per_step,) for run in runs]


def in_turns(
    run: Callable[[bool], Taken], rounds: int, *, begun: Taken | None = None, as_shown: AsShown = times
) -> tuple[list[Taken], list[Taken]]:
    """Runs of A and of B, of which failed ones are left out, until the difference is clear or small.

    Args:
        run: runs B where it is given True, and A else.
        rounds: how often B A A B is run, at most.
        begun: the first B, where it has been run.
        as_shown: the times of runs that are held against each other.
    """
    taken: tuple[list[Taken], list[Taken]] = ([], [begun] if begun else [])
    for number in range(rounds):
        for is_b in (False, False, True) if begun and number == 0 else (True, False, False, True):
            found = run(is_b)
            if found.step_ms and not found.failure:
                taken[is_b].append(found)
        if min(map(len, taken)) < 2 or not _is_open(ratio_of_runs(as_shown(taken[0]), as_shown(taken[1]))):
            break
    return taken


def _is_open(ratio: Ratio) -> bool:
    """Whether more runs may find a difference; a narrow interval around 1 says that there is none."""
    found = ratio.interval
    return found is None or (verdict(ratio) == "inconclusive" and found.high - found.low > WIDE * ratio.value)
