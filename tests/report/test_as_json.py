"""summary.json: one schema for every command, the page that documents it, and numbers that any tracker takes."""

import json
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest

from tests.report.subjects.test_script_ladder import BASELINE, FUSED
from tests.report.test_answer import LAUNCH, ROWS
from tests.report.test_findings import step
from tests.report.test_verdict import script
from trainstep.report.as_json import SCHEMA, as_json
from trainstep.report.subjects import findings

PAGE = Path(__file__).parents[2] / "docs" / "summary.md"
FILES = {"report": "report.html"}


def made(rows, **options):
    return as_json(rows, findings(rows), LAUNCH, FILES, **({"is_stopped": False} | options))


@pytest.mark.parametrize("name", ROWS)
def test_a_summary_is_json_with_the_keys_of_its_page(name):
    summary = json.loads(json.dumps(made(ROWS[name]), allow_nan=False))
    documented = re.findall(r"^\| `(\w+)` \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert list(summary) == documented
    assert summary["schema"] == SCHEMA == int(re.search(r"Schema (\d+)", PAGE.read_text(encoding="utf-8"))[1])
    assert all(type(value) is float for value in summary["metrics"].values())
    assert [each["id"] for each in summary["findings"]] == [each.id for each in findings(ROWS[name])]


def test_a_summary_has_the_verdict_its_step_and_its_findings():
    summary = made([replace(script(data=42.0, forward=58.0), environment={"device": "A CPU"})], is_stopped=True)
    assert summary["verdict"] == {
        "word": "DATA-BOUND", "says": "42% of each step waits for the DataLoader at train.py:39", "figure": 0.42
    }  # fmt: skip
    assert (summary["stopped"], summary["environment"], summary["files"]) == (True, {"device": "A CPU"}, FILES)
    known = {"step_ms": 100.0, "step_low_ms": 100.0, "data_share": 0.42, "n": 20.0, "data.bound.share": 0.42}
    assert known.items() <= summary["metrics"].items()
    (bound,) = [each for each in summary["findings"] if each["id"] == "data.bound"]
    assert (bound["stake_ms"], bound["action"]) == (22.0 + 20.0, "DataLoader(…, num_workers=4)")


def test_a_ladder_s_speed_up_is_among_the_metrics():
    assert made([BASELINE, FUSED])["metrics"]["speedup"] == FUSED.speedup


def test_a_number_that_json_does_not_have_is_none_and_no_metric():
    summary = made([replace(step(), samples={"training_loss": [math.nan]}, peak_gib=math.nan)])
    json.dumps(summary, allow_nan=False)
    assert "peak_gib" not in summary["metrics"]
    assert not any(map(math.isnan, summary["metrics"].values()))
