"""The step, found in what begins and ends: a clock that a test moves, and calls in the order a script makes them."""

import dataclasses
import itertools
import json
import threading
from dataclasses import replace

import pytest

from trainstep.observe.steps import (
    BACKWARD,
    COMMUNICATION,
    COUNTS,
    DATA,
    EVALUATION,
    FORWARD,
    LOSS,
    OPTIMIZER,
    OTHER,
    Step,
    StepFinder,
)


class Script:
    """A script of which every call takes as many milliseconds as it is told."""

    def __init__(self):
        self.now, self.steps = 0.0, []
        self.finder = StepFinder(lambda: self.now, self.steps.append)

    def wait(self, ms):
        self.now += ms

    def call(self, phase, ms):
        entered = self.finder.enter(phase)
        self.wait(ms)
        if entered:
            self.finder.leave()

    def update(self, ms, optimizer=1):
        self.finder.optimizer_begins(optimizer)
        self.wait(ms)
        self.finder.optimizer_ended(optimizer, f"optimizer {optimizer}")

    def micro_batch(self, data=1.0, forward=4.0, loss=2.0, backward=8.0):
        self.call(DATA, data)
        self.call(FORWARD, forward)
        self.wait(loss)
        self.call(BACKWARD, backward)

    def done(self):
        self.finder.settle()
        return self.steps

    def phases(self, place=-1):
        step = self.steps[place]
        return replace(step, host=[end - start for start, end in itertools.pairwise(step.marks)]).ms


@pytest.fixture
def script():
    return Script()


def test_phases_follow_one_another_and_add_up_to_the_step(script):
    for _ in range(3):
        script.micro_batch()
        script.wait(0.5)
        script.update(3.0)
        script.wait(0.25)
    assert len(script.done()) == 3
    expected = {OTHER: 0.75, DATA: 1.0, FORWARD: 4.0, LOSS: 2.0, BACKWARD: 8.0, OPTIMIZER: 3.0}
    assert script.phases() == expected
    last, before = script.steps[-1], script.steps[-2]
    assert last.marks[0] == before.marks[-1], "a step begins where the one before it ended"
    assert sum(script.phases().values()) == last.marks[-1] - before.marks[-1]


def test_accumulated_parts_are_one_step(script):
    for _ in range(4):
        script.micro_batch()
    script.update(3.0)
    (step,) = script.done()
    assert (step.forwards, step.backwards) == (4, 4)
    assert script.phases()[LOSS] == 8.0


def test_optimizers_without_a_backward_pass_between_them_update_in_one_step(script):
    for _ in range(2):
        script.micro_batch()
        script.update(3.0, optimizer=1)
        script.wait(0.5)
        script.update(2.0, optimizer=2)
    assert [step.updated for step in script.done()] == [["optimizer 1", "optimizer 2"]] * 2
    assert script.phases()[OPTIMIZER] == 5.0
    assert [step.number for step in script.steps] == [1, 2]


def test_optimizers_with_a_backward_pass_between_them_have_steps_of_their_own(script):
    for _ in range(2):
        script.micro_batch()
        script.update(3.0, optimizer=1)
        script.call(FORWARD, 4.0)
        script.call(BACKWARD, 4.0)
        script.update(2.0, optimizer=2)
    assert [step.updated for step in script.done()] == [["optimizer 1"], ["optimizer 2"]] * 2


def test_an_evaluation_is_told_apart(script):
    script.micro_batch()
    script.update(3.0)
    script.call(EVALUATION, 50.0)
    script.micro_batch()
    script.update(3.0)
    first, second = script.done()
    assert (first.evaluations, second.evaluations) == (0, 1)
    assert script.phases()[EVALUATION] == 50.0
    assert script.phases()[FORWARD] == 4.0


def test_an_update_left_out_by_a_scaler_ends_a_step_too(script):
    script.micro_batch()
    script.finder.enter(OPTIMIZER)
    script.wait(1.0)
    script.finder.leave()
    script.finder.optimizer_ended(1, "optimizer 1", is_skipped=True)
    script.micro_batch()
    script.update(3.0)
    assert [step.is_skipped for step in script.done()] == [True, False]


def test_a_scaler_around_an_optimizer_ends_one_step(script):
    for _ in range(2):
        script.micro_batch()
        script.finder.enter(OPTIMIZER)
        script.update(3.0)
        script.finder.leave()
    assert len(script.done()) == 2
    assert script.phases()[OPTIMIZER] == 3.0


def test_a_closure_inside_an_optimizer_is_no_update(script):
    for _ in range(2):
        script.finder.optimizer_begins(1)
        script.wait(0.5)
        script.finder.claim_nothing()
        script.micro_batch()
        script.finder.leave()
        script.wait(3.0)
        script.finder.optimizer_ended(1, "optimizer 1")
    assert len(script.done()) == 2
    assert script.phases() == {OPTIMIZER: 3.5, OTHER: 0.0, DATA: 1.0, FORWARD: 4.0, LOSS: 2.0, BACKWARD: 8.0}


def test_an_optimizer_within_another_is_a_part_of_it(script):
    script.micro_batch()
    script.finder.optimizer_begins(1)
    script.update(2.0, optimizer=2)
    script.wait(1.0)
    script.finder.optimizer_ended(1, "sharded")
    (step,) = script.done()
    assert step.updated == ["sharded"]
    assert script.phases()[OPTIMIZER] == 3.0


