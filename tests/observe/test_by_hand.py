"""Timers by hand, and how the table of scripts holds phases against them."""

import ast
import runpy

import pytest
import torch

from measure_run import SCRIPTS, difference, of_phases
from tests.observe.by_hand import COMMENT, Clock, instrumented
from tests.observe.measuring import DEEP, measure


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
