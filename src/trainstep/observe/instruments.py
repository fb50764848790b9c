"""Instruments that look into a few steps of a running script: the profiler, and one step's allocations and dtypes.

All of it begins and ends where an optimizer step has ended, and the steps it looks into are not timed. Allocations and
dtypes come first, the profiler last: on a GPU its library stays in the process and makes every launch after it slower,
so that later steps are not timed either.
"""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim.optimizer import Optimizer

from trainstep.base.errors import UsageError, one_line
from trainstep.measure.allocations.recording import Recording, StepWatch, recording_on_cpu, recording_on_cuda
from trainstep.measure.allocations.rows import groups_by_owner, timeline_rows
from trainstep.measure.allocations.timeline import Timeline
from trainstep.measure.dtypes import DtypeWatch, module_rows
from trainstep.measure.memory import GIB
from trainstep.measure.profile.ranges import WARMUP, announce, modules_announced, profiler_of_steps
from trainstep.observe.compiling import is_anything_compiled, nothing_is_compiled
from trainstep.observe.hooks import Hooks
from trainstep.observe.lines import Lines
from trainstep.observe.modules import is_compiled
from trainstep.observe.steps import BACKWARD, FORWARD, LOSS, OPTIMIZER, StepFinder
from trainstep.rows import PeakRow
from trainstep.rows.records import Row

if TYPE_CHECKING:
    from trainstep.observe.session import Plan

RECORDED_AFTER = 4  # steps before the one whose allocations are recorded
SETTLED = RECORDED_AFTER + 2  # steps before the profiler at least
PROFILED, RECORDED, AFTER = "profiled", "recorded", "after the profiler"
"""Tags of steps."""
NO_MODEL = "no model was called that updates could be told of, so no allocations are recorded"
_OURS = tuple(str(Path(__file__).parents[1] / room) for room in ("observe", "ladder"))  # no user's code


def trace_path(folder: Path, rank: int) -> Path:
    """Path of a rank's trace."""
    return folder / ("trace.json.gz" if rank == 0 else f"trace-rank-{rank}.json.gz")


def steps_needed(profiled: int, profile_after: int) -> int:
    """Steps of a run in which instruments look into a few, the profiler into the last."""
    return max(SETTLED, profile_after) + WARMUP + profiled if profiled else SETTLED


class Instruments:
    """Called at every border between steps.

    Args:
        finder, hooks: of the session.
        device: where the script trains.
        plan: of the session: what is recorded and profiled.
        rank: of which the first alone records allocations and dtypes.
        own: columns that every row has.
        write: takes a row, or a sentence that says why there is none.
        synced: called with the number of a line at which the host waited, in the step that is recorded.
    """

    def __init__(
        self,
        finder: StepFinder,
        hooks: Hooks,
        device: torch.device,
        plan: Plan,
        rank: int,
        own: dict[str, Any],
        write: Callable[[Row | str], object],
        synced: Callable[[int], object],
    ) -> None:
        self._finder, self._hooks, self._device, self._own, self._write = finder, hooks, device, own, write
        self._trace, self._synced = trace_path(Path(plan.folder), rank), synced
        self._profiled, last = plan.profiled_steps, plan.steps
        self._record_at = RECORDED_AFTER if plan.has_memory and rank == 0 else None
        self._profile_at = plan.profile_after if self._profiled else None
        if last is not None and self._profiled:
            self._profile_at = last - WARMUP - self._profiled
        if self._record_at is not None and last is not None and last <= self._record_at + 1:
            self._record_at = None
            write(f"{last} steps are too few to record the allocations of one")
        if self._profile_at is not None and last is not None and self._profile_at < SETTLED:
            self._profile_at = None
            write(f"{last} steps are too few to profile some of them: {SETTLED} go before, and {WARMUP} warm it up")
        self._seen = 0
        self._recording: _Recording | None = None
        self._profiling: _Profiling | None = None
        self._tag = ""

    def at_border(self, ended: int) -> None:
        """An optimizer step has ended, so many in all; a further one of the same step changes nothing."""
        if ended == self._seen:
            return
        self._seen = ended
        self.guard(lambda: self._go_on(ended))
        if self._tag:
            self._finder.tag(self._tag)

    def guard(self, work: Callable[[], object]) -> None:
        """Do what is not to end the script; where it fails, that is said, and nothing more is looked into."""
        try:
            work()
        except Exception as error:
            self._write(f"looking into a step failed: {type(error).__name__}: {one_line(error)}")
            self._finder.tag(RECORDED)
            self._record_at = self._profile_at = None
            self._tag = ""
            self.close()

    def _go_on(self, ended: int) -> None:
        if self._profiling is not None:
            self._profile_on()
        elif self._recording is not None:
            self._record_end()
        elif self._record_at is not None and ended >= self._record_at and self._knows_models:
            self._record_at = None
            self._record()
        elif self._profile_at is not None and ended >= self._profile_at:
            self._profile_at = None
            self._profile()

    @property
    def _knows_models(self) -> bool:
        """True if some models were called, or are no longer looked for."""
        return bool(self._hooks.roots.called()) or not self._hooks.roots.is_searching

    def before_optimizer(self) -> None:
        """Gradients are there."""
        if self._recording is not None:
            self.guard(self._recording.see_gradients)

    def close(self) -> None:
        """The script ends, or looking failed."""
        recording, profiling, self._recording, self._profiling = self._recording, self._profiling, None, None
        self._finder.listeners.clear()
        self._hooks.on_loss = lambda tensors: None
        if self._record_at is not None and self._seen >= self._record_at:
            self._record_at = None
            self._write(NO_MODEL)
        for end in (recording and recording.leave, profiling and profiling.stop):
            with contextlib.suppress(Exception):
                if end:
                    end()

    def _record(self) -> None:
        roots, optimizers = self._hooks.roots.called(), list(self._hooks.optimizers)
        if not roots or not optimizers:
            self._write(NO_MODEL)
            return
        root = _together(roots)
        if self._device.type == "cpu" and (_has_compiled(root) or is_anything_compiled()):
            what = "compiled code" if _has_compiled(root) else "a process that has compiled something"
            self._write(f"allocations of {what} cannot be followed on a CPU")
            return
        self._recording = _Recording(root, optimizers, self)
        self._tag = RECORDED

    def _record_end(self) -> None:
        assert self._recording is not None, "it was begun"
        if not self._recording.leave():
            return  # what the script entered meanwhile is to be left first
        found, dtypes = self._recording.found, self._recording.dtypes
        self._recording, self._tag = None, ""
        if found:
            self._write(_peak_row(found[0].timeline, self._own))
            for row in timeline_rows(found[0].timeline, groups_by_owner(found[0].timeline), self._own, {}):
                self._write(row)
        for row in dtypes:
            self._write(row)
        self._finder.tag(RECORDED)  # the next step pays for that

    def _profile(self) -> None:
        if torch._C._autograd._profiler_enabled():
            self._write("the script runs under a profiler of its own, so ours did not record kernels")
            return
        roots = self._hooks.roots.called()
        if is_anything_compiled():  # perhaps code that calls modules, which hooks on them would have compiled again
            roots = [each for each in roots if _has_compiled(each)]
        self._profiling = _Profiling(roots, self._finder, self._profiled, self._trace, self.guard, self._device)
        self._tag = PROFILED

    def _profile_on(self) -> None:
        assert self._profiling is not None, "it was begun"
        if self._profiling.next():
            return
        self._profiling = None
        self._finder.tag(PROFILED)  # the next step pays for writing the trace
        self._tag = AFTER if self._device.type == "cuda" else ""


