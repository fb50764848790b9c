"""Large snapshots, and small ones that look large: work and memory grow with the file, whatever it shares."""

import pickle
import tracemalloc

import pytest

from tests.measure.allocations.large import snapshot
from trainstep.base.errors import UsageError
from trainstep.bench.allocations import imported_records
from trainstep.measure.allocations import snapshot as reader
from trainstep.measure.allocations.loading import imported_timelines
from trainstep.measure.allocations.timeline import Frame
from trainstep.rows import AllocationRow, MemoryTimelineRow, OwnerRow
from trainstep.rows.records import of_kind


def written(path, content):
    path.write_bytes(pickle.dumps(content, protocol=4))
    return path


@pytest.mark.parametrize("shares_lists", [True, False])
def test_memory_stays_within_ten_times_the_file(tmp_path, shares_lists):
    peaks = {}
    for events in (20_000, 40_000):
        path = written(tmp_path / f"{events}.pickle", snapshot(events, shares_lists=shares_lists))
        tracemalloc.start()
        rows = list(imported_records(path))
        peaks[events] = tracemalloc.get_traced_memory()[1] - tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
        assert of_kind(rows, MemoryTimelineRow)[0].events == events
        size = path.stat().st_size
    assert peaks[40_000] - peaks[20_000] <= 10 * size / 2, (peaks, size)


def test_an_event_that_is_there_several_times_is_several_events(tmp_path):
    made = {"action": "alloc", "addr": 0, "size": 512, "frames": []}
    freed = {"action": "free_completed", "addr": 0, "size": 512, "frames": []}
    path = written(tmp_path / "s.pickle", {"segments": [], "device_traces": [[made, freed] * 3000]})
    (timeline,) = imported_timelines(path).values()
    assert (timeline.events, timeline.peak, len(timeline.allocations)) == (6000, 512, 3000)


def test_stacks_are_visited_once_however_often_they_are_referred_to(tmp_path, monkeypatch):
    made = []
    monkeypatch.setattr(reader, "Frame", lambda *args: made.append(args) or Frame(*args))
    frame = {"filename": "x" * 500 + ".py", "line": 1, "name": "f"}
    deep = [frame] * 3000
    log = [{"action": "alloc", "addr": each, "size": 1, "frames": deep} for each in range(3000)]
    path = written(tmp_path / "s.pickle", {"segments": [], "device_traces": [log]})
    (timeline,) = imported_timelines(path).values()
    assert timeline.peak == 3000
    assert len(made) == 1
    assert len(of_kind(list(imported_records(path)), AllocationRow)) == 1


LOG = [{"action": "alloc", "addr": each, "size": 1} for each in range(500)]
BLOCKS = [{"size": 1, "state": "inactive"} for _ in range(500)]
SEGMENTS = [{"device": 0, "address": each, "blocks": BLOCKS} for each in range(500)]


@pytest.mark.parametrize(("segments", "logs"), [([], [LOG] * 500), (SEGMENTS, [LOG]), (SEGMENTS[:1] * 500, [LOG])])
def test_what_allocators_never_share_is_refused(tmp_path, segments, logs):
    path = written(tmp_path / "s.pickle", {"segments": segments, "device_traces": logs})
    assert path.stat().st_size < 40_000
    with pytest.raises(UsageError, match="is in it several times"):
        imported_timelines(path)


@pytest.mark.parametrize("options", [{}, {"devices": 8, "device": 3}, {"shares_lists": False}, {"stacks": 1}])
def test_the_rows_of_a_large_history_add_up(tmp_path, options):
    rows = list(imported_records(written(tmp_path / "s.pickle", snapshot(8000, **options))))
    (timeline,), owners = of_kind(rows, MemoryTimelineRow), of_kind(rows, OwnerRow)
    assert (timeline.events, timeline.device) == (8000, options.get("device", 0))
    assert sum(row.mib for row in owners) / 1024 == pytest.approx(timeline.peak_gib)
    assert sum(row.allocations for row in owners) <= timeline.allocations
    assert timeline.drawn < timeline.allocations
    assert max(timeline.series["total"]) == round(timeline.peak_gib * 2**30)
