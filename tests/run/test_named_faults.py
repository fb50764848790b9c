"""Scripts with a fault planted in them: what is said names the fault and its line."""

import pytest

from tests.run.measuring import line_of, measure
from trainstep.report.subjects import run as subject
from trainstep.run.loaders import main_loader, share_of_waiting


def said_of(script, folder):
    """Every finding's sentence by its id."""
    rows = measure(script, folder)[1]
    return {finding.id: finding.sentence for rule in subject.RULES for finding in rule(rows)}


@pytest.mark.parametrize(
    ("script", "finding", "markers", "words"),
    [
        ("chatty.py", "waits.would", ("READ", "PRINT"), ("(item, 1.00 times a step)", "(print, 1.00 times a step)")),
        ("starving.py", "data.bound", ("LOADER",), ("1 worker, memory not pinned", "more workers in the DataLoader")),
        ("compiled.py", "compiled.again", ("AGAIN",), ("compiled 5 times", "size mismatch")),
    ],
)
def test_a_planted_fault_is_named_with_its_line(script, finding, markers, words, tmp_path):
    said = said_of(script, tmp_path)
    for part in (*(line_of(script, marker) for marker in markers), *words):
        assert part in said[finding]
    others = {"waits.would", "data.bound", "compiled.again"} - {finding}
    assert not others & set(said), "nothing else is the matter"


def test_the_loader_that_most_batches_came_from_is_the_one_that_is_named():
    found = [
        {"line": "train.py:3", "workers": 0, "is_pinned": False, "batches": 2},
        {"line": "train.py:9", "workers": 2, "is_pinned": True, "batches": 30},
    ]
    assert main_loader(found) == "train.py:9, 2 workers, memory pinned"
    assert main_loader(found[:1]) == "train.py:3, no workers, memory not pinned"
    assert main_loader([]) is None


def test_what_share_of_a_run_waits_for_data_is_the_devices_where_there_is_one():
    host = {"data": 5.0, "other": 5.0}
    steps = [{"host": {"data": 99.0}}, {"host": host, "device": {"data": 1.0, "other": 9.0}}, {"host": host}]
    assert share_of_waiting(steps) == 0.3
    assert share_of_waiting([{"host": {"other": 1.0}}] * 2) == 0.0
    assert share_of_waiting(steps[:1]) is None
