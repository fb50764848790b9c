"""Lines under way in the thread that trains, and in a loader's forked workers: 100 samples a second.

The thread that takes them from the script's process runs no code of Python's: a chain of iterators in C reads
`sys._current_frames()`, takes the code and line of each frame, and appends them. So Python's profilers and tracers see
no frame of ours, the interpreter is not given up within a sample, no frame and so no tensor outlives one, and no
collection of garbage begins there.

A sample needs the interpreter. Code that keeps it for longer than Python's switch interval (5 ms) is asked to give it
up, and is seen where it is; code of C, where it returns. Other code keeps it until torch or the system gives it up, and
where that is soon over, for many times. So its sample comes `LATE`, at a line that may have done nothing but follow.
Where the next phase has begun meanwhile, that is the call around it.

Where no call of the model was seen, "forward" is all from the batch to backward. A sample of it that had to ask for
the interpreter, in a line that calls no function of torch's in Python, is one of plain Python: an operator of torch's
gives the interpreter up by itself while it computes.
"""

from __future__ import annotations

import _thread
import gc
import operator
import os
import signal
import sys
import time
from bisect import bisect
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from itertools import accumulate, chain, islice, repeat, starmap, takewhile
from types import CodeType
from typing import Any

from trainstep.observe.lines import Place, owner_of
from trainstep.observe.steps import FORWARD, Step
from trainstep.rows.run import LATE

EVERY_S = 0.01
KEPT = 2000  # samples that wait for the end of their step: of a longer one the last
DEEPEST = 60  # frames of a stack, from the innermost
PYTHON = "python"
"""In the place of a phase, plain Python in a forward that is all before backward."""
WAKES_S = 5e-4  # A thread whose turn has come runs by then, where a core is free.
NOWHERE = Place("", 0, "")
AT, STACK = 3, 4
"""Places in a sample: the host's clock, and code and line of each frame, the innermost first."""
Stack = tuple[tuple[CodeType, int], ...]
_OUTWARDS = repeat("f_back")
_TOLD_FIRST, _TOLD_AGAIN = 4, 1.25  # samples of a worker after which it tells, and by what factor more


def _samples(thread: int, until: Any) -> Iterator[Any]:
    """Samples of a thread until a lock is free; an iterator that runs no code of Python's."""

    def often(call: Callable[[], Any]) -> Iterator[Any]:
        return starmap(call, repeat(()))

    pauses = takewhile(operator.not_, map(until.acquire, repeat(True), repeat(EVERY_S)))
    clock = iter(time.perf_counter, None)
    frames = map(dict.get, often(sys._current_frames), repeat(thread))  # None once the thread has ended
    outwards = map(accumulate, map(chain, map(repeat, frames, repeat(1)), repeat(_OUTWARDS)), repeat(getattr))
    ended = map(islice, map(takewhile, repeat(operator.truth), outwards), repeat(DEEPEST))
    stacks = map(tuple, map(map, repeat(operator.attrgetter("f_code", "f_lineno")), ended))
    collects: deque[bool] = deque()
    known = map(collects.append, often(gc.isenabled))
    again: Iterator[Any] = map(operator.call, map((dict, gc.enable).__getitem__, often(collects.pop)))
    return zip(pauses, known, often(gc.disable), clock, stacks, again, strict=False)


class Sampler:
    """A thread that samples another one.

    Args:
        take: called in that thread with an iterator over samples.
    """

    def __init__(self, take: Callable[[Iterable[Any]], object]) -> None:
        self._take = take
        self._until: Any = None
        self._own: list[int] = []  # the system's number of the thread

    def begin(self) -> None:
        """Sample the calling thread from here on, unless it is under way."""
        if self._until is not None:
            return
        until, self._own = _thread.allocate_lock(), []
        until.acquire()
        told = map(self._own.append, starmap(_thread.get_native_id, repeat((), 1)))
        samples = chain(filter(None, told), _samples(_thread.get_ident(), until))
        # Signals are for the script's threads.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            _thread.start_new_thread(self._take, (samples,))
        except RuntimeError:  # the system has no room for one
            self._own = [0]
        finally:
            self._until = until
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def end(self) -> None:
        """End the thread, and wait until the system has none: Python warns where a process with several forks."""
        if self._until is None:
            return
        self._until.release()
        self._until, give_up = None, time.monotonic() + 1
        while (not self._own or os.path.exists(f"/proc/self/task/{self._own[0]}")) and time.monotonic() < give_up:
            time.sleep(1e-4)


