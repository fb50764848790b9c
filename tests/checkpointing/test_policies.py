"""A policy is the same after a file, and a file that is none is named."""

import json
from pathlib import Path

import pytest

from trainstep.base.config import StepConfig, keeps_whole_blocks
from trainstep.base.errors import UsageError
from trainstep.checkpointing.policies import FORMAT, BlockPolicy, Policy, policy_of

POLICY = Policy(
    {"blocks.0": BlockPolicy(True, ("mm#0", "trainstep::flash_forward#1"), (0,)), "blocks.1": BlockPolicy()}
)


def test_a_file_says_the_same(tmp_path):
    POLICY.save(tmp_path / "made" / "fit.json")
    assert Policy.load(tmp_path / "made" / "fit.json") == POLICY
    assert policy_of(f"@{tmp_path}/made/fit.json") == POLICY


def test_a_file_that_is_written_again_is_there_all_the_while(tmp_path, monkeypatch):
    """Every rank writes it, and reads it as soon as it has."""
    path, policy = tmp_path / "fit.json", Policy({"blocks.0": BlockPolicy(recompute=True)})
    policy.save(path)
    replaced, seen = Path.replace, []

    def replace(own, target):
        seen.extend(Policy.load(each) == policy for each in (own, path))
        return replaced(own, target)

    monkeypatch.setattr(Path, "replace", replace)
    policy.save(path)
    assert seen == [True, True]
    assert [each.name for each in tmp_path.iterdir()] == ["fit.json"]


def test_a_step_takes_the_name_of_a_file_and_no_formula_is_used_for_it():
    assert StepConfig(checkpointing="@fit.json").checkpointing == "@fit.json"
    assert [name for name in ("none", "every-1", "selective", "@fit.json") if keeps_whole_blocks(name)] == [
        "none",
        "every-1",
    ]
    with pytest.raises(UsageError, match="or @FILE"):
        StepConfig(checkpointing="@")


def test_names_of_alike_policies_are_no_files():
    assert policy_of("every-1") is None


def test_what_changes_nothing_is_plain():
    assert [block.is_plain for block in POLICY.blocks.values()] == [False, True]
    assert not BlockPolicy(host=(0,)).is_plain


def file_of(blocks, form=FORMAT):
    return json.dumps({"format": form, "blocks": blocks})


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "cannot read"),
        ("[]", "no checkpointing policy"),
        (file_of({}, "another"), "no checkpointing policy"),
        (file_of([]), "expected a table by block"),
        (file_of({"b": {"keep": []}}), "expected recompute, kept and host"),
        (file_of({"b": {"recompute": 1}}), r"Expected `bool`, got `int` - at `\$.recompute`"),
        (file_of({"b": {"recompute": True, "kept": "mm#0"}}), "Expected `array`, got `str`"),
        (file_of({"b": {"recompute": True, "kept": ["mm"]}}), "b is .* a block's kept has 'mm'"),
        (file_of({"b": {"kept": ["mm#0"]}}), "set recompute"),
        (file_of({"b": {"host": [-1]}}), "numbers of 0 or more"),
        (file_of({"b": {"host": [True]}}), "Expected `int`, got `bool`"),
    ],
)
def test_bad_files(tmp_path, text, said):
    path = tmp_path / "fit.json"
    path.write_text(text)
    with pytest.raises(UsageError, match=said):
        policy_of(f"@{path}")


def test_a_missing_file(tmp_path):
    with pytest.raises(UsageError, match="cannot read the checkpointing policy"):
        policy_of(f"@{tmp_path}/none.json")
