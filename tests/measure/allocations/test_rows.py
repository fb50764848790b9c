"""The rows of a timeline of allocations: owners of the peak by their parts, and the largest allocations."""

from trainstep.measure.allocations.rows import groups_by_owner, timeline_rows
from trainstep.measure.allocations.timeline import Allocation, Block, Frame, Timeline, made_at
from trainstep.rows import AllocationRow, OwnerRow
from trainstep.rows.records import of_kind

LINE = Frame("/me/model.py", 7, "forward")


def allocated(owner, what, phase, operation="", mib=1, start=1, frames=()):
    return Allocation(Block(start, None, mib << 20, 0, frames), owner, what, phase, operation, frames, made_at(frames))


ALLOCATIONS = (
    allocated("activations", "blocks.0.attention.query", "forward", mib=4),
    allocated("activations", "blocks.1.attention.query", "forward", mib=4, start=2),
    allocated("activations", "", "loss", mib=3, start=3),
    allocated("activations", "", "backward", mib=2, start=4),
    allocated("temporaries", "blocks.0.attention", "backward", "Softmax", mib=6, start=5),
    allocated("temporaries", "", "backward", "NllLoss", mib=5, start=6),
    allocated("temporaries", "", "loss", start=7),
    allocated("parameters", "head.weight", "", mib=9, start=0),
)


def rows(allocations, case):
    timeline = Timeline(allocations, events=8)
    return list(timeline_rows(timeline, groups_by_owner(timeline), {**case, "environment": {"device": "a CPU"}}, {}))


def test_owners_have_their_parts_as_fields():
    owners = of_kind(rows(ALLOCATIONS, {"workload": "toy"}), OwnerRow)
    found = [(row.owner, row.module, row.operation, row.phase, row.line, row.mib, row.allocations) for row in owners]
    assert found == [
        ("activations", None, None, None, None, 13, 4),
        ("activations", "blocks.*.attention", None, None, None, 8, 2),
        ("activations", None, None, "loss", None, 3, 1),
        ("activations", None, None, "forward", None, 2, 1),  # of the model itself, whenever it ran again
        ("temporaries", None, None, None, None, 12, 3),
        ("temporaries", "blocks.*.attention", "Softmax", "backward", None, 6, 1),
        ("temporaries", None, "NllLoss", "backward", None, 5, 1),
        ("temporaries", None, None, "loss", None, 1, 1),
        ("parameters", None, None, None, None, 9, 1),
    ]
    assert [row.is_total for row in owners] == [row.module is row.phase is None for row in owners]
    assert sum(row.share for row in owners if row.is_total) == 1
    assert {(row.workload, row.environment["device"]) for row in owners} == {("toy", "a CPU")}


def test_parts_of_a_foreign_snapshot_are_lines():
    foreign = (
        allocated("activations", "", "", mib=3, frames=(LINE,)),
        allocated("activations", "", "", mib=1, start=2),
    )
    owners = of_kind(rows(foreign, {"workload": "x.pickle", "device": 0}), OwnerRow)
    assert [(row.line, row.mib) for row in owners] == [(None, 4), (str(LINE), 3), ("no stack", 1)]


def test_the_largest_allocations_say_what_made_them_and_alike_ones_are_one():
    largest = of_kind(rows(ALLOCATIONS, {"workload": "toy"}), AllocationRow)
    assert [(row.rank, row.mib, row.count, row.phase, row.operation) for row in largest[:3]] == [
        (1, 6, 1, "backward", "Softmax"),
        (2, 5, 1, "backward", "NllLoss"),
        (3, 4, 2, "forward", None),
    ]
    assert largest[2].module == "blocks.*.attention.query"
    assert len(largest) == 6, "what was there before the step is not among them"
