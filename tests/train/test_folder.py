"""The folder of a run: where it goes on from, and that a start that got nowhere or a mistake changes nothing."""

import json
from pathlib import Path

import pytest

from tests.train.runs import MODEL, config, names
from trainstep.base.errors import UsageError
from trainstep.train.checkpoints import Checkpoint, _sum_of_note
from trainstep.train.loop import Start, check_not_of_others, open_folder

UNDER_WAY = {"steps": (4, 8)}
FINISHED = {"steps": (4, 8, 12), "has_results": True}
WENT_BACK = {"steps": (4, 8, 10), "resumed_from": "step-00000004"}
"""As a command left it that had said --resume-from step-00000004."""


def write_run(out, steps=(), *, resumed_from=None, has_results=False):
    """The folder of a run that has made an update, with empty checkpoints after `steps`."""
    open_folder(out, {"a": 1}, updates=12)
    (out / "metrics.jsonl").write_text('{"step": 1}\n')
    if has_results:
        (out / "results.jsonl").write_text("")
    for step in steps:
        back = resumed_from if step == steps[-1] else None
        note = {"identity": {"a": 1}, "files": {}, "sha256": {}, "resumed_from": back}
        note["note_sha256"] = _sum_of_note(note)
        (out / "checkpoints" / f"step-{step:08d}").mkdir()
        (out / "checkpoints" / f"step-{step:08d}" / "checkpoint.json").write_text(json.dumps(note))


@pytest.mark.parametrize(
    ("found", "asked", "is_restart", "step", "later", "is_finished"),
    [
        pytest.param(None, None, False, 0, (), False, id="no run yet"),
        pytest.param(None, None, True, 0, (), False, id="a worker died before the first update"),
        pytest.param({}, None, False, 0, (), False, id="no checkpoint yet"),
        pytest.param(UNDER_WAY, None, False, 8, (), False, id="the newest"),
        pytest.param(UNDER_WAY, None, True, 8, (), False, id="the newest, after a worker died"),
        pytest.param(UNDER_WAY, "step-00000008", False, 8, (), False, id="the newest, by name"),
        pytest.param(UNDER_WAY, "step-00000004", False, 4, (8,), False, id="an older one"),
        pytest.param(UNDER_WAY, "runs/a/checkpoints/step-00000004/", False, 4, (8,), False, id="by its path"),
        pytest.param(UNDER_WAY, "step-00000004", True, 4, (8,), False, id="died before it went back"),
        pytest.param(WENT_BACK, "step-00000004", True, 10, (), False, id="died after it went back"),
        pytest.param(WENT_BACK, "step-00000008", True, 8, (10,), False, id="another command went back"),
        pytest.param(WENT_BACK, "step-00000004", False, 4, (8, 10), False, id="a command that is given anew"),
        pytest.param({"steps": (4, 8, 12)}, None, False, 12, (), False, id="all updates made, and no results yet"),
        pytest.param(FINISHED, None, False, 12, (), True, id="finished"),
        pytest.param(FINISHED, "step-00000012", False, 12, (), True, id="finished, by name"),
        pytest.param(FINISHED, "step-00000008", False, 8, (12,), False, id="back from the end"),
    ],
)
def test_where_it_goes_on(tmp_path, found, asked, is_restart, step, later, is_finished):
    if found is not None:
        write_run(tmp_path, **found)
    start = open_folder(tmp_path, {"a": 1}, updates=12, resume_from=asked, is_restart=is_restart)
    assert (start.step, start.is_finished, start.is_new) == (step, is_finished, found is None)
    assert (start.checkpoint is None) == (step == 0)
    assert start.aside == tuple(f"aside-1-step-{each:08d}" for each in later)
    kept = [f"step-{each:08d}" for each in (found or {}).get("steps", ()) if each not in later]
    assert names(tmp_path) == [*start.aside, *kept]
    assert (tmp_path / "results.jsonl").exists() == is_finished, "what goes on would look finished"


