"""Large traces, and small files that unpack to large ones: read piece by piece, and fenced."""

import gzip
import json
import tracemalloc

import pytest

from tests.measure.profile.large import write
from tests.measure.profile.test_trace import GPU, event
from trainstep.base.errors import UsageError
from trainstep.measure.profile import json_stream
from trainstep.measure.profile.chrome import read_chrome_trace
from trainstep.measure.profile.kernels import profile_of


@pytest.mark.parametrize("piece", [1, 7, 100, 5000, 2**20])
def test_where_the_text_is_cut_does_not_matter(tmp_path, monkeypatch, piece):
    path = write(tmp_path / "trace.json", 60)
    (tmp_path / "gpu.json").write_text(json.dumps(GPU))
    whole = [read_chrome_trace(path), read_chrome_trace(tmp_path / "gpu.json")]
    monkeypatch.setattr(json_stream, "_PIECE", piece)
    assert [read_chrome_trace(path), read_chrome_trace(tmp_path / "gpu.json")] == whole
    assert len(whole[0].work) == 15


def test_objects_inside_of_events_and_texts_are_no_ends(tmp_path):
    nasty = [event("cpu_op", "}, {" * 3, 1.0 * each, 0.5, list=[{"a": 1}, {"b": [{}, {}]}]) for each in range(50)]
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": nasty, "more": [{"x": 1}, {"y": 2}]}))
    assert len(read_chrome_trace(path).ranges) == 50


def test_memory_stays_below_the_file_s_size(tmp_path, monkeypatch):
    """As objects of Python, the events of a file are eight times as large."""
    monkeypatch.setattr(json_stream, "_PIECE", 2**16)
    peaks = {}
    for count in (4_000, 8_000):
        path = write(tmp_path / f"{count}.json", count)
        tracemalloc.start()
        trace = read_chrome_trace(path)
        peaks[count] = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert len(trace.work) == count // 4
    assert peaks[8_000] - peaks[4_000] < path.stat().st_size / 2


def test_a_trace_as_the_profiler_writes_it_is_taken_apart(tmp_path):
    path = write(tmp_path / "trace.json", 4000)
    profile = profile_of(read_chrome_trace(path))
    assert (profile.steps, len(profile.kernels)) == (4, 1000)
    assert {each.operator for each in profile.kernels} == {
        "aten::mm",
        "aten::add",
        "aten::_softmax",
        "aten::copy_",
        "aten::mul",
    }


def packed(path, *parts):
    """A gzip file of (text, times) after one another."""
    with gzip.open(path, "wb", compresslevel=9) as file:
        for text, times in parts:
            for _ in range(times // 10_000):
                file.write(text * 10_000)
            file.write(text * (times % 10_000))
    return path


NESTED = [(b'{"traceEvents": [{"args": ', 1), (b"[", 30_000), (b"]", 30_000), (b"}]}", 1)]
WIDE = [(b'{"traceEvents": [{"args": [', 1), (b"[],", 100_000), (b"[]]}]}", 1)]
BESIDE = [(b'{"other": [', 1), (b"[],", 100_000), (b'[]], "traceEvents": []}', 1)]
SPACES = [(b'{"traceEvents": [', 1), (b" ", 2_000_000), (b"]}", 1)]
DIGITS = [(b'{"traceEvents": [{"ph": "X", "cat": "kernel", "name": "k", "ts": 1', 1), (b"0", 200_000), (b"}]}", 1)]


@pytest.mark.parametrize("parts", [NESTED, WIDE, BESIDE, SPACES, DIGITS])
def test_a_small_file_takes_little_memory(tmp_path, monkeypatch, parts):
    """With the fences a hundredth of what they are."""
    for name in ("LARGEST_VALUE", "_PIECE", "_ROOM"):
        monkeypatch.setattr(json_stream, name, getattr(json_stream, name) // 100)
    path = packed(tmp_path / "trace.json.gz", *parts)
    assert path.stat().st_size < 10_000
    tracemalloc.start()
    with pytest.raises(UsageError, match=r"trace\.json\.gz"):
        read_chrome_trace(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 6e6


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"traceEvents": [{"ph": "X", "cat": "kernel", "name": "k", "ts": 1' + "0" * 5000 + "}]}", "digits"),
        ('{"traceEvents": ' + "[" * 100_000, "nested"),
        ('{"traceEvents": [' + '{"a":' * 100_000, "nested"),
        ('{"traceEvents": []} {"traceEvents": []}', "more than one object"),
        ('{"traceEvents": [{} {}]}', "expected , or ]"),
        ('{"traceEvents": [{}', "cut short"),
        ('{"traceEvents": [{}]', "cut short"),
        ("{3: []}", "not JSON|without a name"),
    ],
)
def test_what_is_wrong_is_said(tmp_path, text, says):
    (tmp_path / "trace.json").write_text(text)
    with pytest.raises(UsageError, match=says):
        read_chrome_trace(tmp_path / "trace.json")


def test_half_a_surrogate_in_a_name_is_a_name(tmp_path):
    (tmp_path / "trace.json").write_text(json.dumps({"traceEvents": [event("kernel", "k\udc80", 1.0, 2.0)]}))
    assert read_chrome_trace(tmp_path / "trace.json").work[0].name == "k\udc80"
