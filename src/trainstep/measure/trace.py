"""What a profiler recorded, whoever recorded it: ranges on host threads, and the work that was started inside them.

torch.profiler's JSON and Nsight Systems' SQLite exports are both read into a `Trace`. Times are microseconds from the
start of the trace. `attribution` says to which phase and module each piece of work belongs.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from trainstep.measure.ranges import RangeKind, parse_range

Thread = tuple[int, int]
"""(process, thread)"""

_ENGINE = "autograd::engine::evaluate_function: "
_NVTX = re.compile(r"(?P<name>.*?)(?:, seq = (?P<sequence>\d+))?(?:, op_id = \d+)?(?:, sizes = .*)?", re.DOTALL)
_BACKWARD_NODE = re.compile(r"(?:\w+::)*\w*Backward\d*")

Kind = RangeKind | Literal["node", "operator", "other"]


@dataclass(frozen=True, slots=True)
class Tensors:
    """The tensor arguments of one operator call."""

    shapes: tuple[tuple[int, ...], ...]
    """One per tensor, lists of tensors flattened; non-tensor arguments are left out."""
    dtypes: tuple[str, ...]
    """As the profiler names them: `float`, `c10::BFloat16`; `TensorList` for each tensor of a list."""
    counts: tuple[int, ...] = ()
    """How many tensors each tensor argument is: 1, or the length of a list."""
    unknown_lists: int = 0
    """Arguments that are lists of tensors whose shapes were not recorded (torch 2.11 does not)."""
    scalars: tuple[str, ...] = ()
    """Every argument as text, tensors as empty strings; empty where the trace has none."""


@dataclass(frozen=True, slots=True)
class Range:
    """Something a host thread was doing from `start` to `end`."""

    thread: Thread
    start: float
    end: float
    kind: Kind
    name: str
    """Without the prefix of our own ranges and without NVTX's sequence number."""
    sequence: int | None = None
    """Autograd's sequence number: shared by a forward operator and the node of its backward."""
    tensors: Tensors | None = None

    @property
    def is_accumulation(self) -> bool:
        """Whether it adds a gradient to a leaf: a node that no forward operator made."""
        return self.kind == "node" and self.name.endswith("AccumulateGrad")


@dataclass(frozen=True, slots=True)
class Work:
    """One kernel, copy or fill on a device; on a CPU, one stretch of an operator's own time."""

    name: str
    start: float
    duration: float
    stream: str
    launch: tuple[Thread, float] | None
    """Where and when the host started it; None where the trace does not tell."""
    is_kernel: bool = True
    """False for copies and fills by the copy engine."""
    is_continued: bool = False
    """Whether it is a further stretch of work that was counted already."""
    bytes: int | None = None
    """Bytes moved, for copies and fills."""

    @property
    def end(self) -> float:
        """When it was done."""
        return self.start + self.duration


@dataclass(frozen=True)
class Trace:
    """All that was recorded."""

    ranges: list[Range] = field(default_factory=list)
    work: list[Work] = field(default_factory=list)
    device: str = ""
    """Name of the device that the work ran on, if the trace tells; `CPU` where operators stand for kernels."""


def parents_of(ranges: Sequence[Range]) -> list[int | None]:
    """For each range the index of the one directly around it. `ranges` are sorted by thread, start and falling end."""
    parents: list[int | None] = []
    stack: list[int] = []
    for index, each in enumerate(ranges):
        while stack and (ranges[stack[-1]].thread != each.thread or ranges[stack[-1]].end <= each.start):
            stack.pop()
        parents.append(stack[-1] if stack else None)
        stack.append(index)
    return parents


def classify_range(text: str, *, is_backward: bool = False) -> tuple[Kind, str, int | None]:
    """Kind, name and sequence number of a range, from its text as NVTX or torch.profiler has it."""
    match = _NVTX.fullmatch(text)
    assert match is not None, "the pattern matches any text"
    name, sequence = match["name"], None if match["sequence"] is None else int(match["sequence"])
    ours = parse_range(name)
    if ours is not None:
        return *ours, None
    if name.startswith(_ENGINE):
        return "node", name.removeprefix(_ENGINE), sequence
    if is_backward or name.endswith("AccumulateGrad") or _BACKWARD_NODE.fullmatch(name):
        return "node", name, sequence
    is_operator = sequence is not None or "::" in name or name.startswith("triton_")
    return ("operator" if is_operator else "other"), name, sequence
