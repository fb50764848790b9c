"""Rows on disk: what is written is read, what is corrupt is named, and columns are the kind's."""

import gc
import json
import math
import resource

import pytest

from trainstep.base.errors import UsageError
from trainstep.rows import ChangeRow, PeakRow, StepRow, SweepRow, records, row_of
from trainstep.rows.records import (
    RecordWriter,
    SoFar,
    Times,
    belonging,
    by_case,
    frame,
    make_row,
    of_kind,
    read_records,
    write_whole,
)


def record(**changes):
    step = {
        "workload": "tiny",
        "batch": 4,
        "times": {"step": Times(1.5)},
        "samples": {"step": [1.0, 2.0]},
        "environment": {"torch": "2.13.0"},
    }
    return StepRow(**(step | changes))


def test_what_is_written_is_read(tmp_path):
    written = [
        record(),
        ChangeRow(change="it", status="failed", reason="it → broke"),
        record(times={}, samples={}),
        record(times={"step": Times(1.5, 1.25, 1.75, 1.5, 0.25, 1.0, 2.0, 0), "wait": Times(0.5)}, tokens_per_s=8.0),
    ]
    writer = RecordWriter(tmp_path / "as" / "deep" / "results.jsonl")
    for each in written:
        writer.write(each)
        assert read_records(writer.path)[-1] == each, "not on disk at once"
    writer.close()
    assert read_records(writer.path) == written
    assert "it → broke" in writer.path.read_text(encoding="utf-8"), "for people, too"
    assert of_kind(written, ChangeRow) == [written[1]]


@pytest.mark.parametrize("value", [123456.0, 1.23456, 0.00123456, -9.87654e-9])
def test_six_digits_of_a_number_survive(tmp_path, value):
    """More than any clock here has, and what a ratio of two rows is made from."""
    write_whole(tmp_path / "rows", [record(times={"step": Times(value)}, samples={"step": [value]})])
    (found,) = read_records(tmp_path / "rows")
    assert found.times["step"].median == found.samples["step"][0] == value
    write_whole(tmp_path / "rows", [record(samples={"step": [value * (1 + 1e-9)]})])
    assert read_records(tmp_path / "rows")[0].samples["step"] == [value], "digits that no clock has are not written"


def test_rows_that_belong_to_another_only_add_to_its_case():
    head = StepRow(workload="m", batch=4)
    rows = [
        PeakRow(workload="m", batch=4, context=8),
        PeakRow(workload="m", batch=4),
        PeakRow(workload="m", batch=2, context=8),
        PeakRow(workload="m"),
        StepRow(workload="m", batch=4),
    ]
    assert belonging(rows, PeakRow, head) == rows[:2]


def test_columns_are_the_kind_s():
    row = record(times={"step": Times(1.5, 1.25, 1.75)})
    assert row.case == {"workload": "tiny", "batch": 4}
    assert row.values == {"step_ms": 1.5, "step_low_ms": 1.25, "step_high_ms": 1.75}
    assert make_row(StepRow, row.case, row.values, samples=row.samples, environment=row.environment) == row
    with pytest.raises(ValueError, match="no 'surprise' among its values"):
        make_row(StepRow, row.case, {"surprise": 1})
    with pytest.raises(ValueError, match="no 'step_ms' among its case"):
        make_row(StepRow, {"step_ms": 1}, {})
    with pytest.raises(ValueError, match="'change': Object missing required field `change`"):
        row_of("change", row.case, {})


@pytest.mark.parametrize(
    ("kind", "do"),
    [("rung", "climb it"), ("control", "climb it"), ("script rung", "climb it"), ("checkpointing", "measure it")],
)
def test_a_kind_of_an_earlier_version_ends_in_one_line_that_says_what_to_do(tmp_path, kind, do):
    path = tmp_path / "results.jsonl"
    path.write_text(json.dumps({"kind": kind, "case": {"workload": "tiny"}}) + "\n")
    with pytest.raises(UsageError, match=f"line 1: a row of kind '{kind}', which versions before .* {do} again"):
        read_records(path)


def test_numbers_that_json_lacks_become_null(tmp_path):
    writer = RecordWriter(tmp_path / "results.jsonl")
    writer.write(record(times={}, utilisation=math.nan, tokens_per_s=math.inf, samples={"step": [math.nan]}))
    (found,) = read_records(writer.path)
    assert (found.utilisation, found.tokens_per_s, found.values) == (None, None, {})
    assert found.samples == {"step": [None]}
    line = json.loads(writer.path.read_text())  # strict JSON
    assert line["values"] == {"utilisation": None, "tokens_per_s": None}


