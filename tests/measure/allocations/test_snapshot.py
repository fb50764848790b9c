"""Snapshots: an allocator's read, and ours written for torch's viewer."""

import pickle
import pickletools

from trainstep.measure.allocations.snapshot import blocks_of, snapshot_of, with_owners, write_snapshot
from trainstep.measure.allocations.timeline import Allocation, Block, Frame, Timeline

STACK = (Frame("/site/torch/x.py", 1, "f"), Frame("/me/model/block.py", 7, "forward"))
TIMELINE = Timeline(
    (
        Allocation(Block(0, None, 1000, 4096), "parameters", "w", ""),
        Allocation(Block(0, 3, 24, 8192), "unknown", "", ""),
        Allocation(Block(1, 2, 600, 8704, STACK), "temporaries", "blocks.0", "forward", frames=STACK),
        Allocation(Block(4, None, 80, 8704, STACK), "gradients", "w", "backward", frames=STACK),
    ),
    events=4,
)
VIEWER_READS = {
    "PROTO", "FRAME", "MEMOIZE", "MARK", "STOP", "EMPTY_DICT", "EMPTY_LIST", "EMPTY_TUPLE", "APPEND", "APPENDS",
    "SETITEM", "SETITEMS", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "BINGET", "LONG_BINGET", "BININT", "BININT1",
    "BININT2", "LONG1", "BINFLOAT", "SHORT_BINUNICODE", "BINUNICODE", "NONE", "NEWTRUE", "NEWFALSE",
}  # fmt: skip
"""The opcodes that the viewer of pytorch.org/memory_viz knows."""


def event(action, address, size, **more):
    return {"action": action, "addr": address, "size": size, "stream": 0, "frames": [], **more}


def segment(address, *blocks):
    return {"device": 0, "address": address, "total_size": 4096, "stream": 0, "blocks": list(blocks)}


def block(size, state="active_allocated", **more):
    return {"size": size, "requested_size": size - 8, "state": state, "frames": [], **more}


def test_a_timeline_in_torch_s_form_has_the_same_blocks_and_owners(tmp_path):
    write_snapshot(snapshot_of(TIMELINE), tmp_path / "deep" / "snapshot.pickle")
    written = pickle.loads((tmp_path / "deep" / "snapshot.pickle").read_bytes())
    blocks, events = blocks_of(written, 0)
    again = Timeline(tuple(Allocation(each, "", "", "") for each in blocks), events)
    assert again.live.tolist() == TIMELINE.live.tolist() == [1024, 1624, 1024, 1000, 1080]
    assert str(blocks[-1].frames[-1]) == "model/block.py:7 forward"
    owners = [each["category"] for each in written["device_traces"][0][:-1]]
    assert owners == ["temporaries", "temporaries", "unknown", "gradients"], "as they are made and freed"


def test_torch_s_viewer_can_read_what_is_written(tmp_path):
    """Protocol 4, the opcodes it knows, the keys it uses, and a category named unknown, without which it fails."""
    write_snapshot(snapshot_of(TIMELINE), tmp_path / "snapshot.pickle")
    written = (tmp_path / "snapshot.pickle").read_bytes()
    operations = list(pickletools.genops(written))
    assert (operations[0][0].name, operations[0][1]) == ("PROTO", 4)
    assert {operation.name for operation, _, _ in operations} <= VIEWER_READS
    content = pickle.loads(written)
    for each in content["segments"]:
        assert {"device", "address", "total_size", "stream", "blocks"} <= set(each)
    (trace,) = content["device_traces"]
    assert "unknown" in {each["category"] for each in trace}
    for each in trace:
        assert {"action", "addr", "size", "stream", "frames"} <= set(each)
    assert [each["action"] for each in trace[:-1]] == ["alloc", "free_completed", "free_completed", "alloc"]


def test_a_snapshot_that_its_user_changes_leaves_the_next_as_it_is():
    for each in snapshot_of(TIMELINE)["device_traces"][0]:
        del each["category"]
    assert "unknown" in {each["category"] for each in snapshot_of(TIMELINE)["device_traces"][0]}


def test_blocks_of_an_allocator_s_history():
    trace = [
        event("segment_alloc", 0, 4096),
        event("alloc", 0, 512),
        event("free_requested", 1024, 256),  # made before the history
        event("free_completed", 1024, 256),
        event("free_requested", 0, 512),
        event("alloc", 1024, 64),
        event("free_completed", 0, 512),  # another stream had still used it
        event("alloc", 0, 100),
        event("oom", 0, 1 << 40),
    ]
    held = segment(0, block(512), block(512, "inactive"), block(512), block(512))
    blocks, events = blocks_of({"device_traces": [trace], "segments": [held]}, 0)
    assert events == 5
    assert {(each.start, each.end, each.bytes, each.address) for each in blocks} == {
        (0, 2, 256, 1024),
        (0, None, 504, 1536),
        (1, 3, 512, 0),
        (4, None, 64, 1024),
        (5, None, 100, 0),
    }


def test_categories_are_owners():
    trace = [event("alloc", 0, 512), event("free_requested", 0, 512), event("free_completed", 0, 512)]
    raw = {"device_traces": [[], trace], "segments": [], "newer": object()}
    blocks, events = blocks_of(raw, 1)
    timeline = Timeline(tuple(Allocation(each, "temporaries", "blocks.0", "backward", "Mm") for each in blocks), events)
    named = with_owners(raw, timeline, 1)["device_traces"][1]
    assert named[0]["frames"] == [{"filename": "blocks.0", "line": 0, "name": "Mm of backward"}]
    assert [each["category"] for each in named] == ["temporaries"] * 3 + ["unknown"]
    assert "category" not in trace[0], "the allocator's own events are left as they were"
