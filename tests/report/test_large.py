"""Twice as much takes twice as long: counted in calls, from traces to pages; and a page says what it leaves out."""

import json
import sys
from dataclasses import replace

import pytest

from tests.measure.profile.large import events
from trainstep.bench.profile import records_from_file
from trainstep.report.compare import compare, comparison_table, repeatability, unmatched
from trainstep.report.page import MOST_ROWS, render
from trainstep.report.tables import LONGEST
from trainstep.rows import KernelRow, ProfileRow, StepRow
from trainstep.rows.records import Times, read_records, write_whole


def calls(use):
    count = 0

    def tell(frame, event, argument):
        nonlocal count
        count += event == "call"

    sys.setprofile(tell)
    try:
        use()
    finally:
        sys.setprofile(None)
    return count


def steps(count):
    samples = {"step": [1.0, 1.1, 0.9, 1.05, 1.0, 0.95, 1.02]}
    settings = {"workload": "m", "mode": "step", "warmup": 5, "samples": samples}
    return [StepRow(context=at, times={"step": Times(1.0, 0.9, 1.1)}, **settings) for at in range(count)]


def kernels(count):
    head = ProfileRow(workload="m", precision="fp32")
    where = {"workload": "m", "precision": "fp32", "phase": "forward", "module": "m"}
    return [head] + [KernelRow(kernel=f"k{at}", family="other", ms=1.0, **where) for at in range(count)]


def compared(count, folder):
    rows = steps(count)
    comparison_table(compare(rows, rows), "")
    unmatched(rows, rows)


def passed(count, folder):
    """Each pass of a case against each would be another power of their number."""
    rows = [replace(row, context=1, repeat=row.context) for row in steps(count)]
    compare(rows, rows)
    repeatability(rows)


def written(count, folder):
    write_whole(folder / "rows.jsonl", steps(count))
    read_records(folder / "rows.jsonl")


def traced(count, folder):
    """Every kernel and operator has another name, as of a model of very many modules."""
    named = ({**each, "name": f"{each['name']}{at}"} for at, each in enumerate(events(4 * count)))
    path = folder / "trace.json"
    path.write_text(json.dumps({"traceEvents": list(named)}))
    list(records_from_file(path))


WORK = {
    "compare": compared,
    "passes of a case": passed,
    "rows on disk": written,
    "trace": traced,
    "page of steps": lambda count, folder: render(steps(count + MOST_ROWS)),
    "page of kernels": lambda count, folder: render(kernels(count + LONGEST)),
}


@pytest.mark.parametrize("work", WORK)
def test_twice_as_much_takes_twice_the_calls(tmp_path, work):
    WORK[work](10, tmp_path)  # caches, and imports
    once, twice = (calls(lambda count=count: WORK[work](count, tmp_path)) for count in (300, 600))
    assert twice < 2.6 * once


def test_a_page_of_very_many_rows_says_which_it_shows():
    page = render(steps(MOST_ROWS + 500))
    assert f"the first {MOST_ROWS:,} of {MOST_ROWS + 500:,} rows; results.jsonl has all" in page
    assert f"the first {LONGEST:,} of {MOST_ROWS:,} rows, the others in results.jsonl" in page
    assert "results.jsonl has all" not in render(kernels(MOST_ROWS + 500)), "parts of a profile stay with it"
