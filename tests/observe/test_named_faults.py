"""Scripts with a fault planted in them: what is said names the fault and its line."""

import pytest

from tests.observe.measuring import line_of, measure
from trainstep.report.subjects import run as subject


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
