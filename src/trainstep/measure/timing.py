"""The stopwatch: warm-up, synchronise, sample.

Work given to a GPU runs after the call that gave it returns, so a host clock read means nothing unless the device was
synchronised first. Here the caller never reads a clock: it passes a step, and every sample is taken between two
synchronisations. Inside a step nothing waits; phases are separated by device events, which the device itself stamps
when it gets there. So the phases are those of an undisturbed step, and they add up to it. If the device says it was
busy for longer than the host says the step lasted, one clock is wrong and no figure is reported (`ClockDisagreement`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from trainstep.base.config import PhaseContext

COVERED = 1.5
"""Time for which the device is kept busy before a step, over the host's time to launch one."""


class DeviceClock(Protocol):
    """Functions that the stopwatch needs of a device."""

    def synchronize(self) -> None:
        """Return once all work given to the device so far is done."""

    def record(self) -> Any:
        """A mark in the device's queue, stamped when the device reaches it; None if work is done when calls return."""

    def elapsed_ms(self, start: Any, end: Any) -> float:
        """Device time between two marks, after synchronisation."""


class CpuClock:
    """The CPU: when a call returns, its work is done, and the host clock is the device's clock."""

    def synchronize(self) -> None:
        pass

    def record(self) -> None:
        pass

    def elapsed_ms(self, start: Any, end: Any) -> float:
        raise AssertionError("the CPU has no device events")


class CudaClock:
    """A CUDA device's current stream."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._streams: dict[int, torch.cuda.Stream] = {}  # by their handles

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)

    def stream(self) -> torch.cuda.Stream:
        """The current stream. `torch.cuda.current_stream` makes an object in each call, which takes as long as three
        marks."""
        index = torch.cuda.current_device() if self.device.index is None else self.device.index
        handle = torch._C._cuda_getCurrentRawStream(index)
        if handle not in self._streams:
            self._streams[handle] = torch.cuda.current_stream(index)
        return self._streams[handle]

    def record(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(self.stream())
        return event

    def elapsed_ms(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        """Milliseconds between two events (resolution about 0.5 µs)."""
        return start.elapsed_time(end)


def device_clock(device: torch.device) -> DeviceClock:
    """The clock of a CPU or CUDA device."""
    return CudaClock(device) if device.type == "cuda" else CpuClock()


def quiet_clock(device: torch.device) -> Callable[[], float]:
    """The process's own time where one thread of a CPU does the work, so that others on it do not count; else a clock
    on the wall."""
    return time.process_time if device.type == "cpu" and torch.get_num_threads() == 1 else time.perf_counter


@dataclass(frozen=True)
class Lap:
    """A phase of one step, in milliseconds."""

    host_ms: float  # host time between entering and leaving the phase: on a GPU the time to *issue* its work
    device_ms: float | None  # device time from the phase's first to its last mark; None on a CPU

    @property
    def ms(self) -> float:
        """The time the phase's work took: the device's where there is one, else the host's."""
        return self.host_ms if self.device_ms is None else self.device_ms


@dataclass(frozen=True)
class Sample:
    """A step, in milliseconds."""

    wall_ms: float  # host clock between the synchronisations before and after the step
    wait_ms: float  # part of it spent in the last synchronisation: near 0 on a GPU means the step is bound by launches
    device_ms: float | None  # device time between the marks at the step's start and end; None on a CPU
    laps: dict[str, Lap]  # phases in the order they ran

    @property
    def ms(self) -> float:
        """The time the step's work took: the device's where there is one, else the host's."""
        return self.wall_ms if self.device_ms is None else self.device_ms

    @property
    def issue_ms(self) -> float:
        """Host time from the step's start until all of it was launched."""
        return self.wall_ms - self.wait_ms


@dataclass(frozen=True)
class Timing:
    """The steps of one measurement, in the order they ran: `warmup` first, then the ones that count."""

    steps: tuple[Sample, ...]
    warmup: int

    @property
    def first(self) -> Sample:
        """The very first step, warm-up or not: with one-time costs (allocation, library start-up, compilation)."""
        return self.steps[0]

    @property
    def samples(self) -> tuple[Sample, ...]:
        """The steps that count."""
        return self.steps[self.warmup :]

    def window(self, warmup: int, steps: int) -> Timing:
        """The same run as `steps` steps after `warmup` would have shown it."""
        assert warmup + steps <= len(self.steps), "the window reaches beyond the run"
        return Timing(self.steps[: warmup + steps], warmup)


