"""Planted wrongs are caught in float32 and in bf16 alone; right steps, odd ones too, are not called wrong."""

import copy
import dataclasses
import functools
from functools import partial

import pytest
import torch
from torch import nn

from tests.check import is_plain, source_of, verdict_of
from tools.trust.planted import dropping, passes, right
from tools.trust.planted.step import ATTENTION, BASE, BF16, PLAIN, WRONG, Planted, gradient, in_bf16_alone, through
from trainstep.base.config import StepConfig
from trainstep.check.reference import PASSES, Reference
from trainstep.check.step import StepCheck, plain_form
from trainstep.checkpointing.policies import Policy
from trainstep.checkpointing.updating import UpdatesInBackward
from trainstep.step.workload import Workload, WorkloadSource

pytestmark = pytest.mark.usefixtures("small_pool")

IN_FLOAT32, RIGHT = dropping.WRONG | passes.WRONG, right.RIGHT | passes.RIGHT
WITHIN_ROUNDING = {"one row without its diagonal key", "a window of 120 of 128"}
"""In bf16 these are off by less than three times what rounding does."""


@pytest.fixture(scope="module")
def judge():
    return StepCheck(PLAIN, BASE)


def verdict_on(judge, planted):
    judge.source = planted.source()
    return judge.judge(dataclasses.replace(BASE, **planted.change))


@pytest.mark.parametrize("name", [*WRONG][::2])
def test_a_planted_wrong_is_caught(judge, name):
    """Half of them; `python -m tools.trust.planted` takes all."""
    found = verdict_on(judge, WRONG[name] if name in WITHIN_ROUNDING else in_bf16_alone(WRONG[name]))
    assert not found.is_right
    assert str(found)


@pytest.mark.parametrize("name", [*WRONG][1::2])
def test_in_float32_it_is_caught_too(judge, name):
    """The other half."""
    assert not verdict_on(judge, WRONG[name]).is_right


judge_of = functools.cache(partial(StepCheck, plain=BASE))


@pytest.mark.parametrize("name", [*IN_FLOAT32][::2])
def test_what_drops_otherwise_or_is_wrong_in_some_passes_or_rows_is_caught(name):
    """Most were right with dropout off on both sides, or in the passes that were compared."""
    planted = IN_FLOAT32[name]
    assert not verdict_on(judge_of(planted.plain), planted).is_right


def test_what_goes_wrong_after_some_steps_is_caught(judge):
    late = Planted(gradient("blocks.1.", 1.5, when=lambda number: number > PASSES + 2), ATTENTION)
    judge.source = late.source()
    step, at_start = judge.start(dataclasses.replace(BASE, **late.change))
    assert at_start.is_right
    assert judge.end(step, at_start).is_right, "no step was taken"
    assert not verdict_on(judge, late).is_right


def test_passes_whose_sketches_do_not_show_that_they_are_right_are_compared_in_full(judge, monkeypatch):
    """Three of them; the first that is wrong is told."""
    taken, at = [], Reference.at
    monkeypatch.setattr(Reference, "resembles", lambda *_: False)
    monkeypatch.setattr(Reference, "at", lambda reference, number: taken.append(number) or at(reference, number))
    assert verdict_on(judge, Planted(gradient("blocks.1.", 1.0))).is_right
    assert taken == [0, 1, 2]
    second = verdict_on(judge, Planted(gradient("blocks.1.", 1.5, when=lambda number: number == 3)))
    assert str(second).endswith("(in pass 3, with the initial weights)")


def test_the_float32_form_alone_shows_a_ten_thousandth(judge):
    slight = Planted(through("attention.query", 1.0001), {"attention": "sdpa"} | BF16)
    found = verdict_on(judge, Planted(slight.apply, {"attention": "sdpa"}))
    assert not found.is_right
    judge.source = Planted(slight.apply, {"attention": "sdpa"}).source()
    found = judge.judge(dataclasses.replace(BASE, attention="sdpa", precision="bf16"))
    assert found.gradients.is_right, "bf16 cannot show it"
    assert not found.float32.is_right
    assert str(found).startswith("in float32, ")


@pytest.mark.parametrize("name", [*RIGHT][1::2])
def test_what_is_right_is_not_called_wrong(name):
    source, base, change = RIGHT[name]
    found = StepCheck(source, base).judge(dataclasses.replace(base, **change))
    assert found.is_right, str(found)
    assert "not_in_float32" not in found.notes
    if dataclasses.replace(base, **change).precision == "fp32":
        assert found.gradients.gradient_allowed < 2e-5, "float32 is exact to a few millionths"
    assert found.gradients.gradient_allowed < 0.25, "no vacuous budget"


def test_budgets_come_from_what_rounding_does(judge):
    judge.source = PLAIN
    found = judge.judge(dataclasses.replace(BASE, precision="bf16", attention="sdpa"))
    assert 0.01 < found.gradients.gradient_allowed < 0.03
    assert found.notes.get("compared", "as it is") == "as it is", "it has no dropout"
    assert found.float32.gradient_allowed < 2e-5
    assert found.columns()["error_budget"] == found.gradients.gradient_allowed
    assert found.columns()["float32_allowed"] == found.float32.gradient_allowed