class SampledLines:
    """Samples of the thread that trains, and which step and phase each belongs to."""

    def __init__(self) -> None:
        self._taken: deque[Any] = deque(maxlen=KEPT)
        self._last = 0.0
        self.sampler = Sampler(self._taken.extend)

    def of_step(self, step: Step) -> Iterator[tuple[str, Place]]:
        """Phase and place of each sample in a step; later samples stay, earlier ones are dropped."""
        times = [mark[0] for mark in step.marks]
        while self._taken and self._taken[0][AT] < times[-1]:
            sample = self._taken.popleft()
            due, at = min(self._last + EVERY_S, sample[AT]), sample[AT]
            self._last = at
            if at < times[0]:
                continue
            now = bisect(times, at) - 1
            then = bisect(times, due) - 1 if due >= times[0] else now
            late = LATE * (then != now or came_late(due, at))
            if then == now:
                yield late + step.phases[then], (place := place_in(sample[STACK]))
                is_joined = step.phases[then] == FORWARD and not step.forwards
                if is_joined and at - due > sys.getswitchinterval() and is_plain(sample[STACK]):
                    yield late + PYTHON, place
            else:
                yield late + step.phases[then], call_in(sample[STACK]) if now == then + 1 else NOWHERE


def came_late(due: float, at: float) -> bool:
    """True if a sample waited for the interpreter, and was not given it by Python as soon as it had asked."""
    waited, asks = at - due, sys.getswitchinterval()
    return waited > WAKES_S and not asks < waited < asks + 2 * WAKES_S


def place_in(stack: Stack) -> Place:
    """The innermost line of the user's own, else the innermost of a library."""
    found = NOWHERE
    for code, line in stack:
        owner = owner_of(code.co_filename)
        if owner == "user" or (owner == "library" and found is NOWHERE):
            found = Place(code.co_filename, line, code.co_name)
        if owner == "user":
            break
    return found


def is_plain(stack: Stack) -> bool:
    """True if the user's own line is under way by itself, and not a function of torch's that it called."""
    owners = (owner_of(code.co_filename) for code, _ in stack)
    return next((owner for owner in owners if owner in ("torch", "user")), None) == "user"


def call_in(stack: Stack) -> Place:
    """The innermost line of the user's own around the outermost call of torch."""
    around = takewhile(lambda each: owner_of(each[0].co_filename) != "torch", reversed(stack))
    return place_in(tuple(around)[::-1])


def fetching(stack: Stack) -> Place | None:
    """The place in a worker of a loader while it fetches a batch; None while it waits."""
    for depth, (code, _) in enumerate(stack):
        if code.co_name == "fetch" and code.co_filename.endswith(os.path.join("_utils", "fetch.py")):
            return place_in(stack[:depth])
    return None


def count_lines(tell: Callable[[dict[str, Any]], object], samples: Iterable[Any]) -> None:
    """Count a worker's lines, and tell of all so far from time to time: a worker has no end of its own."""
    counts, enough, last = Counter[tuple[Place, bool]](), float(_TOLD_FIRST), 0.0
    for sample in samples:
        is_late, last = came_late(last + EVERY_S, sample[AT]), sample[AT]
        if (place := fetching(sample[STACK])) is not None:
            counts[place, is_late] += 1
            if counts.total() >= enough:
                enough *= _TOLD_AGAIN
                lines = [[*place[:3], count, is_late] for (place, is_late), count in counts.items()]
                tell({"pid": os.getpid(), "lines": lines})