def _settle(device: torch.device) -> None:
    """Wait for what was launched: a host may be far ahead."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class _Profiling:
    """Steps under torch's profiler, with their phases and the models' modules announced."""

    def __init__(
        self,
        roots: list[nn.Module],
        finder: StepFinder,
        steps: int,
        trace: Path,
        guard: Callable[[Callable[[], object]], object],
        device: torch.device,
    ) -> None:
        self._finder, self._left, self._number = finder, WARMUP + steps, 0
        self._steps, self._device = steps, device
        self._step: AbstractContextManager[Any] | None = None
        self._phase: AbstractContextManager[Any] | None = None
        self._profiler = profiler_of_steps(steps, trace, on_gpu=device.type == "cuda", shapes=True)
        with ExitStack() as announced:
            for root in roots:
                announced.enter_context(modules_announced(root))
            self._profiler.start()
            self._announced = announced.pop_all()
        finder.listeners.append(lambda phase: guard(lambda: self._on_phase(phase)))
        self._open()

    def next(self) -> bool:
        """The next step begins; False after the last."""
        self._close()
        self._left -= 1
        if self._left in (self._steps, 0):  # a kernel from before would be recorded without its launch, or one lost
            _settle(self._device)
        self._profiler.step()
        if self._left == 0:
            self.stop()
            return False
        self._open()
        return True

    def stop(self) -> None:
        """End it, wherever it is."""
        self._close()
        self._finder.listeners.clear()
        self._profiler.stop()
        self._announced.close()

    def _open(self) -> None:
        self._step = announce("step", str(self._number))
        self._step.__enter__()
        self._number += 1
        self._on_phase(self._finder.current)

    def _close(self) -> None:
        for each in (self._phase, self._step):
            if each is not None:
                each.__exit__(None, None, None)
        self._phase = self._step = None

    def _on_phase(self, phase: str) -> None:
        if self._phase is not None:
            self._phase.__exit__(None, None, None)
        self._phase = announce("phase", phase)
        self._phase.__enter__()


class _Recording:
    """Allocations and dtypes of one step."""

    def __init__(self, root: nn.Module, optimizers: Sequence[Optimizer], of: Instruments) -> None:
        self._finder, self._hooks, self._own = of._finder, of._hooks, of._own
        device, finder, hooks, guard = of._device, of._finder, of._hooks, of.guard
        self.dtypes: list[Row] = []
        self._phase: AbstractContextManager[Any] | None = None
        sees_modules, on_gpu = not (_has_compiled(root) or is_anything_compiled()), device.type == "cuda"
        self._watch = StepWatch(root, optimizers, sees_modules=sees_modules, hidden=_OURS)
        self._dtypes = DtypeWatch(root) if sees_modules else None
        with ExitStack() as stack:
            if self._dtypes is not None:
                stack.enter_context(nothing_is_compiled())
                stack.enter_context(self._dtypes)
            recording = recording_on_cuda(self._watch, device) if on_gpu else recording_on_cpu(self._watch)
            self.found: list[Recording] = stack.enter_context(recording)
            if on_gpu:  # left first: the recording waits for the device when it ends
                stack.enter_context(synchronisations(hooks.lines, of._synced, lambda: hooks.is_reading))
            self._stack = stack.pop_all()
        self._modes = _modes()
        self._finder.listeners.append(lambda phase: guard(lambda: self._on_phase(phase)))
        self._hooks.on_loss = lambda tensors: guard(lambda: self._watch.watch_graph(tensors))
        self._on_phase(finder.current)

    def see_gradients(self) -> None:
        """Note the dtypes, while gradients are there: not before modules were called, as where the step before has
        another optimizer's update still to come."""
        if self._dtypes is None or self.dtypes:
            return
        with contextlib.suppress(UsageError):  # those of another model are not averaged yet
            modules = [each for each in self._dtypes.found().modules if each.inputs or each.parameters]
            if any(each.inputs for each in modules):
                self.dtypes = list(module_rows(modules, self._own))

    def leave(self) -> bool:
        """End the recording; False where a mode that the script has entered since must be left first."""
        if _modes() != self._modes:
            return False
        if self._phase is not None:
            self._phase.__exit__(None, None, None)
            self._phase = None
        self._finder.listeners.clear()
        self._hooks.on_loss = lambda tensors: None
        self._stack.close()
        return True

    def _on_phase(self, phase: str) -> None:
        if self._phase is not None:
            self._phase.__exit__(None, None, None)
        self._phase = self._watch.phase(phase)
        self._phase.__enter__()


