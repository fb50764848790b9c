"""Snapshots: written for torch's viewer, and read from files that may be anyone's."""

import os
import pickle
import pickletools

import pytest

from trainstep.base.errors import UsageError
from trainstep.base.files import LARGEST
from trainstep.measure.allocations.loading import imported_timelines
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


def test_what_is_written_is_read_again(tmp_path):
    write_snapshot(snapshot_of(TIMELINE), tmp_path / "deep" / "snapshot.pickle")
    (again,) = imported_timelines(tmp_path / "deep" / "snapshot.pickle").values()
    assert again.live.tolist() == TIMELINE.live.tolist() == [1024, 1624, 1024, 1000, 1080]
    known = [(each.owner, each.block.bytes) for each in TIMELINE.allocations]
    assert sorted((each.owner, each.block.bytes) for each in again.allocations) == sorted(known)
    assert again.allocations[-1].line == "model/block.py:7 forward"


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


class Hostile:
    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return os.mkdir, (self.mark,)


PLAIN = pickle.dumps(snapshot_of(TIMELINE), protocol=4)


@pytest.mark.parametrize("protocol", range(6))
def test_a_hostile_file_leaves_no_mark(tmp_path, protocol):
    mark, file = tmp_path / "mark", tmp_path / "hostile.pickle"
    content = snapshot_of(TIMELINE) | {"more": Hostile(str(mark))}
    file.write_bytes(pickle.dumps(content, protocol=protocol))
    with pytest.raises(
        UsageError, match=r"asks for \w+\.mkdir.*it was not run" if protocol > 1 else "as no pickle of torch does"
    ):
        imported_timelines(file)
    assert not mark.exists()
    pickle.loads(file.read_bytes())
    assert mark.exists(), "the payload would have worked"


def logged(*traces, segments=()):
    return pickle.dumps({"segments": list(segments), "device_traces": list(traces)})


FOREIGN = [
    (b"", "cut short"),
    (PLAIN[:-200], "cut short"),
    (b"PK\x03\x04 a checkpoint, not a snapshot", "starts with b'P', as no pickle of torch does"),
    (b"\x80\x04just some text", "no pickle of plain values"),
    (b"\x80\x04]r\xff\xff\xff\x0f.", "far more memory than its 9 bytes"),
    (b"\x80\x04Pout there\n.", "outside of itself"),
    (pickle.dumps([1, 2]), "Expected `object`, got `array`"),
    (pickle.dumps({"device_traces": []}), "missing required field `segments`"),
    (logged(segments=[{}]), r"missing required field `address` - at `\$\.segments\[0\]`"),
    (logged(segments=[segment(0, {"size": -1, "state": ""})]), r"`int` >= 0 - at `\$\.blocks\[0\]\[0\]\.size`"),
    (logged(7), "a list of blocks or events is in it several times, or is no list"),
    (logged([7]), r"Expected `object`, got `int` - at `\$\.events\[0\]\[0\]`"),
    (logged([event("alloc", 0, 2**70)]), r"Expected `int` <= 2814.* - at `\$\.events\[0\]\[0\]\.size`"),
    (logged([event("alloc", 0, 1, frames=3)]), r"no pickle of plain values \(TypeError\)"),
    (logged([event("alloc", 0, 1, frames=[3])]), "Expected `object`, got `int`"),
    (logged([event("alloc", 0, 1, frames=[{"line": "7"}])]), r"Expected `int`, got `str` - at `\$\[0\]\.line`"),
    (logged([event("alloc", 0, 1, frames=[{"line": 7}])]), "missing required field `filename`"),
    (logged([event("alloc", 0, 1, category=3)]), r"Expected `str . null`, got `int` - at .*category"),
    (logged([event("free_completed", 0, 1)]), "holds no history; call torch.cuda.memory._record_memory_history"),
]


@pytest.mark.parametrize(("content", "message"), FOREIGN, ids=[message for _, message in FOREIGN])
def test_foreign_files_are_a_user_s_error(tmp_path, content, message):
    (tmp_path / "foreign.pickle").write_bytes(content)
    with pytest.raises(UsageError, match=message):
        imported_timelines(tmp_path / "foreign.pickle")


def test_files_that_are_absent_or_too_large(tmp_path, monkeypatch):
    with pytest.raises(UsageError, match=r"cannot read .*No such file"):
        imported_timelines(tmp_path / "absent.pickle")
    monkeypatch.setitem(LARGEST, "pickle", 100)
    (tmp_path / "large.pickle").write_bytes(PLAIN)
    with pytest.raises(UsageError, match=r"large.pickle has .* MiB; at most 0 are read"):
        imported_timelines(tmp_path / "large.pickle")
