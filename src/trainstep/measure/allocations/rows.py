"""Rows of a timeline of allocations: the timeline itself, the owners of its peak, and the largest allocations."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from trainstep.measure.allocations.timeline import OWNERS, Allocation, Group, Timeline, interned, outline
from trainstep.measure.memory import GIB, MIB
from trainstep.rows import AllocationRow, MemoryTimelineRow, OwnerRow
from trainstep.rows.records import Row, Scalar
from trainstep.rows.row import Entry
from trainstep.step.blocks import without_numbers

NAMED_MODULES = 4  # whose activations have a colour of their own
NAMED_LINES = 7  # the same for the lines of a foreign snapshot
PARTS = 5  # rows per owner beside its total
LEAST_SHARE = 0.001  # parts below this share of the peak have no row
LARGEST = 12  # rows of the largest allocations
STACK = 8  # frames of a stack that are shown


def timeline_rows(
    timeline: Timeline, group_of: Callable[[Allocation], Group], own: Mapping[str, Any], extra: Mapping[str, Scalar]
) -> Iterator[Row]:
    """The timeline with `extra` columns, who owns its peak, and its largest allocations, all with `own` columns.

    Allocations of one group are drawn alike.
    """
    yield _timeline_row(timeline, group_of, {**own, **extra})
    yield from _owner_rows(timeline, own)
    yield from _largest_rows(timeline, own)


def _timeline_row(
    timeline: Timeline, group_of: Callable[[Allocation], Group], own: Mapping[str, Any]
) -> MemoryTimelineRow:
    drawn = outline(timeline, group_of)
    unknown, _ = timeline.totals(lambda each: each.owner, timeline.peak_state).get("unknown", (0, 0))
    blocks = [each.block for each, _ in drawn.kept]
    whats, what = interned([_what(each) for each, _ in drawn.kept])
    stacks, stack = interned([_stack(each) for each, _ in drawn.kept])
    series: dict[str, Sequence[Entry]] = {
        "start": [block.start for block in blocks],
        "end": [timeline.events + 1 if block.end is None else block.end for block in blocks],
        "bytes": [block.bytes for block in blocks],
        "group": [group for _, group in drawn.kept],
        "what": what,
        "stack": stack,
        "groups": [group.name for group in drawn.groups],
        "bands": [group.band for group in drawn.groups],
        "whats": whats,
        "stacks": stacks,
        "edges": drawn.edges.tolist(),
        "total": drawn.total.tolist(),
        "phases": [phase.name for phase in timeline.phases],
        "phase_start": [phase.start for phase in timeline.phases],
        "phase_end": [phase.end for phase in timeline.phases],
    }
    return MemoryTimelineRow(
        **own,
        peak_gib=timeline.peak / GIB,
        peak_phase=timeline.phase_of(timeline.peak_state) or None,
        peak_state=timeline.peak_state,
        at_rest_gib=int(timeline.live[0]) / GIB,
        unknown_share=unknown / timeline.peak if timeline.peak else 0.0,
        events=timeline.events,
        allocations=len(timeline.allocations),
        drawn=len(drawn.kept),
        smallest_drawn_mib=drawn.smallest / MIB,
        series=series | {f"rest_{place}": rest.tolist() for place, rest in enumerate(drawn.rest) if rest.any()},
    )


def _what(each: Allocation) -> str:  # hovering shows it below the size
    made = f"made in {each.phase}" if each.phase else ""
    operation = f"{each.operation} of {each.phase}" if each.operation else made
    return "\n".join(filter(None, (each.what, operation)))


def _stack(each: Allocation) -> str:
    shown = [frame for frame in each.frames if frame.is_users] or list(each.frames)
    return "\n".join(map(str, shown[:STACK]))


def part_of(name: str) -> str:
    """The part of the model that a module belongs to: `blocks.3.attention.query` → `blocks.*.attention`."""
    parts = without_numbers(name).split(".")
    depth = parts.index("*") + 2 if "*" in parts else 2
    return ".".join(parts[:depth])


def _colour_name(activation: Allocation) -> str:
    """Name that the group of an activation is called after: the part of the model, or where else it was made."""
    return part_of(activation.what) or ("the loss" if activation.phase == "loss" else "the model itself")


def groups_by_owner(timeline: Timeline) -> Callable[[Allocation], Group]:
    """A group per owner; activations in several, by the parts of the model that own most of them at the peak."""
    totals = timeline.totals(lambda each: _colour_name(each) if each.owner == "activations" else None)
    named = [name for name in totals if name is not None][:NAMED_MODULES]

    def group_of(each: Allocation) -> Group:
        name = each.owner
        if name == "activations":
            name += f" of {_colour_name(each) if _colour_name(each) in named else 'other modules'}"
        return Group(name, OWNERS.index(each.owner))

    return group_of


def groups_by_size(timeline: Timeline) -> Callable[[Allocation], Group]:
    """A group for each owner with the most bytes at the peak, one for all others; owners like ours in their bands."""
    named = list(timeline.totals(lambda each: each.owner, timeline.peak_state))[:NAMED_LINES]
    bands = {owner: OWNERS.index(owner) if owner in OWNERS else 0 for owner in named}
    return lambda each: Group(each.owner, bands[each.owner]) if each.owner in bands else Group("others", 0)


def _owner_rows(timeline: Timeline, own: Mapping[str, Any]) -> Iterator[OwnerRow]:
    """Owners of the peak, the largest first, each with its largest parts."""
    state, peak = timeline.peak_state, timeline.peak

    def row(size: int, count: int, **part: Any) -> OwnerRow:
        return OwnerRow(**own, **part, mib=size / MIB, share=size / peak if peak else None, allocations=count)

    of_parts = timeline.totals(lambda each: (each.owner, _part(each)), state)
    for owner, total in timeline.totals(lambda each: each.owner, state).items():
        yield row(*total, owner=owner)
        if owner in ("activations", "temporaries"):
            parts = [(part, each) for (own_of, part), each in of_parts.items() if own_of == owner]
            for part, total in [each for each in parts if each[1][0] >= LEAST_SHARE * peak][:PARTS]:
                yield row(*total, owner=owner, **part._asdict())


class _Part(NamedTuple):
    """The part of an owner that an allocation belongs to, as columns of an `OwnerRow`."""

    module: str | None = None
    operation: str | None = None
    phase: str | None = None
    line: str | None = None


def _part(each: Allocation) -> _Part:
    if not each.phase:  # a foreign snapshot's
        return _Part(line=each.line or "no stack")
    module = part_of(each.what) or None
    if each.owner == "activations":
        outside = "loss" if each.phase == "loss" else "forward"
        return _Part(module, phase=None if module else outside)
    return _Part(module, each.operation or None, each.phase)


def _largest_rows(timeline: Timeline, own: Mapping[str, Any]) -> Iterator[AllocationRow]:
    """The largest allocations that were made while the log was kept, alike ones as one row."""

    def origin(each: Allocation) -> tuple[str, ...]:
        return each.owner, without_numbers(each.what), each.phase, each.operation, each.line

    for rank, (first, count) in enumerate(timeline.largest(origin, LARGEST), start=1):
        yield AllocationRow(
            **own,
            rank=rank,
            mib=first.block.bytes / MIB,
            count=count,
            owner=first.owner,
            module=without_numbers(first.what) if count > 1 else first.what,
            phase=first.phase or None,
            operation=first.operation or None,
            line=first.line,
        )