def _modes() -> tuple[int, int]:
    """Numbers of modes entered that see all of torch's functions and operators."""
    return torch._C._len_torch_function_stack(), torch._C._len_torch_dispatch_stack()


def _together(models: Sequence[nn.Module]) -> nn.Module:
    """The model; several as one, in which each is called by its class: `Linear`, `Linear 2`."""
    if len(models) == 1:
        return models[0]
    several, counts = nn.Module(), Counter[str]()
    for model in models:
        name = type(model).__name__
        counts[name] += 1
        several.add_module(name if counts[name] == 1 else f"{name} {counts[name]}", model)
    return several


def _has_compiled(module: nn.Module) -> bool:
    return any(map(is_compiled, module.modules()))


def _peak_row(timeline: Timeline, own: dict[str, Any]) -> PeakRow:
    """The most bytes of the step and of its phases."""
    peaks: dict[str, int] = {}
    for span in timeline.phases:
        peaks[span.name] = max(peaks.get(span.name, 0), int(timeline.live[span.start : span.end + 1].max()))
    named: dict[str, Any] = {
        f"{name}_peak_gib": peaks[name] / GIB for name in (FORWARD, LOSS, BACKWARD, OPTIMIZER) if name in peaks
    }
    peak: dict[str, Any] = {"peak_gib": timeline.peak / GIB, "at_rest_gib": int(timeline.live[0]) / GIB, **named}
    return PeakRow(**own, mode="step", peak_phase=timeline.phase_of(timeline.peak_state) or None, **peak)


# Calls that make the host wait for a GPU and are no read of a tensor, such as a mask as an index: found by CUDA's own
# check, which warns at each, in one step.
MESSAGE = "called a synchronizing"  # how the warning begins; what else it says differs between versions


@contextmanager
def synchronisations(lines: Lines, found: Callable[[int], object], is_known: Callable[[], bool]) -> Iterator[None]:
    """While entered, `found` is called with the number of the line of each; nothing of it is shown.

    Args:
        lines: numbers the lines.
        found: what is told.
        is_known: whether the call under way is one that is timed anyway.
    """
    before, show = torch.cuda.get_sync_debug_mode(), warnings.showwarning
    if before:  # the script looks itself
        yield
        return

    def note(message: Any, *arguments: Any, **keywords: Any) -> None:
        if MESSAGE not in str(message):
            show(message, *arguments, **keywords)
        elif not is_known():
            found(lines.number("a synchronising operation", sys._getframe(1)))

    warnings.filterwarnings("always", message=f".*{MESSAGE}")
    added = warnings.filters[0]
    warnings.showwarning = note
    torch.cuda.set_sync_debug_mode("warn")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)
        if warnings.showwarning is note:
            warnings.showwarning = show
        if added in warnings.filters:
            warnings.filters.remove(added)  # type: ignore[attr-defined]
