"""The answer in a terminal: at most 25 lines of 80 columns, the verdict in the first three, bars to one scale."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from tests.report import sample
from tests.report.test_findings import rung, step
from tests.report.test_summary import kernel, profile
from tests.report.test_verdict import again, habit, kernels, lines, mib, ranks, script, waits
from trainstep.report.answer import LINES, WIDTH, Launch, Try, answer
from trainstep.report.subjects import findings
from trainstep.rows import StepRow
from trainstep.rows.records import read_records

RESULTS = Path(__file__).parents[2] / "docs" / "results"
LAUNCH = Launch(
    "trainstep run · train.py",
    "Written to results/run/03-train: report.html, summary.json, results.jsonl, tables/",
    prove="trainstep run --ladder --patch fix.diff python train.py",
    tries=[Try("model.compile()", 1.17), Try("AdamW(…, fused=True)", 1.2, "optimizer"), Try("third()", 1.15)],
)
ROWS = {
    "a script": [replace(script(data=42.0, forward=50.0, optimizer=8.0), peak_gib=0.0121, samples_per_step=8.0)],
    "a leak": [replace(script(), series=mib(30.0), keeps=("train.py:12", "train.py:13"))],
    "a GPU's": [*waits(50.0), again(30), habit(1.0)],
    "code": lines(60.0),
    "ranks": ranks(150.0),
    "a profile": kernels(matmul=0.5, softmax=0.2, elementwise=0.3),
    "an analysis": sample.cpu_analysis(),
    "an analysis on a GPU": sample.h200_analysis(),
    "a failure": [replace(script(), times={}, status="failed", reason="no step of it could be timed" * 9)],
    **{path.stem: read_records(path) for path in sorted(RESULTS.glob("*.jsonl"))},
}


def told(rows, launch=LAUNCH, width=WIDTH):
    return [line.plain for line in answer(rows, findings(rows), launch, width)]


@pytest.mark.parametrize("name", ROWS)
def test_an_answer_fits_a_terminal_and_begins_with_its_verdict(name):
    said = told(ROWS[name])
    assert len(said) <= LINES
    assert max(map(len, said)) <= WIDTH
    assert said[1] == ""
    assert said[2].strip()
    assert said[-1].strip(), "no empty line at the end"


def test_a_script_s_answer_says_what_to_do_and_how_to_prove_it():
    said = told(ROWS["a script"])
    assert said[2] == " DATA-BOUND   42% of each step waits for the DataLoader at train.py:39"
    assert said[3] == " Step 100 ms  [100–100]   10.0 steps/s   80.0 samples/s   peak 12.4 MiB"
    bars = {line[3:23].strip(): line.count("█") for line in said[5:8]}
    assert bars == {"data wait": 16, "forward": 20, "optimizer": 3}
    assert said[5].endswith(" 42%   train.py:39")
    assert told([*ROWS["a script"], profile(forward=1.0), kernel("forward", "m", 1.0)])[5:8] == said[5:8]
    assert [line.split()[0] for line in said[10:13]] == ["1", "2", "3"]
    assert said[10].endswith("up to 1.7×")
    assert said[11].endswith("about 1.2×")
    assert said[12].endswith("about 1.1×"), "no change of the optimizer gains more than the optimizer's 8%"
    assert "trainstep run --ladder --patch fix.diff python train.py" in said[15]
    assert said[-3].startswith(" no sync points")
    assert said[-2].startswith(" Written to results/run/03-train: report.html")


def test_a_verdict_without_enough_steps_asks_for_no_ladder():
    assert not any("--ladder" in line for line in told([replace(ROWS["a script"][0], n=3)]))


def test_what_does_not_fit_is_counted_unless_v_prints_it():
    assert any(line.endswith("more findings: -v") for line in told(ROWS["h200-profile-2.7B"]))
    assert not any("-v" in line for line in told(ROWS["h200-profile-2.7B"], replace(LAUNCH, is_brief=False)))


def test_memory_that_grows_is_told_first_with_its_lines():
    said = told([replace(ROWS["a leak"][0], notes=("a note",))])
    assert re.search("also MEMORY-GROWS .* train.py:12 and +train.py:13", "".join(said[3:5]))
    assert next(line for line in said if line.startswith(" • ")).startswith(" • Memory")


def test_a_change_has_its_whole_name_and_its_gain_over_what_was_accepted_before():
    name = "compiled model with CUDA graphs"
    said = told([rung("baseline"), rung(name), rung(f"{name} + more", gain=1.01, speedup=1.13)])
    at = said.index(f" ✓ {name} + more")
    assert said[at - 1].startswith(f" ✓ {name} ")
    assert said[at - 1].index("ms") == said[at + 1].index("ms")
    assert "1.01×" in said[at + 1]


def test_a_grid_s_cases_are_listed_with_time_and_peak():
    rows = [step(step_ms=90.0 + at, peak_gib=1.5, case={"context": at}) for at in range(12)]
    said = told(rows)
    at = next(at for at, line in enumerate(said) if line.startswith("   context 0"))
    assert re.fullmatch(r" +context 0 +90\.0 ms \[99\.0–101\] +1\.50 GiB", said[at].rstrip())
    assert said[at + 9] == "   3 more: -v"
    assert not any("context 0" in line for line in told(rows[:1]))


def test_a_failure_says_why():
    said = told(ROWS["a failure"])
    assert said[2] == " Nothing could be measured. The reason:"
    assert said[3] == " failed: no step of it could be timedno step of it could be timedno step of it"
    assert "The first of 2 reasons:" in told([StepRow(workload=name, status="failed") for name in "ab"])[2]


def test_no_name_in_a_row_is_obeyed():
    rows = [replace(script(data=42.0, forward=58.0), loader="\x1b[2J.py:3, no workers")]
    assert "\x1b" not in "".join(told(rows))
