"""A rank's measurement of the process it runs in: hooks, the steps they find, and the log that these go to.

On a GPU every mark is an event in the device's queue as well, so that the phases are those of the device; they are read
once the device has passed them, and nothing ever waits for that.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.optimizer import Optimizer
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from trainstep.base.cores import cpu_share, load
from trainstep.base.errors import one_line
from trainstep.measure.environment import describe
from trainstep.measure.timing import CpuClock, CudaClock, DeviceClock
from trainstep.observe.compiling import Recompilations
from trainstep.observe.habits import settings_on, user_files
from trainstep.observe.hooks import Hooks, parameters_of
from trainstep.observe.lines import Lines, Place, line_around, place_of_call, user_calls
from trainstep.observe.log import ENDED, LogWriter
from trainstep.observe.modules import SEARCHED
from trainstep.observe.sampling import SampledLines, Sampler, count_lines
from trainstep.observe.steps import Step, StepFinder

if TYPE_CHECKING:
    from trainstep.rows.records import Row


@dataclass(frozen=True)
class Plan:
    """Measurements that a run is asked for beside the times of its steps."""

    steps: int | None = None  # after how many it stops by itself
    is_deep: bool = False  # whether instruments look into steps, and calls beyond the border are seen
    profiled_steps: int = 2  # how many the profiler records; 0 for none
    profile_after: int = 30  # steps before those, where the run has no end of its own
    has_memory: bool = True  # whether one step's allocations and dtypes are recorded
    folder: str = ""  # where a trace is written
    is_sampled: bool = False  # whether lines under way are sampled


JOINED = (
    "forward includes the loss and all else before backward, where no call of a model was seen: a class of torch's "
    "such as nn.Sequential is not observed; tables of trainstep run --deep tell them apart"
)
_PAGE_MIB = os.sysconf("SC_PAGE_SIZE") / 2**20
_STARTS_WORKERS = _MultiProcessingDataLoaderIter.__init__.__code__
Mark = tuple[float, Any]  # the host's clock, and an event in the device's queue or None


class Session:
    """Measures from `start` to `finish`."""

    def __init__(self, plan: Plan, log: LogWriter, script: str = "") -> None:
        self.plan, self.log, self.script = plan, log, script
        self.device = torch.device("cpu")
        self._clock: DeviceClock = CpuClock()
        self.finder = StepFinder(self._mark, self._queue)
        self.finder.on_end = self._step_ended
        self.hooks = Hooks(self.finder, Lines(self._new_line), is_deep=plan.is_deep, on_failure=self._failed)
        self.finder.in_stock, self.finder.in_memory = self.hooks.loaders.stock, self._memory
        self.on_stop: Callable[[], object] = lambda: None  # called before the script is ended
        self._recompilations = Recompilations(log)
        self._queued: deque[Step] = deque()
        self._sampled = SampledLines()
        self._sampler = self._sampled.sampler
        self._handed_out = self._noted_lines = 0
        self._is_finished = self._knows_device = self._is_joined = self._has_files = False
        self._instruments: Any = None
        self._counted: Any = -1, None  # descriptor of the system's count of this process's memory, and which file it is

    def start(self) -> None:
        """Install the hooks."""
        self.hooks.install()
        with contextlib.suppress(OSError):  # opened once: an audit hook of the script's would see each time
            file = os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)
            self._counted = file, os.fstat(file)
        if self.plan.is_deep:
            from trainstep.observe.beyond import Beyond

            Beyond(self.hooks).install()
        self._recompilations.start()
        self.log.write("facts", {"torch": torch.__version__})
        self.hooks.before_optimizer = self._before_optimizer
        self.hooks.on_loader = self._write_loaders
        self.hooks.on_backward = self._tag_settings
        os.register_at_fork(before=lambda: self._sampler.end(), after_in_child=self._forked)

    def finish(self) -> None:
        """Take the hooks back and write what is left."""
        if self._is_finished:
            return
        self._is_finished = True
        if self._instruments is not None:
            self._instruments.close()
        self._sampler.end()
        self.hooks.remove()
        if (file := self._own_file()) is not None:
            os.close(file)
        if not self._knows_device and self.hooks.optimizers:  # the script's profiler was on throughout
            self._learn_of_the_device(self.hooks.optimizers[0])
        self.finder.tell_kept()
        self.finder.settle()
        if self._queued:
            with contextlib.suppress(RuntimeError):  # a device that failed has said so
                self._clock.synchronize()
        self._write_queued(until_done=True)
        self._recompilations.look(self.finder.ended)
        self._recompilations.stop()
        self._write_loaders()
        self._write_noted()
        if self._is_joined:
            self._write_found(JOINED)
        self._write_peak()
        self.log.write("facts", {"cpu_share": cpu_share()})
        if not self.finder.ended and self.finder.backwards:
            self.log.write("facts", {"backwards": self.finder.backwards})

    @staticmethod
    def _mark() -> Mark:
        return time.perf_counter(), None

    def _shows_events(self) -> bool:
        """True while an event of ours would be a part of the script's graph, or of its profiler's trace."""
        is_profiled = not self.plan.is_deep and torch._C._autograd._profiler_enabled()
        return is_profiled or torch.cuda.is_current_stream_capturing()

    def _mark_on_gpu(self) -> Mark:
        return time.perf_counter(), None if self._shows_events() else self._clock.record()

    def _coming_mark(self, clock: CudaClock) -> tuple[Iterable[Iterator[Any]], Any]:
        if self._shows_events():
            return (), None
        event = torch.cuda.Event(enable_timing=True)
        return (map(torch._C._CudaEventBase.record, (event,), (clock.stream(),)),), event

    def _step_ended(self) -> None:
        """An optimizer has stepped: what instruments do happens at this border."""
        if self.plan.is_sampled:
            self._sampler.begin()
        if len(self.finder.noted) > self._noted_lines:
            self._write_noted()
        self._recompilations.look(self.finder.ended)
        if self._instruments is not None:
            self._instruments.at_border(self.finder.ended)

    def _know_the_device(self, optimizer: Optimizer) -> None:
        """In the first step of which a profiler of the script's sees nothing; it also pays for this."""
        parameter = next(parameters_of([optimizer]), None)
        if parameter is not None and parameter.device.type == "cuda":
            self.device = parameter.device
            self.hooks.on_gpu = True
            self._clock = clock = CudaClock(self.device)
            self.finder.mark, self.hooks.coming_mark = self._mark_on_gpu, lambda: self._coming_mark(clock)
            clock.synchronize()  # once: from here on both clocks are held against each other
        if self.plan.is_deep and (self.plan.profiled_steps or self.plan.has_memory):
            from trainstep.observe.instruments import Instruments

            own, synced = {"workload": self.script}, lambda number: self.log.write("sync", {"number": number})
            seen = self.finder, self.hooks, self.device
            self._instruments = Instruments(*seen, self.plan, self.log.rank, own, self._write_found, synced)
        known = {"on_gpu": self.hooks.on_gpu, "calls": user_calls(), "load": load()}
        self.log.write("facts", {"environment": describe(self.device, has_commit=False), **known})

    def _queue(self, step: Step) -> None:
        """A step has ended for certain."""
        for phase, place in self._sampled.of_step(step):
            line = self.hooks.lines.number_of(place, phase)
            step.seen[line] = step.seen.get(line, 0) + 1
        self._queued.append(step)
        self._handed_out += 1
        self._write_queued()
        is_missed = step.backwards and not step.forwards and self._handed_out > 1  # models are found in the first step
        self._is_joined = self._is_joined or bool(is_missed)
        if is_missed and self.hooks.roots.search_deeper():
            self.finder.tag(SEARCHED)
        if self.plan.steps is not None and self._handed_out >= self.plan.steps and not self._is_finished:
            self._stop()

    def _stop(self) -> None:
        """End the script as `sys.exit()` would."""
        self.finish()
        self.log.write("end", {"how": "steps", "code": 0})
        self.on_stop()
        raise SystemExit(0)

    def _before_optimizer(self, optimizer: Optimizer) -> None:
        if not self._knows_device and not (torch.cuda.is_initialized() and self._shows_events()):
            self._learn_of_the_device(optimizer)
        if self._instruments is not None:
            self._instruments.before_optimizer()

    def _learn_of_the_device(self, optimizer: Optimizer) -> None:
        self._knows_device = True
        try:
            with self.hooks.aside(), torch._C.DisableTorchFunction():  # a mode of the script's sees none of this
                self._know_the_device(optimizer)
        except Exception as error:  # a script trains without us too
            self._write_found(f"what is known of the machine is not all: {type(error).__name__}: {error}")

    def _write_queued(self, *, until_done: bool = False) -> None:
        if self.hooks.on_gpu and self._shows_events() and not until_done:
            self.log.write("facts", {"waiting": self.finder.ended})
            return  # a graph that is being captured does not survive that events are asked
        while self._queued and (until_done or self._is_done(self._queued[0])):
            self._write(self._queued.popleft())

    def _is_done(self, step: Step) -> bool:
        event = step.marks[-1][1]
        return event is None or event.query()

    def _write(self, step: Step) -> None:
        pairs = list(itertools.pairwise(step.marks))
        step.host = [(after[0] - before[0]) * 1e3 for before, after in pairs]
        if all(mark[1] is not None for mark in step.marks):
            try:
                step.device = [self._clock.elapsed_ms(before[1], after[1]) for before, after in pairs]
            except RuntimeError:  # the device failed
                return
        self.log.write("step", step.logged())

    def _failed(self, error: Exception) -> None:
        """Something of ours raised, and nothing is observed from here on."""
        self.finder.switch_off()
        self._write_found(f"{ENDED}: {type(error).__name__}: {one_line(error)}")

    def _write_found(self, found: Row | str) -> None:
        """Write what an instrument found, or why it found nothing."""
        if isinstance(found, str):
            self.log.write("note", {"text": found})
        else:
            from trainstep.rows.records import sections_of

            self.log.write("row", {"row": sections_of(found)})

    def _write_peak(self) -> None:
        """Write the most memory so far: torch's count of a GPU's, else the system's of this process, where it has
        one."""
        peak = None
        if self.hooks.on_gpu:
            peak = torch.cuda.max_memory_allocated(self.device)
        elif (status := Path("/proc/self/status")).exists():
            found = re.search(r"^VmHWM:\s+(\d+) kB", status.read_text(), re.MULTILINE)
            peak = int(found[1]) * 1024 if found else None
        self.log.write("facts", {"peak_bytes": peak})

    def _memory(self) -> list[float]:
        """MiB of the process that are no files', and on a GPU those that torch has given out; a step's `memory`."""
        found = list[float]()
        if (file := self._own_file()) is not None:
            _, resident, shared, *_ = map(int, os.pread(file, 200, 0).split())
            found.append((resident - shared) * _PAGE_MIB)
            if self.hooks.on_gpu:
                found.append(torch._C._cuda_memoryStats(self.device.index)["allocated_bytes"]["all"]["current"] / 2**20)
        return found

    def _own_file(self) -> int | None:
        """Descriptor of the system's count of the process's memory; None where the script has closed it."""
        with contextlib.suppress(OSError):
            return self._counted[0] if os.path.samestat(os.fstat(self._counted[0]), self._counted[1]) else None
        return None

    def _write_noted(self) -> None:
        self._noted_lines = len(self.finder.noted)
        self.log.write("facts", {"noted": self.finder.noted})

    def _tag_settings(self) -> None:
        """Note settings that are on in the step under way, and the first time the files that may set them.

        In a deep run the profiler is ours.
        """
        for name in set(settings_on(self.hooks.roots.called())) - ({"own-profiler"} if self.plan.is_deep else set()):
            if not self._has_files:
                self._has_files = True
                self.log.write("facts", {"files": user_files()})
            self.finder.tag(name)

    def _write_loaders(self) -> None:
        self.log.write("facts", {"loaders": self.hooks.loaders.found()})

    def _new_line(self, number: int, place: Place, call: str) -> None:
        self.log.write("line", {"number": number, "call": call, **place._asdict()})

    def _forked(self) -> None:
        """In a process that was forked: that it trains is noted, and lines are counted in a loader's worker."""
        self.finder.switch_off()
        frame: FrameType | None = sys._getframe()
        while frame is not None and frame.f_code is not _STARTS_WORKERS:
            frame = frame.f_back
        if frame is not None and self.plan.is_sampled and not self._is_finished:
            loader = line_around(place_of_call(frame))
            tell = partial(self.log.write_from_child, "worker")
            self._sampler = Sampler(partial(count_lines, lambda told: tell({"loader": loader, **told})))
            self._sampler.begin()
        told = [False]

        def say(_: Optimizer) -> None:
            if not told[0]:
                told[0] = True
                self.log.write_from_child("elsewhere", {"what": "a process that the script forked", "pid": os.getpid()})

        self.hooks.before_optimizer = say
