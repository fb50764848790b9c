"""The ladder of a script: what is wrong never gets a time; what is right is timed, and written into the script."""

import dataclasses
from pathlib import Path

import pytest
import torch

from tests.ladder import planted
from tests.ladder.forked import forked_runs  # noqa: F401
from tests.ladder.given import ladder_of
from tests.observe.measuring import SCRIPTS, alone, line_of
from trainstep.base.advice import Line
from trainstep.ladder.change import Change, all_changes
from trainstep.ladder.ladder import Ladder
from trainstep.ladder.patch import patch_of
from trainstep.ladder.single import Script
from trainstep.ladder.trial.trial import WATCHING
from trainstep.observe.copying import Copies
from trainstep.observe.log import log_path, read_log

STEPS = 8
CHANGES = all_changes("script")
FUSED = next(rung for rung in CHANGES if rung.name == "fused optimizer")
ATTENTION = next(rung for rung in CHANGES if rung.name == "fused attention")
LOSS = next(rung for rung in CHANGES if rung.name == "fused loss")
WRONG = ("scaled_gradient", "dropped_mask", "lost_token", "faster_updates")


@dataclasses.dataclass
class Climbed:
    ladder: Ladder
    rows: dict


@pytest.fixture(scope="module")
def climbed(tmp_path_factory, forked_runs):  # noqa: F811
    script = Script(alone([str(SCRIPTS / "climbing.py")]), tmp_path_factory.mktemp("runs"), STEPS)
    wrong = [Change(name, Line(""), script=getattr(planted, name)) for name in WRONG]
    tf32 = next(rung for rung in CHANGES if rung.name == "TF32 matmuls")
    ladder = ladder_of(script, [*wrong, tf32, ATTENTION, FUSED], rounds=1, are_named=True)
    return Climbed(ladder, {row.change: row for row in ladder.climb()})


def test_a_script_that_repeats_itself_is_the_baseline(climbed):
    row = climbed.rows["baseline"]
    assert (row.verdict, row.accepted, row.gradient_error, row.moved_error) == ("baseline", True, 0.0, 0.0), row.reason
    assert len(row.samples["training_loss"]) == STEPS
    assert 0 < row.error_budget < 1e-4, "what rounding does in float32 was measured"


def test_what_a_judged_run_copies_is_no_wait_of_the_script(climbed):
    log = read_log(log_path(climbed.ladder.runner.first.folder, 0))
    assert not log.lines, "the script reads nothing; copies are ours"


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_never_gets_a_time(climbed, name):
    row = climbed.rows[name]
    assert (row.status, row.verdict, row.accepted) == ("wrong", "wrong", False)
    assert not row.times
    assert row.speedup is None
    assert "step" not in row.samples
    assert name not in {rung.name for rung in climbed.ladder.accepted}


def test_what_is_wrong_is_said(climbed):
    assert "embed.weight off by 0.5" in climbed.rows["scaled_gradient"].reason
    assert "the gradients off by 0.3" in climbed.rows["dropped_mask"].reason
    assert "from equal gradients off by 0.05" in climbed.rows["faster_updates"].reason


def test_what_is_right_is_timed_between_runs(climbed):
    row = climbed.rows["fused optimizer"]
    assert row.status == "ok"
    assert row.gradient_error == 0.0, "the first gradients are those of the same computation"
    assert row.update_error <= row.update_allowed < 1e-2
    assert row.runs == 2
    assert len(row.samples["runs"]) == 2
    assert row.gain_low < row.gain < row.gain_high


def test_what_needs_a_gpu_is_not_tried_without_one(climbed):
    if climbed.ladder.runner.settings["on_gpu"]:
        pytest.skip("the script trains on a GPU")
    row = climbed.rows["TF32 matmuls"]
    assert (row.verdict, row.reason) == ("not tried", "it needs a GPU")


def test_what_finds_no_place_for_itself_is_not_tried(climbed):
    row = climbed.rows["fused attention"]
    assert (row.verdict, row.status, dict(row.times)) == ("not tried", "unsupported", {})
    assert "no attention that is written out" in row.reason