@pytest.mark.parametrize(("factor", "is_right"), [(1.0, True), (1.5, False)])
def test_what_is_wrong_with_later_batches_alone_is_wrong(factor, is_right):
    """The first batch was looked at twice."""

    def build(step):
        torch.manual_seed(step.seed)
        given = torch.Generator().manual_seed(1)
        batches = [(torch.randn(length, 32, generator=given),) for length in (6, *[4] * 11)]

        def loss(outputs, batch):
            return outputs.square().mean() * (factor if len(batch[0]) != 6 and not is_plain(step) else 1.0)

        return Workload(nn.Linear(32, 32), batches, loss=loss, optimizer=partial(torch.optim.SGD, lr=1e-3))

    assert verdict_of(WorkloadSource("toy", build), optimizer="sgd").is_right is is_right


def test_a_wrong_step_allows_the_next_one_nothing():
    wrong = source_of(lambda: nn.Linear(32, 32), scale=lambda step: 1.0 if step.precision == "fp32" else 1.1)
    judge = StepCheck(wrong, StepConfig(device="cpu"))
    verdicts = [judge.judge(StepConfig(device="cpu", precision="bf16")) for _ in range(2)]
    assert [verdict.is_right for verdict in verdicts] == [False, False]
    assert verdicts[1].gradients.gradient_allowed < 0.05


@pytest.fixture
def in_backward(tmp_path):
    """The plain step, updated in backward."""
    Policy(update_in_backward=True).save(tmp_path / "policy.json")
    return dataclasses.replace(BASE, optimizer="adamw-fused", checkpointing=f"@{tmp_path / 'policy.json'}")


def test_what_is_read_after_its_update_is_no_silent_mistake(in_backward):
    """A function that keeps a weight beside autograd's saved tensors would read the updated one."""

    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight):
            ctx.weight = weight  # not saved: torch does not see that it changes
            return x @ weight

        @staticmethod
        def backward(ctx, gradient):
            return gradient @ ctx.weight.t(), None

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList([nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)])
            self.first = nn.Parameter(torch.eye(8))

        def forward(self, x):
            late = self.blocks[1].weight
            return self.blocks[1](Twice.apply(self.blocks[0](x @ self.first), late.detach()))

    def workload(step):
        torch.manual_seed(0)
        batches = [(torch.randn(4, 8, generator=torch.Generator().manual_seed(seed)),) for seed in range(3)]
        loss = lambda outputs, batch: outputs.square().mean()  # noqa: E731
        return Workload(Model(), batches, loss, optimizer=partial(torch.optim.SGD, lr=0.1))

    source = WorkloadSource("late", workload)
    judge = StepCheck(source, plain_form(StepConfig(device="cpu")))
    assert judge.judge(StepConfig(device="cpu")).is_right
    verdict = judge.judge(StepConfig(device="cpu", checkpointing=in_backward.checkpointing))
    assert not verdict.is_right
    assert "blocks.0.weight off by nan" in str(verdict)


def test_a_right_step_is_called_right_in_both_of_its_checks(in_backward):
    verdict = StepCheck(PLAIN, BASE).judge(in_backward)
    assert verdict.is_right, str(verdict)
    assert 0 < verdict.parts["update"].error < verdict.parts["update"].allowed


def test_a_wrong_update_in_backward_is_seen(in_backward, monkeypatch):
    right = UpdatesInBackward.update

    def lost(self, parameters):
        if len(parameters) > 1:  # of blocks
            parameters[-1].grad = None
        right(self, parameters)

    monkeypatch.setattr(UpdatesInBackward, "update", lost)
    verdict = StepCheck(PLAIN, BASE).judge(in_backward)
    assert not verdict.is_right
    assert "updates of blocks." in verdict.parts["update"].name


def test_the_step_is_timed_from_its_initial_weights(judge):
    judge.source = PLAIN
    step, verdict = judge.start(BASE)
    untouched = PLAIN.build(BASE).module.state_dict()
    assert all(torch.equal(value, untouched[name]) for name, value in step.module.state_dict().items())
    assert not step.optimizer.state
    losses = [float(step(step.next_batch())) for _ in range(3)]
    before = copy.deepcopy(verdict)
    assert judge.end(step, verdict).is_right
    assert verdict == before
    without = dataclasses.replace(verdict, notes={"compared": "without dropout"})
    assert judge.end(step, without).notes == without.notes, "of both places it is told where one was"
    assert losses[2] != losses[1]


def test_the_plain_form_trains_alike_by_the_plainest_means():
    config = StepConfig(precision="bf16", compile="blocks", attention="sdpa", loss="chunked", optimizer="adamw-fused")
    assert plain_form(config) == StepConfig()
    assert plain_form(StepConfig(optimizer="sgd", batch=3, precision="bf16")) == StepConfig(optimizer="sgd", batch=3)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["dq × 1.25", "all gradients × 1.02", "β₂ of 0.999", "one head without a mask"])
def test_planted_wrongs_on_a_gpu(name):
    planted, base = in_bf16_alone(WRONG[name]), dataclasses.replace(BASE, device="cuda")
    judge = StepCheck(PLAIN, base)
    assert judge.judge(dataclasses.replace(base, **planted.change)).is_right
    judge.source = planted.source()
    assert not judge.judge(dataclasses.replace(base, **planted.change)).is_right