class ClockDisagreement(RuntimeError):
    """The device was busy for longer than the host saw the step last: work escaped the synchronisation."""


def time_steps(
    step: Callable[[PhaseContext], object],
    *,
    device: DeviceClock,
    warmup: int,
    steps: int,
    clock: Callable[[], float] = time.perf_counter,
    after_step: Callable[[Sample], object] = lambda sample: None,
    cover: Callable[[], object] = lambda: None,
    most_covers: int = 1,
) -> Timing:
    """Run `step` `warmup + steps` times and time each run.

    Args:
        step: does one step's work, each phase inside `with phase(name)`; what it prepares outside (batches) should be
            ready before, as everything between entry and return is inside the step's wall time.
        warmup: steps before those that count; they are kept apart, not thrown away.
        steps: steps that count, at least 1.
        clock: host clock: monotonic, in seconds from an arbitrary start.
        after_step: called outside the timed region after each step, to show progress.
        cover: gives the device work right before each step. While it runs, the host launches the step, so that a step
            of a few short kernels is timed by the device as in the middle of a busy queue; `wall_ms` and `wait_ms` then
            include what is left of that work, `device_ms` and the laps do not.
        most_covers: how often `cover` may be called before a step. It is called as often as keeps the device busy for
            1.5 times (`COVERED`) what the host took to launch the step before; before the first step once. 1 for work
            that several processes must launch alike. In a step that waits for the device the host waits for the
            covering work too: its `issue_ms` has that wait, and what it launches afterwards is not covered.
    """
    assert warmup >= 0, f"warmup is {warmup}"
    assert steps >= 1, f"steps is {steps}"
    covers = _Covers(cover, device, most_covers)
    taken: list[Sample] = []
    for _ in range(warmup + steps):
        taken.append(_time_one(step, device, clock, covers.launch))
        covers.fit(taken[-1].issue_ms)
        after_step(taken[-1])
    return Timing(tuple(taken), warmup)


def time_in_turns(
    steps: Sequence[Callable[[PhaseContext], object]],
    *,
    device: DeviceClock,
    warmup: int,
    rounds: int,
    after_step: Sequence[Callable[[], object]],
    clock: Callable[[], float] = time.perf_counter,
) -> list[list[Sample]]:
    """Time several steps in turns, A B B A A B …, each as `time_steps` does: what drifts or disturbs meets all alike.

    Args:
        rounds: times that each step counts, after `warmup` times that do not.
        after_step: called outside the timed region after each run of the step in the same place.

    Returns:
        The samples of each step in the order they ran, so that those in one place belong to one round.
    """
    assert len(steps) == len(after_step), f"{len(steps)} steps, {len(after_step)} calls after them"
    taken: list[list[Sample]] = [[] for _ in steps]
    for number in range(warmup + rounds):
        places = range(len(steps))
        for place in places if number % 2 == 0 else reversed(places):
            taken[place].append(_time_one(steps[place], device, clock, lambda: None))
            after_step[place]()
    return [each[warmup:] for each in taken]


def time_window(
    step: Callable[[PhaseContext], object],
    *,
    device: DeviceClock,
    warmup: int,
    steps: int,
    clock: Callable[[], float] = time.perf_counter,
    after_step: Callable[[], object] = lambda: None,
    at_end: Callable[[], object] = lambda: None,
) -> Timing:
    """Sustained: run `warmup` steps, then a window of `steps` steps that nothing waits between, as training does.

    Only before and after the window is the device synchronised, so the host may run ahead by several steps, and what
    `after_step` does (the next batch) hides behind the device's work or delays it, as it would there. A sample is the
    time from the start of its step to the start of the next, by the device's marks where it has any, so that the
    samples add up to the window; the last one has the wait at the window's end, and `at_end`, which lets the current
    stream wait for what steps leave to others. Arguments as in `time_steps`.
    """
    assert warmup >= 0, f"warmup is {warmup}"
    assert steps >= 1, f"steps is {steps}"
    cold = _time_together(step, warmup, device, clock, after_step, at_end) if warmup else ()
    return Timing((*cold, *_time_together(step, steps, device, clock, after_step, at_end)), warmup)


