"""Named ranges around steps, phases, modules and pieces of attention, and steps run under a profiler that records them.

A range is a `record_function`: torch.profiler records it, and under `emit_nvtx` the same range goes to NVTX, so Nsight
Systems sees what torch.profiler sees. Modules are announced by hooks that exist for the time of a profile only. Code
inside torch.compile is never hooked, which would compile it anew: a compiled module is announced around the call of its
compiled code, as one. Steps run through the same stopwatch as without a profiler, warm-ups left out.
"""

from __future__ import annotations

import gzip
import itertools
import os
import re
import shutil
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile, record_function, schedule

from trainstep.base.config import PhaseContext, together
from trainstep.base.files import aside
from trainstep.measure.memory import module_calls
from trainstep.measure.timing import CpuClock, DeviceClock, Timing, time_steps
from trainstep.step.blocks import is_called

AnnouncedKind = Literal["step", "phase", "module", "attention"]
ANNOUNCED: tuple[AnnouncedKind, ...] = ("step", "phase", "module", "attention")
RangeKind = (
    AnnouncedKind | Literal["profiler step", "named step", "node", "operator", "compiled", "collective", "other"]
)
"""Kinds of ranges: one of ours, or by torch: a step of its profiler's schedule, a node of backward, an operator's call,
a call of compiled code, a collective of Gloo on the thread that runs it (from when it begins there until all is
received); or anybody's, of which those are told apart that are named as steps are."""
Step = Callable[[PhaseContext], object]
ROOT = "(model)"  # the name of the outermost module, whose own dotted name is empty
WARMUP = 2  # steps under the profiler before those that are recorded: one to start it, one as it is when recording
GLOO = "gloo:"  # how torch begins the names of Gloo's collectives
_ENGINE = "autograd::engine::evaluate_function: "
_COMPILED = "## Call CompiledFxGraph"
_NVTX = re.compile(r"(?P<name>.*?)(?:, seq = (?P<sequence>\d+))?(?:, op_id = \d+)?(?:, sizes = .*)?", re.DOTALL)
_PROFILER_STEP = re.compile(r"ProfilerStep\W?\d+")
_NAMED_STEP = re.compile(
    r"((train|training|trainer|global|main)[\s_.:-]*)?(step|iteration|iter)[\s_#:=.-]*\d*", re.IGNORECASE
)
"""Names by which others announce a whole step: "step 3", "iteration_12", "train_step"; a micro step or an optimizer's
is none."""
_BACKWARD_NODE = re.compile(r"(?:\w+::)*\w*Backward\d*")


def announce(kind: AnnouncedKind, name: str) -> AbstractContextManager[Any]:
    """A range that every profiler sees, under the name that `parse_range` reads."""
    return record_function(f"{kind}:{name}")


def parse_range(text: str) -> tuple[AnnouncedKind, str] | None:
    """The kind and the name that `announce` was given; None for anybody else's ranges."""
    kind, colon, name = text.partition(":")
    return (kind, name) if colon and name and kind in ANNOUNCED else None


def classify_range(text: str, *, is_backward: bool = False) -> tuple[RangeKind, str, int | None]:
    """Kind, name and autograd's sequence number of any range, from its text as NVTX or torch.profiler has it."""
    match = _NVTX.fullmatch(text)
    assert match is not None, "the pattern matches any text"
    name, sequence = match["name"], None if match["sequence"] is None else int(match["sequence"])
    ours = parse_range(name)
    if ours is not None:
        return *ours, None
    if _PROFILER_STEP.fullmatch(name):
        return "profiler step", name, None
    if _NAMED_STEP.fullmatch(name):
        return "named step", name, None
    if name.startswith(_ENGINE):
        return "node", name.removeprefix(_ENGINE), sequence
    if is_backward or name.endswith("AccumulateGrad") or _BACKWARD_NODE.fullmatch(name):
        return "node", name, sequence
    if sequence is not None or "::" in name or name.startswith("triton_"):
        return "operator", name, sequence
    kind: RangeKind = "collective" if name.startswith(GLOO) else "compiled" if name.startswith(_COMPILED) else "other"
    return kind, name, sequence


@contextmanager
def modules_announced(module: nn.Module) -> Iterator[None]:
    """While entered, every call of `module` and of its submodules is a range, also when activations are recomputed."""
    opened, found = _OpenRanges(), list(modules_to_announce(module))
    eager = [(name, each) for name, each in found if each._compiled_call_impl is None]
    with module_calls(eager, opened.enter, opened.leave), ExitStack() as stack:
        for name, each in found:
            if each._compiled_call_impl is not None:
                stack.enter_context(_compiled_announced(each, name))
        yield


