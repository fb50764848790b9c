"""What the mutation testing of the judges changes, and that its list of equivalent mutants is of mutants."""

import ast
import json
import tomllib
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest

from tools.trust import mutants

CODE = """
LIMIT = 0.5
OTHER = 3

def judge(values: list[float], least: int = 2) -> bool:
    \"\"\"Says 1 thing.\"\"\"
    if len(values) < least and not values:
        return False
    values.sort()
    values[0] = LIMIT
    return max(values) * 2 >= 1.0

def found(rows) -> list[Finding]:
    return [1 for row in rows if judge(row)]
"""


def names(only=None):
    return {each.name for each in mutants.mutants_of("x.py", CODE, only)}


@pytest.mark.parametrize("name", Path(__file__).with_name("mutants.txt").read_text("utf-8").splitlines())
def test_one_thing_is_changed_at_a_time(name):
    assert name in names()


def test_every_mutant_is_another_program_that_compiles():
    every = mutants.mutants_of("x.py", CODE)
    assert len({each.source for each in every}) == len({each.name for each in every}) == len(every)
    assert ast.unparse(ast.parse(CODE)) not in {each.source for each in every}
    for each in every:
        compile(each.source, "x.py", "exec")


def test_of_the_findings_only_the_rules_and_what_they_use_are_changed():
    tree = ast.parse(CODE)
    assert mutants.rules_of(tree) == {"found", "judge", "LIMIT"}
    assert not [name for name in names(mutants.rules_of(tree)) if "OTHER" in name]


@pytest.mark.thorough
def test_the_listed_equivalents_are_mutants_of_today_and_have_reasons():
    listed = tomllib.loads((mutants.ROOT / "tools/trust/mutants.toml").read_text())
    for file, reasons in listed.items():
        assert set(reasons) <= {each.name for each in mutants.mutants_of_judge(file)}, file
        assert all(len(reason) > 20 for reason in reasons.values())


def test_tests_that_share_a_slow_fixture_come_after_quick_ones_whoever_paid_for_it_before():
    def item(name, *fixtures, **parameters):
        call = {"callspec": SimpleNamespace(params=parameters)} if parameters else {}
        return SimpleNamespace(nodeid=f"test_a.py::{name}", fixturenames=[*fixtures, *parameters], **call)

    items = [item("paid", "model", size=1), item("used", "model"), item("quick"), item("quicker")]
    order = mutants.Order({"test_a.py::paid": 90.0}, {"test_a.py::quick": 0.5}, Counter())
    order.pytest_collection_modifyitems(items)
    assert [each.nodeid.split("::")[1] for each in items] == ["quicker", "quick", "paid", "used"]


def test_the_named_mutants_can_be_made_and_their_tests_exist():
    every = mutants.named()
    assert len({each.name for each, _ in every}) == len(every) >= 25
    for each, (test,) in every:
        path, _, name = test.partition("::")
        assert f"def {name}" in (mutants.ROOT / path).read_text(), test
        compile(each.source, each.file, "exec")


def test_of_every_judge_it_is_kept_that_most_mutants_were_killed():
    kept = json.loads(mutants.RESULTS.read_text())
    judges = {file for pattern in mutants.JUDGES for file in mutants.files_of(pattern)}
    assert set(kept) == judges - mutants.NOT_YET_JUDGED
    for file, found in kept.items():
        assert 0 < found["judged"] <= found["mutants"] - found["equivalent"] - found["gpu"], file
        assert found["killed"] >= mutants.NEEDED * found["judged"], file


def test_every_judge_has_tests():
    for pattern, tests in mutants.JUDGES.items():
        assert mutants.files_of(pattern), f"no file {pattern}"
        assert all((mutants.ROOT / test).exists() for test in tests if not test.startswith("-")), pattern
