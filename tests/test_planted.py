"""The kept table of planted wrongs is of all that is planted, and holds what docs/trust.md says of it."""

import json

import pytest

from tables import trust
from tools.trust.planted import __main__ as command
from tools.trust.planted import step, train
from tools.trust.planted.__main__ import Case, all_cases, benched


@pytest.fixture(scope="module")
def cases():
    return trust.planted()[0]


def test_the_kept_file_has_all_that_is_planted_and_nothing_else(cases):
    """`python -m tools.trust.planted` makes it anew."""
    kept = [(case["judge"], case["what"], case["setting"], case["wrong"]) for case in cases]
    assert kept == [(*case.key, case.wrong) for case in all_cases(two=None)]
    assert len({each[:3] for each in kept}) == len(kept)


def test_all_that_is_above_three_times_rounding_is_caught(cases):
    large = [case for case in cases if case["wrong"] and trust.is_large(case)]
    assert len({case["what"] for case in large}) >= 60
    assert [case for case in large if not case["called"]] == []


def test_a_bf16_wrong_is_sized_apart_from_whether_it_is_caught(cases):
    """Else everything above the budget would be caught because it is above the budget."""
    sized = [case for case in cases if case["wrong"] and case["setting"] == "bf16" and case["rounding"] is not None]
    assert any(case["called"] and case["rounding"] < 2 for case in sized), "the float32 form shows it"
    assert any(not case["called"] for case in sized)


def test_nothing_right_is_called_wrong(cases):
    variations = [case for case in cases if not case["wrong"]]
    assert len({case["what"] for case in variations}) >= 60
    assert [case for case in variations if case["called"]] == []


@pytest.mark.parametrize(
    ("setting", "rounding", "is_large"),
    [("fp32", 0.1, True), ("bf16", 2.9, False), ("bf16", 3.1, True), ("bf16", None, True), ("fsdp", None, True)],
)
def test_what_has_to_be_caught(setting, rounding, is_large):
    assert trust.is_large({"setting": setting, "rounding": rounding}) is is_large


def test_a_wrong_that_passes_is_named(monkeypatch):
    rows = [
        {"judge": judge, "what": "a", "setting": setting, "wrong": True, "called": called, "rounding": 5.0}
        for judge, setting, called in (("step", "fp32", True), ("step", "bf16", False), ("ladder", "bf16", False))
    ]
    monkeypatch.setattr(trust, "planted", lambda: (rows, "here"))
    assert trust.wrongs_table().texts() == [("a", "5.0", "5.0", "step", "step in bf16, ladder in bf16")]


def test_an_interrupted_command_goes_on_where_it_was(monkeypatch, tmp_path):
    judged = []

    def judge(what):
        def called():
            judged.append(what)
            if judged == ["a", "b"]:
                raise KeyboardInterrupt
            return True, 2.0

        return called

    (tmp_path / "docs" / "results").mkdir(parents=True)
    monkeypatch.setattr(command, "ROOT", tmp_path)
    monkeypatch.setattr(command, "KEPT", kept := tmp_path / "docs" / "results" / "planted.json")
    monkeypatch.setattr(command, "commit_of_all", lambda: "0123456789")
    planted = [Case("step", each, "bf16", True, judge(each)) for each in "abc"]
    monkeypatch.setattr(command, "all_cases", lambda two: planted)
    with pytest.raises(KeyboardInterrupt):
        command.main()
    assert not kept.exists()
    command.main()
    assert judged == ["a", "b", "b", "c"]
    found = json.loads(kept.read_text("utf-8"))
    assert [(case["what"], case["called"], case["rounding"]) for case in found["cases"]] == [
        (what, True, 4.0) for what in "abc"
    ]
    assert found["environments"]["step"]["commit"] == "0123456789"
    assert list((tmp_path / "results").iterdir()) == []


@pytest.mark.distributed
@pytest.mark.parametrize("scheme", train.TRAINED)
def test_train_refuses_ranks_that_are_unlike_each_other(two, scheme, tmp_path):
    found = {what: two.run(train.refused, what, scheme, tmp_path / what) for what in (*train.WRONG, *train.RIGHT)}
    assert found == {what: [what in train.WRONG] * 2 for what in found}


def test_bench_step_shows_no_time_of_a_wrong_step():
    """`tests/bench/ladder/` has the ladder's."""
    wrong = step.in_bf16_alone(step.WRONG["key gradients × 1.45"])
    assert benched(wrong.source(), step.BASE, wrong.change)