def test_what_a_script_writes_out_is_fused_and_judged(tmp_path, forked_runs):  # noqa: F811
    script = Script(alone([str(SCRIPTS / "pretrain.py"), "6", "16", "16"]), tmp_path, 5)
    baseline, row, loss = list(ladder_of(script, [ATTENTION, LOSS], rounds=1).climb())[:3]
    assert (baseline.verdict, row.status, loss.status) == ("baseline", "ok", "ok"), (row.reason, loss.reason)
    assert 0 < row.gradient_error < row.error_budget < 1e-4, "other roundings"
    assert row.lines.endswith(f"({line_of('pretrain.py', 'ATTENTION')}: is_causal=True)")
    assert (row.runs, loss.runs) == (2, 2)
    assert loss.gradient_error < loss.error_budget < 1e-4
    assert loss.lines.endswith(f"({line_of('pretrain.py', 'LOSS')}: in chunks, by torch)")


def test_the_script_tells_where_it_makes_what(climbed):
    settings, text = climbed.ladder.runner.settings, (SCRIPTS / "climbing.py").read_text().splitlines()
    (optimizer,), (loader,), (model,) = settings["optimizers"], settings["loaders"], settings["models"]
    assert "AdamW(" in text[optimizer["line"] - 1]
    assert optimizer["names"] == ["model"]
    assert "DataLoader(" in text[loader["line"] - 1]
    assert "model(" in text[model["line"] - 1]
    assert model["blocks"] == 4


def test_a_patch_is_run_in_the_place_of_the_script(climbed):
    file = SCRIPTS / "climbing.py"
    before = file.read_text()
    patch = patch_of(file, [FUSED], climbed.ladder.runner.settings)
    diff = patch.diff(Path.cwd()).decode()
    assert "+    lr=1e-3, fused=True,\n" in diff
    assert [line for line in diff.splitlines() if line.startswith("-")][1:] == ["-    lr=1e-3,"]
    row = climbed.ladder.runner.check_sources(patch.texts, patch.written)
    assert row.status == "ok", row.reason
    assert row.moved_error > 0, "the fused optimizer rounds otherwise"
    assert file.read_text() == before


def test_a_script_that_starts_elsewhere_each_time_is_not_judged(tmp_path, forked_runs, monkeypatch):  # noqa: F811
    (tmp_path / "resuming.py").write_text((SCRIPTS / "resuming.py").read_text())
    monkeypatch.chdir(tmp_path)
    rows = list(ladder_of(Script(alone(["resuming.py"]), tmp_path / "runs", 4), [FUSED]).climb())
    assert [(row.change, row.verdict, row.status) for row in rows] == [("baseline", "not reproducible", "failed")]
    assert "start from other weights" in rows[0].reason
    assert "--in-place" in rows[0].reason


@pytest.mark.parametrize("name", ["log.txt", "state/count"])
def test_a_first_run_in_place_that_changes_what_was_there_ends_the_ladder(name, tmp_path, forked_runs, monkeypatch):  # noqa: F811
    script, file = (SCRIPTS / "climbing.py").read_text(), tmp_path / name
    (tmp_path / "appending.py").write_text(f"open({name!r}, 'a').write('begun')\n{script}")
    file.parent.mkdir(exist_ok=True)
    file.write_text("before")
    monkeypatch.chdir(tmp_path)
    script = Script(alone(["appending.py"]), tmp_path / "runs", 4)
    (row,) = ladder_of(script, [FUSED]).climb()
    assert (row.verdict, len(list((tmp_path / "runs").iterdir()))) == ("not reproducible", 1)
    assert f"the first run changed {name} of the folder" in row.reason


def test_gradients_that_a_closure_computes_are_those_of_the_first_update(tmp_path, forked_runs):  # noqa: F811
    """Before it is called there are none, as in Lightning's steps, and nothing could be held against anything."""
    found = Script(alone([str(SCRIPTS / "closure.py")]), tmp_path, 6).run("once").captured
    assert len(found.losses) == found.updates == 6
    assert found.losses[0] == found.gradients.loss > found.losses[-1] > 0, "it learns"
    for name, gradient in found.gradients.by_name.items():
        assert torch.allclose(found.first_moved[name], -0.1 * gradient, rtol=1e-3, atol=1e-6), "plain SGD"