def test_a_whole_number_stays_one_where_its_field_is_a_float(tmp_path):
    write_whole(tmp_path / "rows", [record(tokens_per_s=8, utilisation=8.0)])
    (found,) = read_records(tmp_path / "rows")
    assert [type(each) for each in (found.tokens_per_s, found.utilisation)] == [int, float]


@pytest.mark.parametrize("several", [(1, 3), (0.5,), ("one", 2)])
def test_columns_of_several_numbers_are_read(tmp_path, several):
    row = SweepRow(command="bench collectives", flags={}, measured={"wrong_ranks": several})
    write_whole(tmp_path / "results.jsonl", [row])
    assert read_records(tmp_path / "results.jsonl") == [row]


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
    write_whole(path, [record(), ChangeRow(change="it")])
    assert read_records(path) == [record(), ChangeRow(change="it")]
    assert [each.name for each in tmp_path.iterdir()] == ["results.jsonl"]


def test_a_former_run_is_kept_and_starts_that_write_no_row_leave_it(tmp_path):
    path = tmp_path / "results.jsonl"
    for name in ("old", "new"):
        writer = RecordWriter(path)
        writer.write(record(workload=name))
        writer.close()
    for _ in range(2):
        RecordWriter(path).close()
    assert sorted(each.name for each in tmp_path.iterdir()) == ["results.jsonl", "results.previous.jsonl"]
    writer = RecordWriter(path)
    writer.write(SoFar([]))
    writer.close()
    writer.close()
    RecordWriter(path)  # killed: it is not closed
    assert read_records(path)[0].case["workload"] == "new"
    assert read_records(tmp_path / "results.previous.jsonl")[0].case["workload"] == "old"


def test_a_file_that_an_editor_marked_as_utf_8_is_read(tmp_path):
    path = tmp_path / "results.jsonl"
    write_whole(path, [record(), record()])
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert read_records(path) == [record(), record()]


@pytest.mark.parametrize("times", [[True] * 7, [1.0, False], [1, True]])
def test_samples_that_are_true_or_false_are_no_numbers(tmp_path, times):
    path = tmp_path / "results.jsonl"
    write_whole(path, [record(samples={"step": times})])
    with pytest.raises(UsageError, match=r"line 1: step among its samples is .*Expected `float \| null`, got `bool`"):
        read_records(path)
    write_whole(path, [record(series={"kept": times})])
    assert list(read_records(path)[0].series["kept"]) == times


def test_an_empty_file_is_not_rotated(tmp_path):
    path = tmp_path / "results.jsonl"
    (tmp_path / "results.previous.jsonl").write_text("good")
    path.write_text("")
    writer = RecordWriter(path)
    writer.write(record())
    assert (tmp_path / "results.previous.jsonl").read_text() == "good"
    assert read_records(path) == [record()]


def test_rows_so_far_stand_until_a_row_of_their_case_comes(tmp_path):
    writer = RecordWriter(tmp_path / "results.jsonl")

    def there():
        assert writer.rows == read_records(writer.path)
        return [(row.workload, row.tokens_per_s) for row in writer.rows]

    writer.write(record(workload="before", tokens_per_s=1.0))
    writer.write(SoFar([record(workload=name, tokens_per_s=1.0) for name in "ab"]))
    assert there() == [("before", 1.0), ("a", 1.0), ("b", 1.0)]
    writer.write(SoFar([record(workload=name, tokens_per_s=2.0) for name in "abc"]))
    assert there() == [("before", 1.0), ("a", 2.0), ("b", 2.0), ("c", 2.0)]
    writer.write(record(workload="b", tokens_per_s=3.0))
    assert there() == [("before", 1.0), ("b", 3.0), ("a", 2.0), ("c", 2.0)]
    writer.write(record(workload="c", tokens_per_s=3.0))
    writer.write(record(workload="a", tokens_per_s=3.0))
    writer.write(record(workload="after", tokens_per_s=4.0))
    assert there() == [("before", 1.0), ("b", 3.0), ("c", 3.0), ("a", 3.0), ("after", 4.0)]
    writer.close()
    assert [each.name for each in tmp_path.iterdir()] == ["results.jsonl"]