@pytest.mark.parametrize(
    ("found", "message"),
    [
        (None, r"--resume-from is 'step-00000005', but \S+/a holds no run to go on with; leave it out to begin one"),
        ({}, r"the checkpoints in \S+/a are: none"),
        (UNDER_WAY, r"the checkpoints in \S+/a are: step-00000004, step-00000008"),
    ],
)
@pytest.mark.parametrize("is_restart", [False, True])
def test_a_checkpoint_that_is_not_there(tmp_path, found, message, is_restart):
    if found is not None:
        write_run(tmp_path / "a", **found)
    with pytest.raises(UsageError, match=message):
        open_folder(tmp_path / "a", {"a": 1}, updates=12, resume_from="step-00000005", is_restart=is_restart)


def test_a_start_that_was_killed_in_its_first_moments(tmp_path):
    (tmp_path / "run" / "checkpoints" / ".step-00000004.writing").mkdir(parents=True)
    (tmp_path / "run" / ".run.json").write_text('{"ident')
    check_not_of_others(tmp_path / "run")
    assert open_folder(tmp_path / "run", {"a": 1}, updates=12).is_new
    assert names(tmp_path / "run") == []


def test_settings_that_never_made_an_update_do_not_bind_the_folder(tmp_path):
    open_folder(tmp_path, {"step.context": 4096}, updates=12)
    (tmp_path / "metrics.jsonl").write_text("")  # it ran out of memory in the first update
    assert open_folder(tmp_path, {"step.context": 32}, updates=12).is_new
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    with pytest.raises(UsageError, match=r"step\.context: 32 → 64"):
        open_folder(tmp_path, {"step.context": 64}, updates=12)


@pytest.fixture
def trained(tmp_path):
    """The folder of a run that is finished, with empty checkpoints after updates 4, 8 and 12."""
    write_run(tmp_path, **FINISHED)
    (tmp_path / "checkpoints" / ".step-00000012.writing").mkdir()
    return tmp_path


@pytest.mark.parametrize("mistake", ["another run", "no such checkpoint", "damaged"])
def test_a_mistake_changes_nothing(trained, mistake):
    if mistake == "damaged":
        (trained / "checkpoints" / "step-00000008" / "checkpoint.json").unlink()
    before = sorted(trained.rglob("*"))
    named = "step-00000005" if mistake == "no such checkpoint" else "step-00000008"
    with pytest.raises(UsageError):
        open_folder(trained, {"a": 2 if mistake == "another run" else 1}, updates=12, resume_from=named)
    assert sorted(trained.rglob("*")) == before


def test_the_first_line_says_what_is_trained_how_and_from_where():
    older = Checkpoint(Path("runs/a/checkpoints/step-00000004"), 4, {"world_size": 1, "sha256": {}})

    def first(start, ranks=2, **changes):
        parameters = f"{MODEL.num_parameters:,} parameters"
        return start.describe(config(**changes), ranks, 1, Path("runs/a"), parameters)

    what = (
        f"small test: {MODEL.num_parameters:,} parameters, 12 updates of 8 × 32 tokens (2 ranks × 2 passes × batch 2), "
        "ddp, fp32 → runs/a"
    )
    new = Start(is_new=True, checkpoint=None)
    assert first(new) == what
    assert "hsdp-2 by 2 blocks, fp32" in first(new, 4, scheme="hsdp", blocks_per_group=2)
    assert first(Start(is_new=False, checkpoint=None)).splitlines() == [
        what,
        "the run was begun before, but has no checkpoint yet: from the first update again",
    ]
    assert first(Start(is_new=False, checkpoint=older, aside=("aside-1-step-00000008",))).splitlines() == [
        what,
        "resumed from step-00000004, written by 1 rank",
        "set aside: aside-1-step-00000008",
    ]
    assert first(Start(is_new=False, checkpoint=older, is_finished=True)) == (
        "the run in runs/a is finished: all 12 updates are made; nothing to do"
    )
