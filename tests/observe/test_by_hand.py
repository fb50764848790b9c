"""Timers by hand, and how the table of scripts holds phases against them."""

import ast
import json
import runpy
from dataclasses import replace

import pytest
import torch

from measure_run import SCRIPTS, cannot_run, difference, of_phases, told
from measuring import ROOT
from tables import run as table_of
from tests.observe.by_hand import COMMENT, Clock, instrumented
from tests.observe.measuring import DEEP, measure
from trainstep.base.stats import summarize
from trainstep.rows import RecompilationRow, ScriptRow, WaitRow
from trainstep.rows.records import Times


@pytest.mark.parametrize("path", sorted({script.path for script in SCRIPTS.values()}), ids=lambda path: path.name)
def test_every_script_of_the_table_has_its_timers_as_comments(path):
    text = path.read_text()
    plain, timed = (ast.dump(ast.parse(each)) for each in (text, instrumented(text)))
    assert "clock" not in plain, "as it is, it knows nothing of them"
    assert all(f"'{phase}'" in timed for phase in ("forward", "backward", "optimizer"))
    assert COMMENT not in instrumented(text)


def test_a_clock_adds_up_what_the_time_went_to(monkeypatch):
    now = iter(range(100))
    monkeypatch.setattr("time.perf_counter", lambda: next(now))

    class Owner:
        def step(self):
            return "stepped"

    clock, owner = Clock(on_gpu=False), Owner()
    clock("other")
    clock("forward")
    clock("other")
    clock.around(owner, "step", "optimizer", ends=True)
    assert owner.step() == "stepped"
    assert clock.steps() == [{"other": 3000.0, "forward": 1000.0, "optimizer": 1000.0, "of": 0}]


def test_the_phase_that_is_most_off_is_told_over_the_same_steps():
    steps = [{"forward": 2.0, "backward": 3.0, "communication": 1.0, "optimizer": 2.0, "other": 2.0}] * 3
    by_hand = [{"forward": 2.0, "backward": 4.0, "optimizer": 1.5, "other": 2.5, "of": 0}] * 3
    assert difference(steps, by_hand) == ("optimizer", 0.05)
    slow = {name: 10 * ms for name, ms in by_hand[0].items()}  # both see what disturbs a step
    both = [*steps, {name: 10 * ms for name, ms in steps[0].items()}]
    assert difference(both, [*by_hand, slow]) == ("optimizer", 0.05)
    with pytest.raises(ValueError, match="zip"):
        difference(steps, by_hand[1:])


def test_ranks_that_wait_for_each_other_in_both_passes_have_them_as_one():
    phases = {"forward": 2.0, "backward": 3.0, "communication": 1.0, "optimizer": 2.0, "step": 10.0}
    assert of_phases(phases) == {"forward": 2.0, "backward": 4.0, "optimizer": 2.0, "the rest": 2.0}
    assert of_phases(phases, gathers=True) == {"both passes": 6.0, "optimizer": 2.0, "the rest": 2.0}


def test_what_was_found_is_told_shortly():
    values = {name: [ms] * 5 for name, ms in (("data", 4.0), ("forward", 6.0), ("step", 10.0))}
    times = {name: Times.of(summarize(each)) for name, each in values.items()}
    own = {"workload": "train.py", "rank": None}
    step = ScriptRow(
        **own, times=times, samples=values, n=5, backwards=2.0, loader="train.py:9, 1 worker", on_gpu=False
    )
    reads = [WaitRow(**own, line=f"train.py:{line}", call="item", calls_per_step=1.0, ms_per_step=0.1, on_gpu=False)
             for line in (4, 5)]  # fmt: skip
    again = RecompilationRow(**own, line="train.py:7", function="forward", compilations=6, last_step=6, why="sizes")
    assert told([step, *reads, again]) == [
        "2 backward passes a step",
        "waits for data at train.py:9, 1 worker",
        "reads tensors at train.py:4 (item, 1.00 times a step) and 1 more lines",
        "compiled 6 times at train.py:7",
    ]


