"""Files for other launchers: what they may hold, by the launchers' own schemas; and flags that do not go together."""

import json
import os
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.train.runs import COMMAND, alone, config, far_apart, flags, losses
from trainstep.commands.cli import main, parse

RUN = ["train", "--size", "large", "--scheme", "fsdp", "--precision", "bf16", "--batch", "2", "--global-batch", "64",
       "--learning-rate", "1e-3", "--no-tensorboard", "--data", "it's here.bin", "--out", "/shared/run"]  # fmt: skip
TWO = ["--nodes", "2", "--processes", "8"]
GIVEN = {
    "slurm": ["--minutes", "90"],
    "skypilot": ["--gpu", "H100", "--image", "us/trainstep:1"],
    "kubeflow": ["--image", "us/trainstep:1"],
}


def emitted(capsys, launcher, *words):
    with pytest.raises(SystemExit) as stop:
        main([*RUN, "--emit", launcher, *GIVEN[launcher], *TWO, *words])
    output = capsys.readouterr()
    assert (stop.value.code, output.err) == (0, "")
    return output.out


def loaded(text):
    """The YAML that these files are made of: mappings by indentation, JSON, numbers, words, and literal blocks."""
    root: dict = {}
    open_at, block = [(-1, root)], None
    for line in text.splitlines():
        depth = len(line) - len(line.lstrip())
        if block and (depth > block[0] or not line.strip()):
            block[1][block[2]] += line[block[0] + 2 :] + "\n"
            continue
        block = None
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        while depth <= open_at[-1][0]:
            open_at.pop()
        key, value = re.fullmatch(r'\s*("[^"]+"|[\w]+):(?: (.*))?', line).groups()
        key, here = key.strip('"'), open_at[-1][1]
        if value is None:
            here[key] = {}
            open_at.append((depth, here[key]))
        elif value == "|":
            here[key], block = "", (depth, here, key)
        else:
            here[key] = json.loads(value) if re.match(r'["\[]|\d+$', value) else value
    return root


@pytest.mark.parametrize("launcher", GIVEN)
def test_each_file_starts_torchrun_with_the_same_run(launcher, capsys):
    text = emitted(capsys, launcher)
    if launcher == "kubeflow":
        words = loaded(text)["spec"]["trainer"]["command"]
    else:
        script = loaded(text)["run"] if launcher == "skypilot" else text
        words = shlex.split(script.replace("\\\n", " ")[script.replace("\\\n", " ").index("torchrun") :])
        assert words[2] == "--nproc-per-node=8"
        assert {"--max-restarts=3", "--rdzv-backend=c10d"} <= set(words)
    assert words[0] == "torchrun"
    start = words.index("-m")
    assert words[start : start + 3] == ["-m", "trainstep", "train"]
    assert parse(words[start + 2 :]) == parse(RUN)


SKYPILOT = {"name": str, "num_nodes": int, "resources": dict, "run": str}
"""Of `get_task_schema` in `sky/utils/schemas.py` of SkyPilot 0.14.1, which allows no other keys than it has."""
SKYPILOT_RESOURCES = {"image_id": str, "cpus": str, "accelerators": str}
"""Of `_get_single_resources_schema` there."""
TRAINER = {"image": str, "numNodes": int, "numProcPerNode": int, "command": list, "resourcesPerNode": dict}
"""Of `TrainerV1alpha1Trainer` in `kubeflow-trainer-api` 2.3.0, whose numProcPerNode is an integer."""


def fits(found, schema):
    return {key: type(value) for key, value in found.items()} == schema


def test_skypilot_s_schema(capsys):
    task = loaded(emitted(capsys, "skypilot"))
    assert fits(task, SKYPILOT)
    assert fits(task["resources"], SKYPILOT_RESOURCES)
    assert task["num_nodes"] == 2
    assert task["resources"] == {"accelerators": "H100:8", "cpus": "32+", "image_id": "docker:us/trainstep:1"}
    for name in ("SKYPILOT_NODE_IPS", "SKYPILOT_NUM_NODES", "SKYPILOT_TASK_ID"):
        assert f"${name}" in task["run"]


