"""The document's files for Slurm, SkyPilot and Kubeflow, and its script under a real Slurm."""

import os
import re
import shlex
import sys
import time
from pathlib import Path

import pytest

from tests.train.runs import COMMAND, alone, config, far_apart, flags, losses
from trainstep.commands.cli import parse

REPOSITORY = Path(__file__).parents[2]
FILES = {
    language: re.findall(f"```{language}\n(.*?)```", (REPOSITORY / "docs" / "train.md").read_text("utf-8"), re.DOTALL)
    for language in ("bash", "yaml")
}
CURVE = {"steps": 150, "warmup": 0.05, "eval_every": 60, "save_every": 10, "eval_batches": 1}
SMALL = [*COMMAND, "--size", "tiny", *flags(CURVE)]


def test_each_file_of_the_document_starts_the_same_run():
    texts = [text.partition("resourcesPerNode")[0] for text in FILES["bash"] + FILES["yaml"]]
    runs = [re.sub(r"[\[\]\",\\\s]+", " ", text).partition(" torchrun ")[2] for text in texts]
    first, *others = (parse(run.partition("-m trainstep ")[2].split()) for run in runs)
    assert others == [first, first]


@pytest.fixture
def submit(slurm, tmp_path, monkeypatch):
    """Submits the document's script for two processes on a node without GPUs; returns the job."""
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", f"{REPOSITORY / 'src'}:{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")

    def submitted(*words):
        script = FILES["bash"][0].replace("#SBATCH --gpus-per-node=8\n", "").replace("per-node=8", "per-node=2")
        run = shlex.join([*SMALL, "--out", str(tmp_path / "run"), *words])
        (tmp_path / "train.sbatch").write_text(script.partition("train --size")[0] + run + "\n")
        more = ["--parsable", f"--chdir={tmp_path}", "--nodes=1", "--cpus-per-task=2", "--time=10", "--mem=4G"]
        return slurm.run("sbatch", *more, str(tmp_path / "train.sbatch")).strip()

    return submitted


def state(slurm, job):
    return slurm.run("squeue", "--noheader", "--states=all", f"--jobs={job}", "--format=%T").strip()


def updates(tmp_path):
    path = tmp_path / "run" / "metrics.jsonl"
    return path.read_text().count("\n") if path.exists() else 0


def log(tmp_path, job):
    return (tmp_path / f"trainstep-{job}.log").read_text()


@pytest.mark.slurm
@pytest.mark.distributed
@pytest.mark.thorough
def test_a_run_that_slurm_puts_back_into_the_queue_goes_on(submit, slurm, tmp_path):
    job = submit()
    slurm.until(lambda: updates(tmp_path) >= 13 and any(tmp_path.glob("run/checkpoints/step-*")), 120)
    slurm.requeue(job)
    slurm.until(lambda: state(slurm, job) not in ("PENDING", "RUNNING", "COMPLETING"), 120)
    assert state(slurm, job) == "COMPLETED", log(tmp_path, job)
    assert log(tmp_path, job).count("resumed from step-000000") == 1
    assert len(losses(tmp_path / "run")) == 150
    alone(config(**CURVE), tmp_path / "expected")
    assert far_apart(losses(tmp_path / "expected"), losses(tmp_path / "run")) < 1e-5


@pytest.mark.slurm
@pytest.mark.distributed
@pytest.mark.thorough
def test_a_run_whose_time_is_up_saves_before(submit, slurm, tmp_path):
    job = submit("--steps", "20000", "--save-every", "5000")
    slurm.until(lambda: updates(tmp_path) >= 13, 120)
    soon = time.strftime("%FT%T", time.localtime(time.time() + 110))  # the script asks to be told 120 s before
    slurm.run("scontrol", "update", f"jobid={job}", f"EndTime={soon}")
    slurm.until(lambda: state(slurm, job) not in ("RUNNING", "COMPLETING"), 100)
    assert "SIGTERM: stopped after update" in log(tmp_path, job)
    made = updates(tmp_path)
    assert 13 <= made < 20_000
    assert (tmp_path / "run" / "checkpoints" / f"step-{made:08d}").is_dir()