def test_on_a_gpu_lines_that_wait_and_launches_are_told():
    values = {
        "forward": [10.0] * 5,
        "step": [10.0] * 5,
        "starved": [10.0] * 5,
    }
    own = {"workload": "train.py", "rank": None, "on_gpu": True}
    step = ScriptRow(
        **own, times={name: Times.of(summarize(each)) for name, each in values.items()}, samples=values, n=5
    )
    waits = [WaitRow(**own, line=f"train.py:{line}", call="item", calls_per_step=1.0, ms_per_step=4.0)
             for line in (4, 5)]  # fmt: skip
    assert told([step, *waits]) == [
        "launches set its pace",
        "waits for the GPU at train.py:4 (item, 40% of the step) and 1 more lines",
    ]


def test_phases_are_those_of_the_timers_that_the_same_run_has(tmp_path, monkeypatch):
    """A pair of optimizers, whose steps differ."""
    monkeypatch.setenv("WIDTH", "256")
    script = SCRIPTS["gan"].path
    edited = tmp_path / script.name
    edited.write_text(instrumented(script.read_text()))
    monkeypatch.setattr("tests.observe.by_hand.clock", clock := Clock())
    plan = DEEP
    log, _ = measure(script.name, tmp_path / "log", plan, call=lambda: runpy.run_path(str(edited), run_name="__main__"))
    for place, name in enumerate(("Adam", "Adam 2")):
        own = [step.ms for step in log.steps if step.updated == [name]]
        theirs = [step for step in clock.steps() if step["of"] == place]
        assert len(own) == len(theirs) == 12
        assert difference(own[3:], theirs[3:])[1] < 0.15


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU, and torch finds none")
def test_on_a_gpu_a_clock_times_the_device_without_waiting_for_it():
    clock = Clock()
    clock("other")
    began = torch.cuda.Event()
    torch.cuda._sleep(200_000_000)
    clock("forward")
    began.record()
    clock("other")
    clock.step()
    assert not began.query(), "the host is ahead"
    (step,) = clock.steps()
    assert step["forward"] > 20 > 10 * step["other"]


def test_what_cannot_be_run_is_said():
    assert cannot_run(SCRIPTS["ddp"], 0) is None, "ranks share a CPU"
    assert cannot_run(SCRIPTS["ddp"], 1) == "it needs 2 GPUs, and 1 is here"
    assert cannot_run(SCRIPTS["ddp"], 2) is None
    assert cannot_run(replace(SCRIPTS["gan"], packages=("nothing_at_all", "torch")), 1) is None
    missing = replace(SCRIPTS["gan"], packages=("nothing_at_all", "nor_this"))
    assert cannot_run(missing, 1) == "there is no nothing_at_all or nor_this here"


def test_on_a_gpu_scripts_are_larger_and_see_one_each(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    gan, ddp = SCRIPTS["gan"].on_gpu(), SCRIPTS["ddp"].on_gpu()
    assert gan.environment == {"WIDTH": "8192", "STEPS": "30", "BATCH": "1024", "CUDA_VISIBLE_DEVICES": "3"}
    assert ddp.environment == {"WIDTH": "4096", "BATCH": "128"}
    assert SCRIPTS["pretrain"].on_gpu().arguments != SCRIPTS["pretrain"].arguments


def test_the_table_of_a_gpu_is_there_once_it_was_measured(tmp_path, monkeypatch):
    monkeypatch.setattr("tables.RESULTS", tmp_path)
    assert table_of.on_gpu() is None
    cells = json.loads((ROOT / "docs/results/cpu-run.json").read_text())
    kept = {"gan": cells["gan"] | {"device": "NVIDIA H200"}, "unet": cells["unet"] | {"device": "NVIDIA H200"}}
    kept["unet"] = {name: value for name, value in kept["unet"].items() if name != "parts"} | {"failed": "it raised"}
    (tmp_path / "h200-scripts.json").write_text(json.dumps(kept))
    table = table_of.on_gpu()
    assert table.caption.startswith("NVIDIA H200; torch")
    assert [texts[0] for texts in table.texts()] == [
        "GAN, two optimizers, Adam",
        "GAN, two optimizers, Adam 2",
        "plain loop, UNet of diffusers",
    ]
    assert "it raised" in table.texts()[-1]
