import json
import math

import pytest

from trainstep.errors import UsageError
from trainstep.records import RecordWriter, by_case, frame, of_kind, read_records, row_of, write_whole


def record(**changes):
    base = {
        "kind": "step",
        "case": {"workload": "tiny", "batch": 4},
        "values": {"step_ms": 1.5},
        "samples": {"step": [1.0, 2.0]},
        "environment": {"torch": "2.13.0"},
    }
    return row_of(**(base | changes))


def test_what_is_written_is_read(tmp_path):
    written = [record(), record(kind="rung", status="failed", reason="it → broke"), record(values={"x_ms": None})]
    writer = RecordWriter(tmp_path / "deep" / "results.jsonl")
    for each in written:
        writer.write(each)
        assert read_records(writer.path)[-1] == each, "not on disk at once"
    writer.close()
    assert read_records(writer.path) == written
    assert of_kind(written, "rung") == [written[1]]


def test_numbers_that_json_lacks_become_null(tmp_path):
    writer = RecordWriter(tmp_path / "results.jsonl")
    writer.write(record(values={"a": math.nan, "b": math.inf}, samples={"step": [math.nan]}))
    (found,) = read_records(writer.path)
    assert found.values == {"a": None, "b": None}
    assert found.samples == {"step": [None]}
    json.loads(writer.path.read_text())  # strict JSON


def test_what_is_written_whole_is_there_or_not(tmp_path):
    path = tmp_path / "results.jsonl"
    path.write_text("before")

    def cut_short():
        yield record()
        assert path.read_text() == "before"
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_whole(path, cut_short())
    assert path.read_text() == "before"
    write_whole(path, [record(), record(kind="rung")])
    assert read_records(path) == [record(), record(kind="rung")]
    assert [each.name for each in tmp_path.iterdir()] == ["results.jsonl"]


def test_a_former_run_is_kept(tmp_path):
    path = tmp_path / "results.jsonl"
    for name in ("old", "new"):
        writer = RecordWriter(path)
        writer.write(record(case={"workload": name}))
        writer.close()
    assert read_records(path)[0].case["workload"] == "new"
    assert read_records(tmp_path / "results.previous.jsonl")[0].case["workload"] == "old"


def test_an_unwritable_folder(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="choose another folder with --out"):
        RecordWriter(tmp_path / "file" / "results.jsonl")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"kind": "step", "case": {}', "line 2: not JSON"),
        ("[1, 2]", "line 2: not a record"),
        ('{"kind": "step"}', "line 2: not a record"),
        ('{"kind": "step", "case": {}, "surprise": 1}', "line 2: not a record"),
        ('{"kind": "step", "case": 3}', "section of the wrong type"),
        ('{"kind": "step", "case": {}, "status": "great"}', "unknown status 'great'"),
    ],
)
def test_corrupt_lines_are_named(tmp_path, line, message):
    path = tmp_path / "results.jsonl"
    path.write_text('{"kind": "step", "case": {}}\n' + line + "\n")
    with pytest.raises(UsageError, match=message):
        read_records(path)


@pytest.mark.parametrize("content", [None, b"", b"\n\n", b"\xff\xfe"])
def test_files_without_results(tmp_path, content):
    path = tmp_path / "results.jsonl"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UsageError, match=r"cannot read results|holds no results"):
        read_records(path)


def test_the_frame_is_tidy():
    table = frame([record(), record(status="out of memory", reason="too big", values={})])
    assert list(table["status"]) == ["ok", "out of memory"]
    assert table["step_ms"][0] == 1.5
    assert {"workload", "batch", "torch", "kind", "reason"} <= set(table.columns)


def test_rows_by_case_keep_their_order():
    rows = [row_of("peak", {"size": size, "part": part}) for size in ("b", "a") for part in (1, 2)]
    assert by_case(rows, "part") == [rows[:2], rows[2:]]
    assert by_case(rows) == [[row] for row in rows]
