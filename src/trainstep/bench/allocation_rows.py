"""A timeline of allocations as rows: what the page draws, who owns the peak, and the largest allocations."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

from trainstep.blocks import without_numbers
from trainstep.kinds import row_of
from trainstep.measure.allocations.outline import Group, interned, outline
from trainstep.measure.allocations.timeline import Allocation, Frame, Timeline, bytes_by
from trainstep.measure.memory import GIB, MIB
from trainstep.records import Row, Scalar

BANDS = ("parameters", "optimizer state", "batch", "unknown", "gradients", "activations", "temporaries")
"""Owners from the lowest up: what stays lies below what comes and goes."""
NAMED_MODULES = 4
"""Modules whose activations have a colour of their own."""
NAMED_LINES = 7
"""The same for the lines of a foreign snapshot."""
PARTS = 5
"""Rows per owner beside its total."""
LEAST_SHARE = 0.001
"""Parts below this share of the peak have no row."""
LARGEST = 12
"""Rows of the largest allocations."""
STACK = 8
"""Frames of a stack that are shown."""


def timeline_rows(
    timeline: Timeline,
    group_of: Callable[[Allocation], Group],
    case: Mapping[str, Scalar],
    extra: Mapping[str, Scalar],
    environment: Mapping[str, Scalar],
) -> Iterator[Row]:
    """The timeline, who owns its peak, and its largest allocations.

    Args:
        group_of: what is drawn alike.
        case, environment: of every row.
        extra: more values of the timeline's row.
    """
    yield _timeline_record(timeline, group_of, case, extra, environment)
    at_peak = timeline.alive(timeline.peak_state)
    for row in _owners(at_peak, timeline.peak):
        yield row_of("owner", {**case, **row[0]}, row[1], environment=environment)
    for row in _largest(timeline):
        yield row_of("allocation", {**case, **row[0]}, row[1], environment=environment)


def _timeline_record(
    timeline: Timeline,
    group_of: Callable[[Allocation], Group],
    case: Mapping[str, Scalar],
    extra: Mapping[str, Scalar],
    environment: Mapping[str, Scalar],
) -> Row:
    drawn = outline(timeline, group_of)
    peak, unknown = timeline.peak_state, bytes_by(timeline.alive(timeline.peak_state), lambda each: each.owner)
    values: dict[str, Scalar] = {
        "peak_gib": timeline.peak / GIB,
        "peak_phase": timeline.phase_of(peak) or None,
        "peak_state": peak,
        "at_rest_gib": int(timeline.live[0]) / GIB,
        "unknown_share": unknown.get("unknown", 0) / timeline.peak if timeline.peak else 0.0,
        "events": timeline.events,
        "allocations": len(timeline.allocations),
        "drawn": len(drawn.kept),
        "smallest_drawn_mib": drawn.smallest / MIB,
        **extra,
    }
    blocks = [each.block for each, _ in drawn.kept]
    whats, what = interned([_what(each) for each, _ in drawn.kept])
    stacks, stack = interned([_stack(each.frames) for each, _ in drawn.kept])
    series: dict[str, Sequence[Scalar]] = {
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
    for place, rest in enumerate(drawn.rest):
        if rest.any():
            series[f"rest_{place}"] = rest.tolist()
    return row_of("memory-timeline", case, values, environment=environment, series=series)


def _what(each: Allocation) -> str:
    """What hovering says below the size."""
    made = f"made in {each.phase}" if each.phase else ""
    operation = f"{each.operation} of {each.phase}" if each.operation else made
    return "\n".join(filter(None, (each.what, operation)))


def _stack(frames: Sequence[Frame]) -> str:
    shown = [frame for frame in frames if frame.is_users] or list(frames)
    return "\n".join(map(str, shown[:STACK]))


def part_of(name: str) -> str:
    """The part of the model that a module belongs to: `blocks.3.attention.query` → `blocks.*.attention`."""
    parts = without_numbers(name).split(".")
    depth = parts.index("*") + 2 if "*" in parts else 2
    return ".".join(parts[:depth])


def _maker(activation: Allocation) -> str:
    """What made an activation, in words."""
    return part_of(activation.what) or ("the loss" if activation.phase == "loss" else "the model itself")


def groups_by_owner(timeline: Timeline) -> Callable[[Allocation], Group]:
    """A group per owner; activations in several, by the parts of the model that own most of them at the peak."""
    activations = [each for each in timeline.allocations if each.owner == "activations"]
    named = list(bytes_by(activations, _maker))[:NAMED_MODULES]

    def group_of(each: Allocation) -> Group:
        band = BANDS.index(each.owner)
        if each.owner != "activations":
            return Group(each.owner, band)
        return Group(f"activations of {_maker(each) if _maker(each) in named else 'other modules'}", band)

    return group_of


def groups_by_size(timeline: Timeline) -> Callable[[Allocation], Group]:
    """A group for each owner with the most bytes at the peak, one for all others; owners like ours in their bands."""
    named = list(bytes_by(timeline.alive(timeline.peak_state), lambda each: each.owner))[:NAMED_LINES]
    bands = {owner: BANDS.index(owner) if owner in BANDS else 0 for owner in named}
    return lambda each: Group(each.owner, bands[each.owner]) if each.owner in bands else Group("others", 0)


_Columns = tuple[dict[str, Scalar], dict[str, Scalar]]


def _owners(at_peak: Sequence[Allocation], peak: int) -> list[_Columns]:
    """Owners of the peak, the largest first, each with its largest parts."""

    def row(owner: str, part: str, members: Sequence[Allocation]) -> _Columns:
        size = sum(each.block.bytes for each in members)
        values: dict[str, Scalar] = {
            "mib": size / MIB, "share": size / peak if peak else None, "allocations": len(members)
        }  # fmt: skip
        return {"owner": owner, "part": part}, values

    rows = []
    for owner in bytes_by(at_peak, lambda each: each.owner):
        own = [each for each in at_peak if each.owner == owner]
        rows.append(row(owner, "all", own))
        if owner in ("activations", "temporaries"):
            key = partial(_part_and_phase, owner)
            parts = [part for part, size in bytes_by(own, key).items() if size >= LEAST_SHARE * peak]
            rows += [row(owner, part, [each for each in own if key(each) == part]) for part in parts[:PARTS]]
    return rows


def _part_and_phase(owner: str, each: Allocation) -> str:
    if not each.phase:  # a foreign snapshot's
        return each.line or "no stack"
    if owner == "activations":
        return _maker(each)
    made_in = " of ".join(filter(None, (each.operation, each.phase)))
    return f"{part_of(each.what)}, {made_in}" if each.what else made_in


def _largest(timeline: Timeline) -> list[_Columns]:
    """The largest allocations that were made while the log was kept, alike ones as one row."""
    alike: dict[tuple[Scalar, ...], list[Allocation]] = {}
    for each in timeline.allocations:
        if each.block.start:
            key = (each.block.bytes, each.owner, without_numbers(each.what), each.phase, each.operation, each.line)
            alike.setdefault(key, []).append(each)
    ranked = sorted(alike.values(), key=lambda group: (-group[0].block.bytes, group[0].block.start))
    rows: list[_Columns] = []
    for rank, group in enumerate(ranked[:LARGEST], start=1):
        first = group[0]
        values: dict[str, Scalar] = {
            "mib": first.block.bytes / MIB,
            "count": len(group),
            "owner": first.owner,
            "module": without_numbers(first.what) if len(group) > 1 else first.what,
            "made_in": f"{first.phase}: {first.operation}" if first.operation else first.phase,
            "line": first.line,
        }
        rows.append(({"rank": rank}, values))
    return rows