def test_kubeflow_s_schema(capsys):
    job = loaded(emitted(capsys, "kubeflow"))
    assert fits(job, {"apiVersion": str, "kind": str, "metadata": dict, "spec": dict})
    assert (job["apiVersion"], job["kind"]) == ("trainer.kubeflow.org/v1alpha1", "TrainJob")
    assert fits(job["spec"], {"runtimeRef": dict, "trainer": dict})
    assert job["spec"]["runtimeRef"] == {"name": "torch-distributed"}
    trainer = job["spec"]["trainer"]
    assert fits(trainer, TRAINER)
    assert (trainer["numNodes"], trainer["numProcPerNode"]) == (2, 8)
    amounts = {"cpu": 32, "nvidia.com/gpu": 8}
    assert trainer["resourcesPerNode"] == {"requests": amounts, "limits": amounts}


@pytest.mark.parametrize("launcher", GIVEN)
def test_on_cpus_no_gpu_is_asked_for(launcher, capsys):
    words = [word for pair in zip(*[iter(GIVEN[launcher])] * 2, strict=True) if pair[0] != "--gpu" for word in pair]
    with pytest.raises(SystemExit) as stop:
        main([*RUN, "--device", "cpu", "--emit", launcher, *words, *TWO])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    assert "gpu" not in text
    assert "accelerators" not in text


def test_slurm_s_directives(capsys):
    text = emitted(capsys, "slurm", "--gpu", "h200")
    directives = dict(re.findall(r"^#SBATCH --([\w-]+)(?:=(.*))?$", text, re.MULTILINE))
    assert directives == {
        "job-name": "trainstep", "nodes": "2", "ntasks-per-node": "1", "cpus-per-task": "32",
        "gpus-per-node": "h200:8", "time": "90", "signal": "TERM@120", "requeue": "", "open-mode": "append",
        "output": "trainstep-%j.log",
    }  # fmt: skip


def test_a_size_is_named_and_no_torch_is_needed(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["train", "--emit", "slurm"])
    assert stop.value.code == 2
    assert "--emit needs --size, --config or --workload" in capsys.readouterr().err
    program = f"""
import sys
from trainstep.commands.cli import main
try:
    main({[*RUN, "--emit", "slurm"]!r})
finally:
    assert not {{"torch", "pandas"}} & set(sys.modules)
"""
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (found.returncode, found.stderr) == (0, "")


REPOSITORY = Path(__file__).parents[2]
CURVE = {"steps": 150, "warmup": 0.05, "eval_every": 60, "save_every": 10, "eval_batches": 1}
SMALL = [*COMMAND, "--size", "tiny", *flags(CURVE)]


@pytest.fixture
def submit(slurm, tmp_path, monkeypatch, capsys):
    """Submits the file that `--emit slurm` prints for two processes; returns the job."""
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", f"{REPOSITORY / 'src'}:{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")

    def submitted(*words):
        with pytest.raises(SystemExit):
            main([*SMALL, "--out", str(tmp_path / "run"), *words, "--emit", "slurm", "--processes", "2", "--cpus", "1"])
        (tmp_path / "train.sbatch").write_text(capsys.readouterr().out)
        more = ["--parsable", f"--chdir={tmp_path}", "--time=10", "--mem=4G"]
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
    soon = time.strftime("%FT%T", time.localtime(time.time() + 110))  # the file asks to be told 120 s before
    slurm.run("scontrol", "update", f"jobid={job}", f"EndTime={soon}")
    slurm.until(lambda: state(slurm, job) not in ("RUNNING", "COMPLETING"), 100)
    assert "SIGTERM: stopped after update" in log(tmp_path, job)
    made = updates(tmp_path)
    assert 13 <= made < 20_000
    assert (tmp_path / "run" / "checkpoints" / f"step-{made:08d}").is_dir()


def test_the_document_s_commands(capsys):
    text = (REPOSITORY / "docs" / "train.md").read_text(encoding="utf-8").replace("\\\n", "")
    lines = [line for line in text.splitlines() if line.startswith("trainstep train") and "--emit" in line]
    assert len(lines) == 3
    for line in lines:
        with pytest.raises(SystemExit) as stop:
            main(shlex.split(line.partition(">")[0])[1:])
        output = capsys.readouterr()
        assert (stop.value.code, output.err) == (0, "")
        assert "torchrun" in output.out