def _time_together(
    step: Callable[[PhaseContext], object],
    steps: int,
    device: DeviceClock,
    clock: Callable[[], float],
    after_step: Callable[[], object],
    at_end: Callable[[], object],
) -> tuple[Sample, ...]:
    laps = [_Laps(device, clock) for _ in range(steps)]
    device.synchronize()
    starts = []
    for each in laps:
        starts.append((clock(), device.record()))
        step(each.phase)
        after_step()
    at_end()
    end_mark, issued = device.record(), clock()
    device.synchronize()
    end = clock()
    if end_mark is not None:
        _check_clocks(device.elapsed_ms(starts[0][1], end_mark), (end - starts[0][0]) * 1e3)
    samples = []
    for each, (start, mark), (after, next_mark) in zip(laps, starts, [*starts[1:], (end, end_mark)], strict=True):
        device_ms = None if mark is None else device.elapsed_ms(mark, next_mark)
        wall_ms = (after - start) * 1e3 if device_ms is None else device_ms
        wait_ms = (end - issued) * 1e3 if each is laps[-1] else 0.0
        samples.append(Sample(wall_ms, wait_ms, device_ms, each.read()))
    return tuple(samples)


class _Laps:
    """The phases of one step, marked as it runs and read once the device is done."""

    def __init__(self, device: DeviceClock, clock: Callable[[], float]) -> None:
        self._device, self._clock = device, clock
        self._marks: dict[str, tuple[float, Any, Any]] = {}  # phase → host seconds, first mark, last mark

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        assert name not in self._marks, f"phase {name} ran twice in one step"
        mark, entered = self._device.record(), self._clock()
        yield
        self._marks[name] = (self._clock() - entered, mark, self._device.record())

    def read(self) -> dict[str, Lap]:
        return {
            name: Lap(host * 1e3, None if first is None else self._device.elapsed_ms(first, last))
            for name, (host, first, last) in self._marks.items()
        }


class _Covers:
    """Work for the device right before a step, as often as it takes to outlast the host's launches of that step."""

    def __init__(self, work: Callable[[], object], device: DeviceClock, most: int) -> None:
        self._work, self._device, self._most = work, device, most
        self._times = 1
        self._marks: tuple[Any, Any] = (None, None)

    def launch(self) -> None:
        start = self._device.record()
        for _ in range(self._times):
            self._work()
        self._marks = start, self._device.record()

    def fit(self, issue_ms: float) -> None:
        """Choose how often for the next step, once the device is done with this one, which took that long to launch."""
        start, end = self._marks
        if start is None or self._most == 1:
            return
        one_ms = self._device.elapsed_ms(start, end) / self._times
        self._times = max(1, min(self._most, math.ceil(COVERED * issue_ms / one_ms)))


def _time_one(
    step: Callable[[PhaseContext], object], device: DeviceClock, clock: Callable[[], float], cover: Callable[[], object]
) -> Sample:
    laps = _Laps(device, clock)
    device.synchronize()
    cover()
    start, start_mark = clock(), device.record()  # the host's reads enclose the device's marks
    step(laps.phase)
    end_mark, issued = device.record(), clock()
    device.synchronize()
    end = clock()

    wall_ms = (end - start) * 1e3
    device_ms = None if start_mark is None else device.elapsed_ms(start_mark, end_mark)
    if device_ms is not None:
        _check_clocks(device_ms, wall_ms)
    return Sample(wall_ms, (end - issued) * 1e3, device_ms, laps.read())


def _check_clocks(device_ms: float, wall_ms: float) -> None:
    if device_ms > wall_ms * 1.01 + 0.1:  # events are good to 1 µs, clocks to one in 1e4
        raise ClockDisagreement(
            f"the device was busy for {device_ms:.3f} ms in a step that the host clock saw last {wall_ms:.3f} ms; "
            "the host clock or the synchronisation cannot be trusted, so no time is reported"
        )
