from dataclasses import replace

from trainstep.report.page import render
from trainstep.report.subjects import findings, make_tables
from trainstep.report.subjects.sweep import axes_of, measures_of
from trainstep.rows import row_of


def row(number, ms=10.0, status="ok", reason="", row=None, commit="a", **settings):
    values = {"number": number, "step_ms": ms, "step_low_ms": ms - 1, "step_high_ms": ms + 1, "peak_gib": ms / 8}
    case = {"command": "bench step", "steps": 7, **settings, "row": row}
    is_ok = status == "ok"
    environment = {"device": "a GPU", "commit": commit} if is_ok else {}
    rest = {"status": status, "reason": reason, "environment": environment}
    return row_of("sweep", case, values if is_ok else {"number": number}, **rest)


GRID = [
    row(2, 20.0, size="small", context=512),
    row(1, 10.0, size="small", context=64),
    row(3, 30.0, size="medium", context=64),
    row(4, size="medium", context=512, status="out of memory", reason="needed 99 GiB"),
]


def test_a_table_for_all_cases_and_one_per_axis_in_the_files_order():
    tables = {table.name: table for table in make_tables(GRID)}
    assert list(tables) == ["sweep", "sweep-by-size", "memory-by-size", "sweep-by-context", "memory-by-context"]
    assert [cells[0] for cells in tables["sweep"].texts()] == ["1", "2", "3", "4"]
    assert "steps 7" in tables["sweep"].caption
    assert tables["sweep-by-context"].columns == ["", "context 64", "context 512"]
    assert tables["sweep-by-context"].texts() == [
        ("size small", "10.0 [9.00–11.0]", "20.0 [19.0–21.0]"),
        ("size medium", "30.0 [29.0–31.0]", "out of memory"),
    ]
    assert tables["memory-by-context"].texts()[1] == ("size medium", "3.75", "out of memory")
    page = render(GRID)
    assert "needed 99 GiB" in page
    assert "4 rows, 1 without a result" in page


def test_an_axis_longer_than_its_lines_goes_down_the_table():
    (_, table, _) = make_tables(
        [row(index, float(context), context=context) for index, context in enumerate((9, 2, 5))]
    )
    assert table.columns == ["context", "all cases"]
    assert [cells[0] for cells in table.texts()] == ["2", "5", "9"]


def test_several_rows_of_a_case_are_lines_of_their_own():
    rows = [row(n, 1.0 + n, context=n * 64, row=scheme) for n in (1, 2) for scheme in ("ddp", "fsdp")]
    (axis,) = axes_of(rows)
    assert [line.name for line in axis.lines] == ["ddp", "fsdp"]


def test_predictions_are_called_so():
    rows = [row(n, 1.0 + n, context=n * 64) for n in (1, 2)]
    rows = [row_of("sweep", {**each.case, "command": "plan"}, each.values) for each in rows]
    assert measures_of(rows)[0].title == "predicted step"
    assert "predicted step (ms)" in make_tables(rows)[0].columns
    assert "times are predictions" in render(rows)


def about_sweeps(rows):
    return [each for each in findings(rows) if each.topic == "sweep"]


def test_what_has_no_result_is_counted_by_its_reason_in_the_files_order():
    rows = [row(3, status="failed"), row(1, status="out of memory"), row(2), row(4, status="out of memory")]
    (found,) = about_sweeps(rows)
    assert (found.id, found.figures) == ("sweep.without-result", {"rows": 4, "without_result": 3})
    assert ": 2 out of memory and 1 failed. Their words are in stderr.txt" in found.sentence
    assert about_sweeps(rows[1:])[0].sentence.endswith(": 2 out of memory.")
    assert about_sweeps(rows[2:3]) == []


def test_environments_are_told_by_what_differs():
    def on(number, **environment):
        return replace(row(number, context=number), environment={"device": "a GPU"} | environment)

    rows = [on(1, threads=2, commit="0123456789abcdef"), on(2, threads=4, commit="f" * 16)]
    threads, commits = about_sweeps(rows)
    assert threads.figures == {"threads": ("2", "4")}
    assert commits.figures == {"commit": ("0123456789abcdef", "f" * 16)}
    assert "different commits 0123456789ab and ffffffffffff:" in commits.sentence
    (device,) = about_sweeps([on(1), on(2, device="another GPU")])
    assert device.figures == {"device": ("a GPU", "another GPU")}
    shared = [replace(each, flags={**each.flags, "processes": n}) for n, each in enumerate(rows, start=1)]
    assert [each.figures.keys() for each in about_sweeps(shared)] == [{"commit"}], "processes share the cores"
