"""A run in one process: its files, its rules, how it goes on, how it stops."""

import json
import os
import shutil
import signal

import pytest
import torch

from tests.train.runs import TEXT, alone, config, far_apart, losses, names, rows
from trainstep.base.errors import UsageError
from trainstep.base.guards import held_folder
from trainstep.rows.records import read_records
from trainstep.step.model.transformer import build_transformer
from trainstep.train.learner import Learner
from trainstep.train.loop import open_folder


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A finished run. Tests copy it."""
    out = tmp_path_factory.mktemp("train") / "run"
    alone(config(tensorboard=True), out)
    return out


@pytest.fixture
def copy(finished, tmp_path):
    out = tmp_path / "run"
    shutil.copytree(finished, out)
    return out


@pytest.fixture
def unfinished(copy):
    """The run as if it had been killed after update 8 was saved and update 10 made."""
    shutil.rmtree(copy / "checkpoints" / "step-00000012")
    (copy / "results.jsonl").unlink()
    lines = (copy / "metrics.jsonl").read_text().splitlines(keepends=True)
    (copy / "metrics.jsonl").write_text("".join(lines[:10]))
    return copy


def test_a_run_learns_and_leaves_its_files(finished):
    assert names(finished) == ["step-00000004", "step-00000008", "step-00000012"]
    curve = losses(finished)
    assert len(curve) == 12
    assert curve[-1] < curve[0] - 0.3
    assert [row["step"] for row in rows(finished) if row["validation_loss"] is not None] == [6, 12]
    (record,) = read_records(finished / "results.jsonl")
    assert record.kind == "train"
    assert (record.case["scheme"], record.case["world_size"], record.case["steps"]) == ("single", 1, 12)
    assert record.values["last_loss"] == pytest.approx(curve[-1], rel=1e-5)
    assert record.utilisation is None
    assert record.values["tokens"] == 12 * 8 * 32
    assert record.series["step"] == list(range(1, 13))


def test_the_curve_is_that_of_a_plain_loop(finished):
    """The same maths written down in ten lines: no accumulation, no wrapper, torch's own clipping."""
    run = config()
    torch.manual_seed(run.step.seed)
    model = build_transformer(run.model)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.1)
    from trainstep.train.data import open_data

    expected = []
    for row in rows(finished):
        ((inputs, targets),) = open_data(TEXT, run).training_parts(row["step"], 0, 1, 8)
        loss = torch.nn.functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        loss.backward()
        assert row["gradient_norm"] == pytest.approx(
            float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)), rel=1e-4
        )
        optimizer.param_groups[0]["lr"] = row["learning_rate"]
        optimizer.step()
        optimizer.zero_grad()
        expected.append(float(loss.detach()))
    assert far_apart(expected, losses(finished)) < 1e-5


def test_a_finished_run_is_left_alone(copy):
    def times():
        return {path: path.stat().st_mtime_ns for path in copy.rglob("*") if path.name != ".lock"}

    before = times()
    assert alone(config(), copy).is_finished
    assert times() == before


def test_it_goes_on_from_the_newest_checkpoint_with_the_same_curve(finished, unfinished):
    (unfinished / "checkpoints" / ".step-00000012.writing").mkdir()  # half-written when it was killed
    (unfinished / "checkpoints" / ".step-00000012.writing" / "__0_0.distcp").write_bytes(b"half")
    outcome = alone(config(keep=2, step={"batch": 4}), unfinished)
    assert (outcome.step, outcome.is_finished) == (12, True)
    assert far_apart(losses(finished), losses(unfinished)) < 1e-6
    assert [row["since_start"] for row in rows(unfinished)] == [1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 3, 4]
    assert names(unfinished) == ["step-00000008", "step-00000012"], "the last two are kept, and nothing half-written"


def test_another_run_is_refused_by_what_differs(copy):
    with pytest.raises(UsageError, match=r"another run .*model.d_ff: 64 → 96; step.seed: 0 → 3; train.steps: 12 → 20"):
        alone(config(model={"d_ff": 96}, step={"seed": 3}, steps=20), copy)
    with pytest.raises(UsageError, match=r"data\.sha256"):
        alone(config(), copy, data=TEXT.with_name("text.py"))


