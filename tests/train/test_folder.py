"""The folder of a run: what is there of a start that got nowhere, and that a mistake changes nothing."""

import json

import pytest

from tests.train.runs import names
from trainstep.errors import UsageError
from trainstep.train.folder import check_not_of_others, open_folder
from trainstep.train.resume import Asked


def test_a_start_that_was_killed_in_its_first_moments(tmp_path):
    (tmp_path / "run" / "checkpoints" / ".step-00000004.writing").mkdir(parents=True)
    (tmp_path / "run" / ".run.json").write_text('{"ident')
    check_not_of_others(tmp_path / "run")
    assert open_folder(tmp_path / "run", {"a": 1}, Asked(12)).is_new
    assert names(tmp_path / "run") == []


def test_settings_that_never_made_an_update_do_not_bind_the_folder(tmp_path):
    open_folder(tmp_path, {"step.context": 4096}, Asked(12))
    (tmp_path / "metrics.jsonl").write_text("")  # it ran out of memory in the first update
    assert open_folder(tmp_path, {"step.context": 32}, Asked(12)).is_new
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    with pytest.raises(UsageError, match=r"step\.context: 32 → 64"):
        open_folder(tmp_path, {"step.context": 64}, Asked(12))


@pytest.fixture
def trained(tmp_path):
    """The folder of a run that is finished, with empty checkpoints after updates 4, 8 and 12."""
    open_folder(tmp_path, {"a": 1}, Asked(12))
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    (tmp_path / "results.jsonl").write_text("")
    for step in (4, 8, 12):
        note = {"identity": {"a": 1}, "files": {}}
        (tmp_path / "checkpoints" / f"step-{step:08d}").mkdir()
        (tmp_path / "checkpoints" / f"step-{step:08d}" / "checkpoint.json").write_text(json.dumps(note))
    (tmp_path / "checkpoints" / ".step-00000012.writing").mkdir()
    return tmp_path


def test_going_back_sets_later_checkpoints_and_the_results_aside(trained):
    start = open_folder(trained, {"a": 1}, Asked(12, "step-00000004"))
    assert (start.step, start.is_finished) == (4, False)
    assert start.aside == ("aside-1-step-00000008", "aside-1-step-00000012")
    assert names(trained) == ["aside-1-step-00000008", "aside-1-step-00000012", "step-00000004"]
    assert not (trained / "results.jsonl").exists(), "what goes on would look finished"


@pytest.mark.parametrize("mistake", ["another run", "no such checkpoint", "damaged"])
def test_a_mistake_changes_nothing(trained, mistake):
    if mistake == "damaged":
        (trained / "checkpoints" / "step-00000008" / "checkpoint.json").unlink()
    before = sorted(trained.rglob("*"))
    named = "step-00000005" if mistake == "no such checkpoint" else "step-00000008"
    with pytest.raises(UsageError):
        open_folder(trained, {"a": 2 if mistake == "another run" else 1}, Asked(12, named))
    assert sorted(trained.rglob("*")) == before
