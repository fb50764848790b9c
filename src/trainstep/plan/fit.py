"""Choice of the activations to keep, to compute again or to send to host memory, so that a step fits at the least added
time.

Everything is measured beforehand (`bench/fit/`); here is the choice. The step in which every block is computed again
is the base. It has a peak for each moment: at the loss, in the head's backward, in each block's backward, and one of
what no choice changes (the optimizer). A block that keeps δ bytes more than in the base raises the moments at which it
waits for backward: the loss, the head's backward and the backward of every block after it. At its own backward all it
needs is there, whatever it kept, so that only what was measured to differ is added; and what the block before brings
back from host memory arrives during it.

The choices of one block:

- keep everything, or everything but storages that go to host memory: nothing is computed again;
- be computed again but for results that are kept, each of which saves the time of its operator; or for none. The
  block's input waits on the device or in host memory.

The added time is the sum of what is computed again and of the waits for copies. A copy has the time of the next block's
forward for the way out, and of its backward for the way back; what it takes longer is a wait. This is an integer
program (0 or 1, and of storages of one size how many go) with a row for each moment, solved by
HiGHS through `scipy.optimize.milp`.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import math
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from trainstep.base.errors import UnsupportedError, UsageError

GIB = 2**30
LIMIT_S = 30.0
"""After this time the best choice so far is taken, and what it may cost more than the best there is goes with it."""
ENOUGH = 0.02
"""Gap, as a share of the added time: a choice that is known to be so near the best counts as the best."""
CLOSE = 1e-3
"""Gap, of the time that choices save, that the solver need not tell apart, which would take it most of its time."""


@dataclass(frozen=True)
class Result:
    """Result of an operator of a block, and what it saves not to compute that again."""

    name: str  # `mm#0`
    bytes: int
    seconds: float


@dataclass(frozen=True)
class Stored:
    """A storage that a block saves for backward."""

    number: int  # as `BlockPolicy.host` counts
    bytes: int


@dataclass(frozen=True)
class BlockCost:
    """Weights and costs of one block's choices."""

    name: str
    input_bytes: int  # what waits for backward of a block that is computed again
    plain_bytes: int  # what waits of one that is not, its input included
    again_s: float  # to compute everything again
    keeping_s: float = 0.0  # beyond that, wherever results are kept: the price of picking them out
    results: tuple[Result, ...] = ()
    stored: tuple[Stored, ...] = ()  # of a block that keeps everything: what could go to host memory
    own_bytes: int = 0  # how much more its own backward needs where nothing is computed again
    cast_bytes: int = 0  # of `plain_bytes`, what is there at the loss whatever is chosen: autocast's copies of weights
    forward_s: float = 0.0
    backward_s: float = 0.0
    input_number: int | None = 0  # of its input, as `BlockPolicy.host` counts, where it is computed again; None: stays


@dataclass(frozen=True)
class Copies:
    """Rates at which activations go to host memory and come back, and how many bytes of them there may be."""

    out_bytes_per_s: float
    back_bytes_per_s: float
    host_bytes: int


@dataclass(frozen=True)
class StepCost:
    """A step in which every block is computed again, and what changing that weighs and costs. Bytes are peaks."""

    blocks: tuple[BlockCost, ...]  # in the order of forward
    loss_bytes: int
    head_bytes: int  # of backward, before it comes to the last block
    backward_bytes: tuple[int, ...]  # by block
    other_bytes: int  # of whatever no choice changes
    seconds: float  # of the step
    copies: Copies | None = None  # None: nothing goes to host memory


@dataclass(frozen=True)
class Choice:
    """Choice for one block."""

    is_plain: bool = False
    kept: tuple[str, ...] = ()
    host: tuple[int, ...] = ()  # numbers of storages; of a block that is computed again, its input's


