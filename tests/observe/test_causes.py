"""Scripts with a cause that a finding names by its line, and clean ones that have none of these findings."""

import re
from pathlib import Path

import pytest

from tests.observe.measuring import run_command
from tests.torchrun import torchrun
from trainstep.report.page import Report
from trainstep.report.subjects.run import HABITS, late_ranks
from trainstep.rows.records import read_records

FENCE = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
KINDS = ("script.slows-down", "script.memory-grows", *(f"script.{habit}" for habit in HABITS))


def scripts(pattern="*.md"):
    found = []
    for path in sorted((Path(__file__).parent / "causes").glob(pattern)):
        first, *sections = path.read_text().split("\n## ")[1:]
        for section in sections:
            name, *ids = section.partition("\n")[0].split()
            code = "".join(FENCE.search(each)[1] for each in (first, section))
            found.append(pytest.param(code, ids, id=f"{path.stem}-{name}"))
    return found


@pytest.mark.parametrize(("text", "ids"), scripts())
def test_a_cause_is_found_with_its_line(text, ids, tmp_path):
    """In a process of its own: what a script leaves on, another test would have."""
    path = tmp_path / "train.py"
    path.write_text(text)
    _, rows = run_command(tmp_path / "out", path, cwd=tmp_path)
    found = {each.id: each.sentence for each in Report(rows).findings if each.id in KINDS}
    assert list(found) == ids
    marked = [number for number, line in enumerate(text.splitlines(), 1) if line.endswith("# here")]
    assert all(re.search(rf"train.py:{number}\b", sentence) for number in marked for sentence in found.values())


@pytest.mark.distributed
@pytest.mark.parametrize(("text", "ids"), scripts("ranks/*.md"))
def test_a_straggler_is_named_with_its_loader(text, ids, tmp_path):
    (tmp_path / "train.py").write_text(text)
    ended = torchrun("trainstep", "run", "--out", "out", "train.py", cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    (told,) = late_ranks(read_records(tmp_path / "out" / "results.jsonl"))
    assert [told.id, f"rank-{told.figures.get('rank')}"] == ids
    (line,) = [number for number, line in enumerate(text.splitlines(), 1) if line.endswith("# here")]
    assert (f"train.py:{line}," in told.sentence) is (told.id == "ranks.late_data")
