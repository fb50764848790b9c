"""Cases that are alike, checked first and then timed in turns, so that what drifts reaches all alike.

Compiled code is kept until all are timed. Before every pass a cache's worth of memory is overwritten, which also keeps
the device busy while the host launches the pass; where one time is too short for that, several times.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._dynamo.utils import counters

from trainstep.base.config import PhaseContext
from trainstep.base.errors import UnsupportedError, UsageError
from trainstep.base.stats import in_rounds, ratio_of_rounds
from trainstep.measure.outcome import Failure, attempt, caught, release_memory
from trainstep.measure.timing import Sample, Timing, device_clock, time_steps
from trainstep.rows.records import Scalar

Case = TypeVar("Case", bound=Hashable)
Wrong = TypeVar("Wrong")
Measured = TypeVar("Measured")

PHASES = ("forward", "backward")

FLUSH_BYTES = {"cuda": 512 * 2**20, "cpu": 0}
"""Written before each pass: several times any L2, and a tenth of a millisecond of device time. Nothing on a CPU."""
MOST_FLUSHES = 32
"""Before one pass: some four milliseconds. A pass that the host takes longer to launch, or within which it waits for
the device, is not covered to its end: it has some of the host's time in its own, and an `issue_ms` of more than these.
"""


@dataclass
class Checked:
    """A case that is right: what is known of it besides its times, and the passes timed so far."""

    implementation: Any
    values: dict[str, Scalar]
    passes: list[Sample] = field(default_factory=list)
    recompilations: int = 0

    @property
    def is_timed(self) -> bool:
        """True if it is timed once it is checked."""
        return self.values.get("not_timed") is None


IN_INTERPRETER = "checked in Triton's interpreter, no time"


def is_interpreted(device: torch.device) -> bool:
    """True if our Triton kernels run on this device in Triton's interpreter, which says nothing of their speed."""
    from trainstep.attention.flash import INTERPRETED  # here: it loads Triton

    return device.type == "cpu" and INTERPRETED


def require_interpretable(dtype: str) -> None:
    """Raise UnsupportedError for what Triton's interpreter gets wrong."""
    if dtype == "bf16":
        raise UnsupportedError("Triton's interpreter rounds to bfloat16 as no GPU does; choose --dtype fp32,fp16 there")


def flush_for(device: torch.device) -> Tensor:
    """Tensor that is overwritten before each pass."""
    return torch.empty(FLUSH_BYTES[device.type], dtype=torch.int8, device=device)


def time_passes(step: Callable[[PhaseContext], object], flush: Tensor, warmup: int, passes: int) -> Timing:
    """Time so many passes of the phases `PHASES` after `warmup` others, on the device of `flush`."""
    clock = device_clock(flush.device)
    return time_steps(step, device=clock, warmup=warmup, steps=passes, cover=flush.zero_, most_covers=MOST_FLUSHES)


def pass_columns(passes: Sequence[Sample]) -> tuple[dict[str, list[float]], dict[str, Scalar]]:
    """The samples of each phase and of both, in milliseconds, and what else a row says of all passes."""
    samples = {name: [each.laps[name].ms for each in passes] for name in PHASES}
    values: dict[str, Scalar] = {"n": len(passes)}
    if passes[0].device_ms is None:
        samples["both"] = [sum(pair) for pair in zip(*samples.values(), strict=True)]
    else:
        samples["both"] = [each.ms for each in passes]  # with the gap between them
        values["issue_ms"] = median(each.issue_ms for each in passes)
    return samples, values


def compilations() -> int:
    """Graphs that torch.compile has compiled so far in this process."""
    return int(counters["stats"]["unique_graphs"])


def by_problem(
    cases: Iterable[Case],
    problem: Callable[[Case], Hashable],
    measure: Callable[[list[Case], int], list[Measured]],
    *,
    warmup: int,
    passes: int,
    rounds: int,
) -> Iterator[list[Measured]]:
    """The rows of the cases of each problem, once they are known; no memory is held from one problem to the next.

    Args:
        problem: of a case, which it shares with those that it is measured beside.
        measure: the rows of cases of one problem, in so many rounds.

    Raises:
        UsageError: no pass, no round, or no pass before the timed ones.
    """
    if warmup < 1 or passes < 1 or rounds < 1:
        raise UsageError(f"warmup is {warmup}, passes {passes} and rounds {rounds}; expected at least one of each")
    problems: dict[Hashable, list[Case]] = {}
    for case in cases:
        problems.setdefault(problem(case), []).append(case)
    for alike in problems.values():
        try:
            rows = measure(alike, min(rounds, passes))
        finally:
            release_memory()
        yield rows


def take_turns(
    cases: Sequence[Case],
    check: Callable[[Case], Checked | Wrong],
    time_round: Callable[[Checked, Case, int], None],
    passes: int,
    rounds: int,
) -> dict[Case, Checked | Wrong | Failure]:
    """Results of each case: checked and timed, wrong, or failed.

    Args:
        check: says whether a case is right.
        time_round: times so many passes of a case that is, and adds them to it.
        passes: of each case, divided among the rounds.
        rounds: turns that the cases take, each in an order drawn anew.
    """
    found: dict[Case, Checked | Wrong | Failure] = {
        case: attempt(partial(check, case), drop_compiled=False) for case in cases
    }
    draw = random.Random(0)
    for part in in_rounds(range(passes), rounds):
        ready = [(case, each) for case, each in found.items() if isinstance(each, Checked) and each.is_timed]
        for case, checked in draw.sample(ready, len(ready)):
            failed = caught(partial(time_round, checked, case, len(part)))
            if isinstance(failed, Failure):
                found[case] = failed
                release_memory(drop_compiled=False)  # not after every round: to look for garbage takes longer than one
    return found


def ratio_columns(name: str, ours: Any, theirs: Any) -> dict[str, Scalar]:
    """Ratio of one sample of two rows taken in turns with its interval, as a row has them."""
    ratio = ratio_of_rounds(*(in_rounds(row.samples[name], row.rounds or 1) for row in (ours, theirs)))
    found: dict[str, Scalar] = {name: ratio.value}
    if ratio.interval is not None:
        found |= {f"{name}_low": ratio.interval.low, f"{name}_high": ratio.interval.high}
    return found
