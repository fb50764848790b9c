"""What the report says of a script's ladder."""

import dataclasses

from tests.report.changes import carried
from trainstep.report.page import Report, render
from trainstep.report.subjects import make_tables
from trainstep.report.subjects.ladder import ladder
from trainstep.rows import FINAL, PATCHED, ChangeRow, ScriptRow
from trainstep.rows.records import Times


def row(change, ms=None, **more):
    times = {"times": {"step": Times(ms)}, "n": 20, "samples": {"step": [ms]}} if ms else {}
    line = carried(change) | ({"where": None} if "code" in more else {})
    return ChangeRow(**{"workload": "train.py", "change": change, "between_runs": True, **line, **times, **more})


def ratio(name, value, width=0.05):
    return {name: value, f"{name}_low": value - width, f"{name}_high": value + width}


BASELINE = row("baseline", 10.0, verdict="baseline", accepted=True, gradient_error=0.0, error_budget=1e-6)
FUSED = row(
    *("fused optimizer", 5.0),
    **ratio("speedup", 2.0),
    verdict="faster",
    accepted=True,
    runs=2,
    code="fused=True",
    gradient_error=1e-7,
    error_budget=1e-6,
    moved_error=0.1,
)
WRONG = row("compiled model", status="wrong", verdict="wrong", reason="the gradients off by 0.3", gradient_error=0.3)
TOP = row(FINAL, 4.0, **ratio("speedup", 2.5), verdict="faster", accepted=True, runs=2)
PATCH = row(PATCHED, 4.1, **ratio("speedup", 2.4), verdict="faster", accepted=True, runs=2)


def found(*rows):
    return {each.id: each for each in Report(list(rows)).findings}


def test_what_was_kept_is_proven_with_its_lines():
    finding = found(BASELINE, FUSED, WRONG)["gain.script"]
    assert (finding.figures["speedup"], finding.figures["changes"]) == (2.0, ("fused optimizer",))
    assert found(BASELINE, FUSED)["gain.line"].sentence == "fused optimizer: fused=True"


def test_the_top_against_the_script_as_it_is_counts_where_it_was_measured():
    assert found(BASELINE, FUSED, TOP)["gain.script"].figures["speedup"] == 2.5
    open_ = row(FINAL, 4.0, **ratio("speedup", 1.02), verdict="inconclusive", accepted=True)
    assert "gain.script" not in found(BASELINE, FUSED, open_)
    assert "gain.script_open" in found(BASELINE, FUSED, open_)


def test_a_patch_is_told_where_it_holds():
    assert found(BASELINE, FUSED, PATCH)["gain.patch"].figures["speedup"] == 2.4
    slower = row(PATCHED, 11.0, **ratio("speedup", 0.9), verdict="slower")
    assert "gain.patch" not in found(BASELINE, FUSED, slower)


def test_nothing_kept_and_nothing_judged():
    assert "gain.script_none" in found(BASELINE, WRONG)
    busy = ScriptRow(
        workload="train.py",
        times={"step": Times(1.0), "other": Times(1.0)},
        load=17.0,
        cpu_share=0.12,
        environment={"cores": 2},
    )
    open_ = row("fused optimizer", 9.0, **ratio("gain", 0.9, 0.3), verdict="inconclusive")
    said = found(BASELINE, open_, busy)["gain.script_none"].sentence
    assert "fused optimizer (0.60–1.20) (load 17.0 on 2 cores, the process had 12% of the CPU" in said
    failed = row("baseline", status="failed", verdict="not reproducible", reason="it starts from other weights")
    assert not {name for name in found(failed) if name.startswith("gain.")}


def test_a_wrong_rung_has_its_reason_and_no_time():
    (table,) = make_tables([BASELINE, FUSED, WRONG], "terminal")
    titles = list(table.columns)
    cells = {each.key: each.cells for each in table.rows}
    wrong = cells["compiled model"]
    assert wrong[titles.index("verdict")].plain == "wrong: the gradients off by 0.3"
    assert wrong[titles.index("step (ms) [95 %]")].value is None
    assert cells["fused optimizer"][titles.index("verdict")].plain == "accepted"


def test_the_page_has_a_section_with_budgets():
    section = ladder([BASELINE, FUSED, WRONG])
    assert section is not None
    assert len(section.blocks) == 2
    assert ladder([]) is None


def test_what_no_second_epoch_was_seen_of_is_said():
    until = " Proven for the first 30 updates of the script; the loader has not begun a second epoch."
    first = dataclasses.replace(FUSED, updates=30, in_first_epoch=True)
    assert found(BASELINE, first)["gain.script"].sentence.endswith(f"within their budgets.{until}")
    assert found(BASELINE, first, TOP)["gain.script"].sentence.endswith(until)
    later = dataclasses.replace(first, in_first_epoch=False)
    assert found(BASELINE, later)["gain.script"].sentence.endswith(" Proven for the first 30 updates of the script.")
    whole = dataclasses.replace(later, is_whole=True)
    assert found(BASELINE, whole)["gain.script"].sentence.endswith(" Proven for all 30 updates of the script.")
    assert "of 30 updates, in one epoch" in render([BASELINE, first])
    assert "in one epoch" not in render([BASELINE, later])