@dataclass(frozen=True)
class Chosen:
    """A choice for every block, with its predicted peak and time."""

    choices: tuple[Choice, ...]
    peak_bytes: int
    seconds: float
    gap: float  # the added time is at most this share above the least possible
    is_cut_off: bool = False  # whether the solver's time was up


def peak_of(step: StepCost, choices: Sequence[Choice]) -> int:
    """The predicted peak of a step with these choices."""
    more = [_more(block, choice) for block, choice in zip(step.blocks, choices, strict=True)]
    casts = sum(block.cast_bytes for block, choice in zip(step.blocks, choices, strict=True) if choice.is_plain)
    moments = [step.other_bytes, step.loss_bytes + sum(more) - casts, step.head_bytes + sum(more)]
    for index, (block, choice) in enumerate(zip(step.blocks, choices, strict=True)):
        own = block.own_bytes if choice.is_plain else 0
        arriving = _host_bytes(step.blocks[index - 1], choices[index - 1]) if index else 0
        moments.append(step.backward_bytes[index] + sum(more[:index]) + own + arriving)
    return max(moments)


def seconds_of(step: StepCost, choices: Sequence[Choice]) -> float:
    """The predicted time of a step with these choices."""
    added = [_added(block, choice) for block, choice in zip(step.blocks, choices, strict=True)]
    waits = 0.0
    for index, (block, choice) in enumerate(zip(step.blocks, choices, strict=True)):
        if choice.host and step.copies is not None:
            size, after = _host_bytes(block, choice), step.blocks[index + 1]
            waits += max(0.0, size / step.copies.out_bytes_per_s - after.forward_s)
            waits += max(0.0, size / step.copies.back_bytes_per_s - after.backward_s)
    return step.seconds - sum(block.again_s for block in step.blocks) + sum(added) + waits


def _more(block: BlockCost, choice: Choice) -> int:
    """Bytes that wait for backward beyond those of the base."""
    kept = sum(result.bytes for result in block.results if result.name in choice.kept)
    return (block.plain_bytes - block.input_bytes if choice.is_plain else kept) - _host_bytes(block, choice)


def _host_bytes(block: BlockCost, choice: Choice) -> int:
    if not choice.is_plain:
        return block.input_bytes if choice.host else 0
    return sum(stored.bytes for stored in block.stored if stored.number in choice.host)


def _added(block: BlockCost, choice: Choice) -> float:
    if choice.is_plain:
        return 0.0
    saved = sum(result.seconds for result in block.results if result.name in choice.kept)
    return block.again_s + (block.keeping_s if choice.kept else 0.0) - saved


def choose(step: StepCost, budget: int) -> Chosen:
    """The choices with the least time whose predicted peak is at most `budget` bytes.

    Raises:
        UsageError: there are none; the message says how much the step needs at least.
        UnsupportedError: the solver found none in time.
    """
    program = _Program(step)
    program.limit_peak(budget)
    chosen = program.solve(CLOSE)
    if chosen is not None and chosen.gap > ENOUGH and not chosen.is_cut_off:  # little is added: less of it is much
        with contextlib.suppress(UnsupportedError):  # not in time; there is a choice
            closer = program.solve(CLOSE * ENOUGH / chosen.gap / 2)
            chosen = min(chosen, closer or chosen, key=lambda each: (each.seconds, each.gap))
    if chosen is None:
        least = least_peak(step)
        raise UsageError(
            f"the step does not fit into {_size(budget)}: whatever is computed again or sent away, it needs "
            f"{_size(least)} at least, for weights, optimizer state, gradients and what is left of activations; "
            "give it that much, or take a smaller batch, chunked loss, fewer bits (--precision), or shard it"
        )
    return chosen


def _size(count: int) -> str:
    return f"{count / GIB:.2f} GiB" if count >= GIB else f"{count / 2**20:.2f} MiB"


def least_peak(step: StepCost) -> int:
    """The smallest predicted peak that any choices have, in bytes."""
    program = _Program(step)
    program.minimize_peak()
    chosen = program.solve(close=0.0)
    assert chosen is not None, "some choice has the smallest peak"
    return chosen.peak_bytes