def test_a_run_that_is_only_timed_leaves_nothing_to_judge(tmp_path, forked_runs):  # noqa: F811
    """Which is half of a large model's run: its weights are hashed, moved to the host and written several times."""
    script = Script(alone([str(SCRIPTS / "climbing.py")]), tmp_path, 6)
    judged, timed = script.run("judged"), script.run("timed", [FUSED], is_judged=False)
    assert (timed.failure, timed.captured, len(timed.step_ms)) == ("", None, len(judged.step_ms))
    assert judged.captured.updates == 6
    assert timed.log.facts["settings"]["optimizers"][0]["fused"], "changes are made all the same"
    file = tmp_path / "failing.py"
    file.write_text("import torch\nraise ValueError('no such model')\n")
    failed = Script(alone([str(file)]), tmp_path / "failing", 4).run("timed", is_judged=False)
    assert "ValueError" in failed.failure


@pytest.mark.parametrize("is_judged", [True, False])
def test_updates_in_which_models_are_looked_for_and_copied_are_not_timed(tmp_path, forked_runs, is_judged):  # noqa: F811
    taken = Script(alone([str(SCRIPTS / "climbing.py")]), tmp_path, 6).run("once", is_judged=is_judged)
    watched = [step.number for step in taken.log.steps if WATCHING in step.tags]
    assert watched == [1, 2]
    assert len(taken.step_ms) == 4


def test_two_models_with_an_optimizer_each_are_a_baseline(tmp_path, forked_runs):  # noqa: F811
    """What the first one's line knows is found out anew at the second one's first step."""
    taken = Script(alone([str(SCRIPTS / "gan.py")]), tmp_path, 8).run("once")
    assert taken.failure == ""
    names = [sorted(each["names"]) for each in taken.log.facts["settings"]["optimizers"]]
    assert names == [["discriminator", "generator"]] * 2, "both lines know both"
    assert {name.rpartition(" of ")[2] for name in taken.captured.moved} > {"model 2"}


def test_a_copy_of_the_directory_is_each_runs_own(tmp_path, forked_runs, monkeypatch):  # noqa: F811
    (tmp_path / "resuming.py").write_text((SCRIPTS / "resuming.py").read_text())
    monkeypatch.chdir(tmp_path)
    script = Script(alone(["resuming.py"]), Path("runs"), 4, Copies(Path("runs"), Path("runs/large")))
    first, second = script.run("once"), script.run("twice")
    assert first.captured.weights == second.captured.weights
    assert first.log.facts["settings"]["optimizers"][0]["file"] == str(tmp_path / "resuming.py")
    assert sorted(each.name for each in tmp_path.iterdir()) == ["resuming.py", "runs"]
    assert not list(tmp_path.glob("runs/*/copy"))


def test_a_script_that_fails_is_said_with_its_last_words(tmp_path, forked_runs):  # noqa: F811
    file = tmp_path / "failing.py"
    file.write_text("import torch\nprint(input())\n")
    ladder = ladder_of(Script(alone([str(file)]), tmp_path / "runs", 4), [FUSED])
    (row,) = ladder.climb()
    assert (row.status, row.verdict, ladder.runner.code) == ("failed", "failed", 1)
    assert "EOFError" in row.reason


@pytest.mark.thorough
def test_a_precision_is_judged_without_dropout(tmp_path, forked_runs):  # noqa: F811
    script = Script(alone([str(SCRIPTS / "dropping.py")]), tmp_path, 6)
    autocast = next(rung for rung in CHANGES if rung.name == "bf16 autocast")
    baseline, row = ladder_of(script, [autocast], rounds=1).climb()
    assert (baseline.compared, row.compared) == ("without dropout", "without dropout")
    assert row.status == "ok", row.reason
    assert 1e-4 < row.gradient_error < row.error_budget < 0.1
    assert baseline.error_budget < 1e-4, "float32 has its own"
    assert row.runs == 2