@pytest.mark.parametrize("number", [1, 2])
def test_an_optimizer_that_raised_does_not_hide_the_next_step(script, number):
    """Whether the script goes on with it or makes another one."""
    script.micro_batch()
    script.finder.optimizer_begins(number)  # and the script catches what it raises
    for _ in range(2):
        script.micro_batch()
        script.update(3.0)
    assert len(script.done()) == 2
    assert script.phases()[OPTIMIZER] == 3.0
    assert script.phases()[FORWARD] == 4.0


def test_what_is_left_of_backward_once_it_is_computed_is_communication(script):
    script.call(FORWARD, 4.0)
    script.finder.enter(BACKWARD)
    script.wait(6.0)
    script.finder.backward_computed()
    script.wait(2.0)
    script.finder.leave()
    script.update(1.0)
    script.done()
    assert (script.phases()[BACKWARD], script.phases()[COMMUNICATION]) == (6.0, 2.0)


def test_calls_within_a_call_of_the_model_or_backward_are_a_part_of_it(script):
    script.finder.enter(FORWARD)
    assert not script.finder.enter(FORWARD), "a root within a root"
    script.finder.leave()
    script.finder.enter(BACKWARD)
    assert not script.finder.enter(FORWARD), "activations that are computed again"
    script.finder.leave()
    script.update(1.0)
    assert [step.forwards for step in script.done()] == [1]


def test_other_threads_are_no_part_of_the_step(script):
    script.call(FORWARD, 4.0)
    other = threading.Thread(target=lambda: script.call(DATA, 100.0))
    other.start()
    other.join()
    script.call(BACKWARD, 4.0)
    script.update(1.0)
    script.done()
    assert DATA not in script.phases()


def test_a_thread_that_only_loads_data_is_not_the_one_that_trains(script):
    loading = threading.Thread(target=lambda: script.call(DATA, 100.0))
    loading.start()
    loading.join()
    for _ in range(3):
        script.call(FORWARD, 4.0)
        script.call(BACKWARD, 8.0)
        script.update(1.0)
    assert [step.backwards for step in script.done()] == [1, 1, 1]
    assert script.phases() == {OTHER: 0.0, FORWARD: 4.0, LOSS: 0.0, BACKWARD: 8.0, OPTIMIZER: 1.0}


def test_a_step_is_handed_out_when_the_next_one_begins(script):
    script.micro_batch()
    script.update(3.0)
    assert script.steps == []
    script.call(DATA, 1.0)
    assert len(script.steps) == 1


def test_nothing_is_noted_once_it_is_switched_off(script):
    script.finder.switch_off()
    script.micro_batch()
    script.update(1.0)
    assert script.done() == []


def test_waits_belong_to_the_step_they_are_in(script):
    script.micro_batch()
    script.finder.waited(7, 1.5)
    script.finder.waited(7, 0.5)
    script.update(1.0, optimizer=1)
    script.finder.waited(8, 1.0)
    script.update(1.0, optimizer=2)
    (step,) = script.done()
    assert step.waits == {7: [2, 2.0], 8: [1, 1.0]}


def test_a_step_has_the_batches_that_came_in_it_and_what_lies_ready_when_it_ends():
    script, ready = Script(), iter([(3, 4), (1, 4), (5, 6)])
    script.finder.in_stock = lambda: next(ready)
    for _ in range(2):
        script.micro_batch()
        script.finder.took(8)
        script.finder.took(8)
        script.update(1.0)
    script.finder.took(8)
    script.update(1.0, optimizer=2)  # with no backward pass between them it belongs to the same step
    assert [(step.batches, step.samples, step.stock) for step in script.done()] == [(2, 16, (3, 4)), (3, 24, (5, 6))]


FILLED = Step(
    number=3, updated=["AdamW"], phases=[FORWARD, BACKWARD], host=[1.0, 2.5], device=[3.0, 2.5], stock=(3, 4),
    is_skipped=True, memory=[9.5], seen={9: 4}, tags={"recorded", "searched"}, waits={7: [2, 2.0], 12: [1, 1.5]},
    **{name: place for place, name in enumerate(COUNTS, start=1)},
)  # fmt: skip


def test_every_field_of_a_step_goes_through_the_log_and_back():
    read = Step.read(json.loads(json.dumps(FILLED.logged())), None)
    assert replace(read, ahead_ms=0.0, starved_ms=0.0) == FILLED
    kept = {each.name for each in dataclasses.fields(Step) if each.metadata.get("is_logged", True)}
    empty = Step()
    assert all(getattr(FILLED, name) != getattr(empty, name) for name in kept), "a new field belongs into FILLED"
    assert set(empty.logged()) <= {"stock"}, "a step writes what happened in it alone"


def test_updates_of_one_step_add_their_counts_up():
    both = Step.read(FILLED.logged(), None)
    both.add(Step(updated=["SGD"], waits={7: [1, 0.5]}, stock=(1, 4), **dict.fromkeys(COUNTS, 10)))
    assert [getattr(both, name) for name in COUNTS] == [place + 10 for place in range(1, len(COUNTS) + 1)]
    assert (both.updated, both.waits, both.stock) == (["AdamW", "SGD"], {7: [3, 2.5], 12: [1, 1.5]}, (1, 4))