@contextlib.contextmanager
def _nothing_printed() -> Iterator[None]:
    """HiGHS leaves lines for its developers on the process's standard output, whatever it is asked."""
    try:
        own = os.dup(1)
    except OSError:  # it is closed
        yield
        return
    flush = ctypes.CDLL(None).fflush  # the lines wait in C's buffer where standard output is a file
    flush(None)
    try:
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), 1)
        yield
    finally:
        flush(None)
        os.dup2(own, 1)
        os.close(own)


class _Program:
    """min cost · x with rows · x ≤ limits; bytes in GiB and times in milliseconds, so that figures are near 1."""

    def __init__(self, step: StepCost) -> None:
        self._step = step
        self._cost: list[float] = []
        self._is_whole: list[int] = []
        self._upper: list[float] = []
        self._rows: list[tuple[dict[int, float], float]] = []
        self._plain = [self._variable(-1e3 * block.again_s) for block in step.blocks]
        self._keeps = [self._variable(1e3 * block.keeping_s) for block in step.blocks]
        self._kept = [[self._variable(-1e3 * result.seconds) for result in block.results] for block in step.blocks]
        self._sent: list[dict[int, int]] = [{} for _ in step.blocks]  # bytes of a plain block's storages → variable
        self._input: list[int | None] = [None] * len(step.blocks)
        for index in range(len(step.blocks)):
            self._row({self._plain[index]: 1, self._keeps[index]: 1}, 1)
            for kept in self._kept[index]:
                self._row({kept: 1, self._keeps[index]: -1}, 0)
        if step.copies is not None:
            self._copies(step.copies)

    def limit_peak(self, budget: int) -> None:
        for terms, base in self._moments():
            self._row(terms, (budget - base) / GIB)

    def minimize_peak(self) -> None:
        self._cost = [0.0] * len(self._cost)
        peak = self._variable(1.0, is_whole=False, upper=math.inf)
        for terms, base in self._moments():
            self._row({**terms, peak: -1.0}, -base / GIB)

    def solve(self, close: float) -> Chosen | None:
        """The best choices, or others within `close` of their cost, as a share; None where there are none."""
        from scipy.optimize import Bounds, LinearConstraint, milp  # slow to import
        from scipy.sparse import csr_array

        places = [(row, place, value) for row, (terms, _) in enumerate(self._rows) for place, value in terms.items()]
        rows, columns, values = zip(*places, strict=True)
        matrix = csr_array((values, (rows, columns)), shape=(len(self._rows), len(self._cost)))
        with _nothing_printed():
            found = milp(
                np.array(self._cost),
                integrality=np.array(self._is_whole),
                bounds=Bounds(0, np.array(self._upper)),
                constraints=LinearConstraint(matrix, ub=np.array([limit for _, limit in self._rows])),
                options={"mip_rel_gap": close, "time_limit": LIMIT_S},
            )
        if found.status == 2:
            return None
        if found.x is None:
            raise UnsupportedError(f"no choice of activations was found within {LIMIT_S:.0f} s: {found.message}")
        choices = tuple(self._choice(found.x, index) for index in range(len(self._step.blocks)))
        seconds = seconds_of(self._step, choices)
        least = self._step.seconds + found.mip_dual_bound / 1e3
        plain = self._step.seconds - sum(block.again_s for block in self._step.blocks)
        gap = max(0.0, seconds - least) / max(seconds - plain, 1e-9)
        return Chosen(choices, peak_of(self._step, choices), seconds, gap, is_cut_off=found.status != 0)

    def _variable(self, cost: float, *, is_whole: bool = True, upper: float = 1.0) -> int:
        self._cost.append(cost)
        self._is_whole.append(int(is_whole))
        self._upper.append(upper)
        return len(self._cost) - 1

    def _row(self, terms: dict[int, float], limit: float) -> None:
        self._rows.append((terms, limit))

    def _copies(self, copies: Copies) -> None:
        """Variables of what goes to host memory, and of the waits for it; the last block's has nowhere to hide."""
        everything: dict[int, float] = {}
        for index, block in enumerate(self._step.blocks[:-1]):
            after, plain = self._step.blocks[index + 1], self._plain[index]
            sizes: dict[int, float] = {}
            for size, count in Counter(stored.bytes for stored in block.stored).items():
                sent = self._sent[index][size] = self._variable(0.0, upper=count)  # which of them makes no difference
                sizes[sent] = size / GIB
                self._row({sent: 1, plain: -count}, 0)
            if block.input_number is not None:
                self._input[index] = own = self._variable(0.0)
                sizes[own] = block.input_bytes / GIB
                self._row({own: 1, plain: 1}, 1)
            for rate, hidden in (
                (copies.out_bytes_per_s, after.forward_s),
                (copies.back_bytes_per_s, after.backward_s),
            ):
                wait = self._variable(1.0, is_whole=False, upper=math.inf)  # in milliseconds
                self._row({**{place: 1e3 * size * GIB / rate for place, size in sizes.items()}, wait: -1}, 1e3 * hidden)
            everything |= sizes
        if everything:
            self._row(everything, copies.host_bytes / GIB)

    def _moments(self) -> list[tuple[dict[int, float], int]]:
        """For each moment the GiB that choices add, and the bytes of the base."""
        step = self._step
        more = [self._more(index) for index in range(len(step.blocks))]
        waiting = {place: value for terms in more for place, value in terms.items()}
        at_loss = dict(waiting)
        for plain, block in zip(self._plain, step.blocks, strict=True):
            at_loss[plain] -= block.cast_bytes / GIB
        found = [({}, step.other_bytes), (at_loss, step.loss_bytes), (waiting, step.head_bytes)]
        for index, block in enumerate(step.blocks):
            terms = {place: value for earlier in more[:index] for place, value in earlier.items()}
            terms[self._plain[index]] = block.own_bytes / GIB
            for place in self._host_places(index - 1) if index else ():
                del terms[place]  # what was taken off is arriving
            found.append((terms, step.backward_bytes[index]))
        return found

    def _more(self, index: int) -> dict[int, float]:
        block = self._step.blocks[index]
        terms = {self._plain[index]: (block.plain_bytes - block.input_bytes) / GIB}
        terms |= {place: kept.bytes / GIB for place, kept in zip(self._kept[index], block.results, strict=True)}
        terms |= {place: -size / GIB for size, place in self._sent[index].items()}
        own = self._input[index]
        return terms if own is None else terms | {own: -block.input_bytes / GIB}

    def _host_places(self, index: int) -> list[int]:
        own = self._input[index]
        return [*self._sent[index].values(), *([] if own is None else [own])]

    def _choice(self, x: np.ndarray, index: int) -> Choice:
        block, own = self._step.blocks[index], self._input[index]
        is_plain = x[self._plain[index]] > 0.5
        kept = [each.name for each, place in zip(block.results, self._kept[index], strict=True) if x[place] > 0.5]
        host: tuple[int, ...] = ()
        for size, place in self._sent[index].items():
            alike = [stored.number for stored in block.stored if stored.bytes == size]
            host += tuple(alike[: round(x[place])])
        if not is_plain and own is not None and block.input_number is not None and x[own] > 0.5:
            host = (block.input_number,)
        return Choice(bool(is_plain), () if is_plain else tuple(kept), tuple(sorted(host)))


def with_budget_error(step: StepCost, measured: int, predicted: int) -> StepCost:
    """The same step with all of its moments off by what a measured peak differs from its prediction."""
    off = measured - predicted
    return dataclasses.replace(
        step,
        loss_bytes=step.loss_bytes + off,
        head_bytes=step.head_bytes + off,
        backward_bytes=tuple(each + off for each in step.backward_bytes),
    )