def test_a_folder_of_other_files_is_left_alone(tmp_path):
    (tmp_path / "thesis.tex").write_text("mine")
    with pytest.raises(UsageError, match=r"no run but other files \(thesis.tex\)"):
        alone(config(), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_precision_that_the_device_lacks_starts_nothing(tmp_path):
    with pytest.raises(UsageError, match="tf32 needs an NVIDIA GPU"):
        alone(config(step={"precision": "tf32"}), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_file_of_the_file_system_among_the_checkpoints(unfinished):
    (unfinished / "checkpoints" / ".nfs00000012").write_text("")
    assert alone(config(), unfinished).is_finished
    assert (unfinished / "checkpoints" / ".nfs00000012").exists()


def damage_missing(folder):
    next(folder.glob("*.distcp")).unlink()
    return ".distcp is missing"


def damage_truncated(folder):
    path = next(folder.glob("*.distcp"))
    os.truncate(path, path.stat().st_size // 2)
    return "bytes instead of"


def damage_note(folder):
    (folder / "checkpoint.json").write_text('{"step": 8, "fi')
    return "checkpoint.json cannot be read"


@pytest.mark.parametrize("damage", [damage_missing, damage_truncated, damage_note])
def test_a_damaged_checkpoint_stops_the_run_and_names_an_older_one(finished, unfinished, damage):
    message = damage(unfinished / "checkpoints" / "step-00000008")
    with pytest.raises(UsageError, match=rf"step-00000008 is damaged: .*{message}.*--resume-from step-00000004"):
        alone(config(), unfinished)
    assert len(rows(unfinished)) == 10, "nothing was changed"
    alone(config(), unfinished, resume_from="step-00000004")
    assert far_apart(losses(finished), losses(unfinished)) < 1e-6
    assert "aside-1-step-00000008" in names(unfinished)
    assert "step-00000008" in names(unfinished), "written again"


def test_a_restart_does_not_go_back_again(unfinished):
    """torchrun starts dead workers with the same words, --resume-from among them."""
    alone(config(), unfinished, resume_from="step-00000004", stop_after=10)
    assert names(unfinished)[-3:] == ["step-00000004", "step-00000008", "step-00000010"]
    identity = json.loads((unfinished / "run.json").read_text())["identity"]
    start = open_folder(unfinished, identity, updates=12, resume_from="step-00000004", is_restart=True)
    assert start.step == 10


def test_a_checkpoint_from_another_model_is_an_error(unfinished, tmp_path):
    alone(config(model={"d_ff": 96}, steps=8), tmp_path / "other")
    shutil.rmtree(unfinished / "checkpoints" / "step-00000008")
    shutil.copytree(tmp_path / "other" / "checkpoints" / "step-00000008", unfinished / "checkpoints" / "step-00000008")
    with pytest.raises(UsageError, match=r"step-00000008 is of another run .*model.d_ff: 96 → 64"):
        alone(config(), unfinished)


def test_a_loss_that_is_not_finite_stops_the_run(tmp_path, monkeypatch):
    update = Learner.update

    def poisoned(self, number):
        if number == 7:
            with torch.no_grad():
                next(self.step.module.parameters()).fill_(torch.nan)
        return update(self, number)

    monkeypatch.setattr(Learner, "update", poisoned)
    with pytest.raises(UsageError, match=r"update 7: the loss is nan .* learning rate 0.00\d+ in fp32.*step-00000004"):
        alone(config(), tmp_path / "run")
    assert names(tmp_path / "run") == ["step-00000004"], "nothing bad was saved"
    assert len(losses(tmp_path / "run")) == 6
    monkeypatch.undo()
    assert alone(config(), tmp_path / "run").is_finished


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_run_after_an_update_that_is_saved(finished, tmp_path, number):
    outcome = alone(config(), tmp_path / "run", stop_after=6, by=number)
    assert (outcome.step, outcome.is_finished, outcome.stopped_by) == (6, False, number)
    assert names(tmp_path / "run") == ["step-00000004", "step-00000006"]
    assert json.loads((tmp_path / "run/checkpoints/step-00000006/checkpoint.json").read_text())["tokens"] == 6 * 8 * 32
    alone(config(), tmp_path / "run")
    assert far_apart(losses(finished), losses(tmp_path / "run")) < 1e-6


def test_two_processes_cannot_train_in_one_folder(tmp_path):
    with held_folder(tmp_path / "run", "a test"), pytest.raises(UsageError, match="in use by a test"):
        alone(config(), tmp_path / "run")


def test_token_ids_beyond_the_vocabulary_start_nothing(tmp_path):
    import numpy as np

    np.full(4000, 300, dtype=np.uint16).tofile(tmp_path / "tokens.bin")
    with pytest.raises(UsageError, match="token id 300, beyond the vocabulary of 256"):
        alone(config(), tmp_path / "run", data=tmp_path / "tokens.bin")
    assert not (tmp_path / "run").exists()