@pytest.fixture
def nearly_full():
    """No file may have more than 1000 bytes, as on a disk that is nearly full."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.usefixtures("nearly_full")
def test_a_full_disk_is_said_and_leaves_whole_rows(tmp_path):
    writer = RecordWriter(tmp_path / "results.jsonl")
    writer.write(record())
    for long in (record(reason="x" * 900), SoFar([record(reason="x" * 900)])):
        with pytest.raises(UsageError, match=r"cannot write .*: File too large; the 1 rows before are there"):
            writer.write(long)
        assert read_records(writer.path) == [record()] == writer.rows
    writer.close()


def test_a_row_after_one_that_the_disk_had_no_room_for_follows_those_before(tmp_path, monkeypatch):
    writer = RecordWriter(tmp_path / "results.jsonl")
    writer.write(record())

    def half(file, data):
        file.write(data[: len(data) // 2])
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(records, "write_all", half)
        with pytest.raises(UsageError, match="No space left on device"):
            writer.write(record(workload="lost"))
    writer.write(record(workload="later"))
    writer.close()
    assert [row.workload for row in read_records(writer.path)] == ["tiny", "later"]
    assert b"\0" not in writer.path.read_bytes()


def test_an_unwritable_folder(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="choose another folder with --out"):
        RecordWriter(tmp_path / "file" / "results.jsonl")
    with pytest.raises(UsageError, match="choose another folder with --out"):
        write_whole(tmp_path / "file" / "results.jsonl", [record()])


def test_folders_on_the_way_are_made(tmp_path):
    write_whole(tmp_path / "a" / "b" / "results.jsonl", [record()])
    write_whole(tmp_path / "a" / "b" / "results.jsonl", [record()])
    assert read_records(tmp_path / "a" / "b" / "results.jsonl") == [record()]


@pytest.mark.parametrize("collects", [True, False])
def test_reading_looks_for_no_circles_and_leaves_the_collector_as_it_was(tmp_path, collects):
    write_whole(tmp_path / "rows", [record(batch=batch) for batch in range(2000)])
    collected = []
    gc.callbacks.append(lambda phase, _: collected.append(phase))
    before = gc.isenabled()
    try:
        (gc.enable if collects else gc.disable)()
        collected.clear()
        read_records(tmp_path / "rows")
        assert (len(collected) <= 2, gc.isenabled()) == (True, collects), collected
        with pytest.raises(UsageError):
            read_records(tmp_path / "none")
        assert gc.isenabled() is collects
    finally:
        gc.callbacks.pop()
        (gc.enable if before else gc.disable)()


def test_a_folder_stands_for_the_results_in_it(tmp_path):
    """That of all launches stands for the newest."""
    for number in (1, 2):
        write_whole(tmp_path / f"0{number}-train" / "results.jsonl", [record()] * number)
    with pytest.raises(UsageError, match=r"cannot read results from .*results\.jsonl"):
        read_records(tmp_path)
    (tmp_path / "latest").symlink_to("02-train")
    assert [len(read_records(tmp_path / name)) for name in ("01-train", "latest", "")] == [1, 2, 2]


@pytest.mark.parametrize("content", [None, b"", b"\n\n", b"\xff\xfe"])
def test_files_without_results(tmp_path, content):
    path = tmp_path / "results.jsonl"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UsageError, match=r"holds no results|cannot read results|line 1: .utf-8. codec"):
        read_records(path)


def test_the_frame_is_tidy():
    table = frame([record(), record(status="out of memory", reason="too big", times={})])
    assert list(table["status"]) == ["ok", "out of memory"]
    assert table["step_ms"][0] == 1.5
    assert {"workload", "batch", "torch", "kind", "reason"} <= set(table.columns)


def test_rows_by_case_keep_their_order():
    rows = [PeakRow(workload=size, context=context) for size in ("b", "a") for context in (1, 2)]
    assert by_case(rows, "context") == [rows[:2], rows[2:]]
    assert by_case(rows) == [[row] for row in rows]


@pytest.mark.parametrize(
    "name",
    [
        "a\u2028b",
        "a\x85b\x0bc\x1dd",
        "lone \udc80",
        "first \ud800",
        "last \udfff",
        "tab\there",
        "new\nline",
        "x\x1b[31m",
    ],
)
def test_any_name_is_written_and_read_again(tmp_path, name):
    """U+2028 and its like end lines for `str.splitlines`, and no encoding has lone surrogates."""
    write_whole(tmp_path / "rows", [record(workload=name), record()])
    assert [row.workload for row in read_records(tmp_path / "rows")] == [name, "tiny"]


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ('{"kind": "step", "case": {}', "not JSON"),
        ("[1, 2]", "not a row"),
        ('{"kind": "step"}', "not a row"),
        ('{"kind": "step", "case": {}, "surprise": 1}', "not a row"),
        ('{"kind": "step", "case": 3}', "section of the wrong type"),
        ('{"kind": "step", "case": {}, "status": "great"}', "status is 'great': Invalid enum value"),
        ('{"kind": "great", "case": {}}', "unknown kind of row 'great'"),
        ('{"kind": "step", "case": {"size": 1}}', "no 'size' among its case"),
        ('{"kind": "step", "case": {}, "values": {"first_step_ms": 1, "first_step_low_ms": 1}}', "no 'first_step_low"),
        ('{"kind": "step", "case": {}, "values": {"peak_gib": 1, "wait_ms_max_ms": 1}}', "no 'wait_ms_max_ms'"),
        ('{"kind": "step", "case": {"workload": {"a": 1}}}', "workload"),
        (
            '{"kind": "step", "case": {"batch": "four"}}',
            r"batch is 'four': Expected `int \| null`, got `str`; expected",
        ),
        ('{"kind": "step", "case": {"batch": 4.5}}', r"batch is 4.5: Expected `int \| null`, got `float`"),
        ('{"kind": "step", "case": {"batch": true}}', "batch is True: Expected"),
        ('{"kind": "step", "case": {}, "values": {"peak_gib": [1, 2]}}', r"peak_gib is \[1, 2\]: Expected `float"),
        ('{"kind": "profile", "case": {}, "values": {"notes": ["one", 2]}}', "notes is .*Expected `str`, got `int`"),
        ('{"kind": "sweep", "case": {"command": "plan", "own": {}}, "values": {}}', "own among its .* is {}: Expected"),
        ('{"kind": "step", "case": {}, "values": {"peak_gib": NaN}}', "values.peak_gib is nan; expected a finite"),
        ('{"kind": "step", "case": {}, "values": {"peak_gib": 1e999}}', "values.peak_gib is inf; expected a finite"),
        (
            '{"kind": "step", "case": {}, "values": {"tokens": 1' + "0" * 30 + "}}",
            "expected a finite number of 64 bits",
        ),
        ('{"kind": "step", "case": {}, "values": {"tokens": 1' + "0" * 5000 + "}}", "digits"),
        ('{"kind": "step", "case": {}, "values": {"step_ms": "fast"}}', "step among its times is .*'fast'"),
        ('{"kind": "step", "case": {}, "samples": {"step": [1, NaN]}}', "samples.step.1 is nan"),
        ('{"kind": "step", "case": {}, "samples": {"step": [1, "2"]}}', "step among its samples is .*got `str`"),
        ('{"kind": "step", "case": {}, "samples": {"step": 3}}', "step among its samples is 3: Expected `array`"),
        ('{"kind": "step", "case": {}, "series": {"loss": [[1]]}}', "loss among its series is"),
        ('{"kind": "step", "case": {}, "environment": {"torch": []}, "reason": 3}', "reason"),
        ('{"kind": "step", "case": {}, "environment": {"torch": {}}}', "torch among its environment is {}"),
        ('{"kind": "step", "case": ' + '{"a":' * 100_000 + "1" + "}" * 100_001, "nested"),
        ('{"kind": "change", "case": {"change": 3}}', "change"),
        ('{"kind": "ceiling", "case": {"what": "copy"}}', "'what' among its case; .* this version of trainstep"),
        (
            '{"kind": "ceiling", "case": {"what": "copy"}, "environment": {"commit": "0123abc"}}',
            "the version that wrote it .commit 0123abc.",
        ),
    ],
)
def test_lines_that_are_no_rows_are_named(tmp_path, line, says):
    path = tmp_path / "results.jsonl"
    path.write_text('{"kind": "step", "case": {}}\n' + line + "\n")
    with pytest.raises(UsageError, match=rf"results\.jsonl, line 2: .*{says}"):
        read_records(path)