def modules_to_announce(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The names and modules of `module` and its submodules, down to modules that are compiled."""
    seen: set[int] = set()
    ahead = [("", module)]
    while ahead:
        name, each = ahead.pop()
        if id(each) not in seen:
            seen.add(id(each))
            if is_called(each):
                yield name or ROOT, each
            if each._compiled_call_impl is None and not hasattr(each, "_orig_mod"):
                ahead += reversed([(f"{name}.{child}".lstrip("."), inner) for child, inner in each.named_children()])


class _OpenRanges(threading.local):
    """The ranges of modules open in each thread: backward recomputes in a thread of its own."""

    def __init__(self) -> None:
        self._stack: list[AbstractContextManager[Any]] = []

    def enter(self, name: str) -> None:
        opened = announce("module", name)
        opened.__enter__()
        self._stack.append(opened)

    def leave(self) -> None:
        self._stack.pop().__exit__(None, None, None)


@contextmanager
def _compiled_announced(module: nn.Module, name: str) -> Iterator[None]:
    compiled: Any = module._compiled_call_impl

    def inside_range(*args: Any, **kwargs: Any) -> Any:
        with announce("module", name):
            return compiled(*args, **kwargs)

    module._compiled_call_impl = inside_range
    try:
        yield
    finally:
        module._compiled_call_impl = compiled


def record_steps(
    step: Step,
    device: DeviceClock,
    steps: int,
    trace: Path,
    module: nn.Module | None = None,
    prepare_next: Callable[[], object] = lambda: None,
) -> Timing:
    """Run `step` under torch.profiler with its ranges announced, write the trace, and return the profiled timing.

    Args:
        device: on a GPU kernels are recorded; else the operators stand for them.
        steps: recorded steps, after `WARMUP` that are not.
        trace: the file to write, `.json.gz`: Perfetto (ui.perfetto.dev) and chrome://tracing open it.
        module: whose submodules are announced, and the shapes of operators' arguments recorded; None does without
            both, which makes the profiler's own cost smaller.
        prepare_next: called after each step.
    """
    with (
        modules_announced(module) if module is not None else nullcontext(),
        profiler_of_steps(steps, trace, on_gpu=not isinstance(device, CpuClock), shapes=module is not None) as profiler,
    ):

        def after_step(_: object) -> None:
            prepare_next()
            profiler.step()

        return time_steps(_announced(step), device=device, warmup=WARMUP, steps=steps, after_step=after_step)


def profiler_of_steps(steps: int, trace: Path, *, on_gpu: bool, shapes: bool) -> profile:
    """A profiler that records `steps` steps after `WARMUP` and writes their trace; `step` is called after each.

    Args:
        steps, trace: as `record_steps` has them.
        on_gpu: whether kernels are recorded; else the operators stand for them.
        shapes: whether the shapes of operators' arguments are recorded.
    """
    if not on_gpu:  # torch 2.13's profiler says on stderr when it starts and stops; where a GPU is, it may say more
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")

    # acc_events=True would silence it, but makes an object of each event, which took most of a large step's profile.
    warnings.filterwarnings("ignore", "Warning: Profiler clears events")  # of earlier cycles: there is one

    def export(done: profile) -> None:
        # torch would pack it line by line, which takes three times as long.
        with aside(trace) as draft, NamedTemporaryFile(suffix=".json") as plain:
            done.export_chrome_trace(plain.name)
            with open(plain.name, "rb") as text, gzip.open(draft, "xb", 3) as packed:
                shutil.copyfileobj(text, packed, 2**20)

    return profile(
        activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])],
        schedule=schedule(wait=0, warmup=WARMUP, active=steps, repeat=1),
        record_shapes=shapes,
        experimental_config=_all_threads() if not on_gpu else None,
        on_trace_ready=export,
    )


def _all_threads() -> _ExperimentalConfig | None:
    """Between ranks on CPUs, Gloo runs on threads that torch does not tell of the profiler by itself."""
    return _ExperimentalConfig(profile_all_threads=True) if dist.is_available() and dist.is_initialized() else None


def run_under_nvtx(
    step: Step, device: DeviceClock, warmup: int, steps: int, module: nn.Module, prepare_next: Callable[[], object]
) -> Timing:
    """Run `step` with its ranges and operators announced to NVTX, `steps` times between cudaProfilerStart and Stop."""
    taken = itertools.count(1)

    def after_step(_: object) -> None:
        prepare_next()
        if next(taken) == warmup:
            torch.cuda.profiler.start()

    with modules_announced(module), torch.autograd.profiler.emit_nvtx(record_shapes=False):
        timing = time_steps(_announced(step), device=device, warmup=warmup, steps=steps, after_step=after_step)
        torch.cuda.profiler.stop()
    return timing


def _announced(step: Step) -> Step:
    """`step` with each of its calls and its phases announced; calls are numbered."""
    numbers = itertools.count()

    def numbered(phase: PhaseContext) -> object:
        with announce("step", str(next(numbers))):
            return step(together(partial(announce, "phase"), phase))

    return numbered
