"""Planted wrongs are caught in float32 and in bf16 alone; right steps, odd ones too, are not called wrong."""

import copy
import dataclasses
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch._inductor import config as inductor
from torch.nn import functional as F

from tests.bench.check import source_of, verdict_of
from tests.planted.right import RIGHT
from tests.planted.step import BASE, BF16, PLAIN, WRONG, in_bf16_alone
from trainstep.bench.check import dropout
from trainstep.bench.check.dropout import drops_otherwise
from trainstep.bench.check.gradients import Deviation
from trainstep.bench.check.reference import Reference
from trainstep.bench.check.step import RIGHT_UNCOMPILED, StepCheck, Verdict, plain_form
from trainstep.bench.check.updates import UpdateError
from trainstep.config import StepConfig
from trainstep.policies import Policy
from trainstep.training_step import build_step
from trainstep.updating import UpdatesInBackward
from trainstep.workload import Workload, WorkloadSource

pytestmark = pytest.mark.usefixtures("small_pool")

WITHIN_ROUNDING = {"one row without its diagonal key", "a window of 120 of 128"}
"""In bf16 these are off by less than three times what rounding does."""


@pytest.fixture(scope="module")
def judge():
    return StepCheck(PLAIN, BASE)


def verdict_on(judge, planted):
    judge.source = planted.source()
    return judge.judge(dataclasses.replace(BASE, **planted.change))


@pytest.mark.parametrize(
    ("own", "reference", "are_counted"),
    [
        (BF16, {}, True),
        ({"precision": "fp16"}, {}, False),  # whose scaler may take several passes
        (BF16 | {"compile": "blocks"}, {}, False),  # whose dropout torch decomposes
        (BF16, {"precision": "fp16"}, False),
        (BF16, {"compile": "model"}, False),
    ],
)
def test_elements_that_are_dropped_are_counted_where_both_sides_are_eager(monkeypatch, own, reference, are_counted):
    asked, check = [], StepCheck(PLAIN, BASE)
    monkeypatch.setattr(
        "trainstep.bench.check.step.drops_otherwise", lambda *_, are_counted: asked.append(are_counted) or ""
    )
    monkeypatch.setattr(check, "_build", lambda *_: None)
    monkeypatch.setattr(check, "_gradients", lambda *_: None)
    right = Deviation(0.0, 1.0, 0.0, 1.0, 0.0, 1.0, 0.0, 1.0, "w")
    held = SimpleNamespace(config=dataclasses.replace(BASE, **reference), compare=lambda *_: right)
    assert check._hold_without_dropout(dataclasses.replace(BASE, **own), held, 0).is_right
    assert asked == [are_counted]


@pytest.mark.parametrize("name", [*WRONG][::2])
def test_a_planted_wrong_is_caught(judge, name):
    """Half of them; `python -m tests.planted` takes all."""
    found = verdict_on(judge, WRONG[name] if name in WITHIN_ROUNDING else in_bf16_alone(WRONG[name]))
    assert not found.is_right
    assert str(found)


@pytest.mark.parametrize("name", [*WRONG][1::2])
def test_in_float32_it_is_caught_too(judge, name):
    """The other half."""
    assert not verdict_on(judge, WRONG[name]).is_right


def test_what_goes_wrong_after_some_steps_is_caught(judge):
    late = WRONG["one block's gradients × 1.5 after ten steps"]
    judge.source = late.source()
    step, at_start = judge.start(dataclasses.replace(BASE, **late.change))
    assert at_start.is_right
    assert judge.end(step, at_start).is_right, "no step was taken"
    assert not verdict_on(judge, late).is_right


def test_the_float32_form_alone_shows_a_ten_thousandth(judge):
    from tests.planted.step import Planted, through

    slight = Planted(through("attention.query", 1.0001), {"attention": "sdpa"} | BF16)
    found = verdict_on(judge, Planted(slight.apply, {"attention": "sdpa"}))
    assert not found.is_right
    judge.source = Planted(slight.apply, {"attention": "sdpa"}).source()
    found = judge.judge(dataclasses.replace(BASE, attention="sdpa", precision="bf16"))
    assert found.own.is_right, "bf16 cannot show it"
    assert not found.float32.is_right
    assert str(found).startswith("in float32, ")


@pytest.mark.parametrize("name", [*RIGHT][1::2])
def test_what_is_right_is_not_called_wrong(name):
    source, base, change = RIGHT[name]
    found = StepCheck(source, base).judge(dataclasses.replace(base, **change))
    assert found.is_right, str(found)
    assert found.not_in_float32 == ""
    if dataclasses.replace(base, **change).precision == "fp32":
        assert found.own.gradient_allowed < 2e-5, "float32 is exact to a few millionths"
    assert found.own.gradient_allowed < 0.25, "no vacuous budget"


def test_budgets_come_from_what_rounding_does(judge):
    judge.source = PLAIN
    found = judge.judge(dataclasses.replace(BASE, precision="bf16", attention="sdpa"))
    assert 0.01 < found.own.gradient_allowed < 0.03
    assert found.compared == "as it is", "it has no dropout"
    assert found.float32.gradient_allowed < 2e-5
    assert found.columns()["error_budget"] == found.own.gradient_allowed
    assert found.columns()["float32_allowed"] == found.float32.gradient_allowed


class Block(nn.Module):
    def __init__(self, last):
        super().__init__()
        self.linear, self.last = nn.Linear(32, 32), last

    def forward(self, x):
        return self.last(F.gelu(self.linear(x)))


class OtherDropout(nn.Dropout):
    """Drops other elements of bf16 tensors, as on a GPU."""

    def forward(self, x):
        if x.dtype == torch.bfloat16:
            torch.rand(1)
        return super().forward(x)


def dropped(kind=nn.Dropout):
    return nn.Sequential(nn.Sequential(*(Block(kind(0.3)) for _ in range(2))))


class CompiledDropout(OtherDropout):
    """Draws other random numbers where it is compiled, unless it is told to draw eager code's."""

    def forward(self, x):
        if getattr(self, "is_compiled", False) and not inductor.fallback_random:
            torch.rand(1)
        return super().forward(x)


@pytest.fixture
def without_compiler(monkeypatch):
    def compile_nothing(module):
        for each in module.modules():
            each.is_compiled = True

    monkeypatch.setattr(nn.Module, "compile", compile_nothing)
    monkeypatch.setattr(dropout, "release_memory", lambda: None)  # there is no compiled code to drop


@pytest.mark.parametrize(
    ("change", "compared"),
    [
        ({"compile": "off", "optimizer": "sgd"}, "as it is"),
        ({"compile": "blocks"}, "with eager code's random numbers"),
        ({"compile": "off", "precision": "bf16"}, "without dropout"),
        ({"compile": "blocks", "precision": "bf16"}, "without dropout"),
    ],
    ids=str,
)
def test_dropout_is_compared_as_closely_as_its_random_numbers_allow(without_compiler, change, compared):
    source = source_of(lambda: dropped(CompiledDropout))
    found = verdict_of(source, **change)
    assert found.compared == compared
    assert found.is_right
    assert found.own.gradient_allowed < 0.05
    wrong = source_of(lambda: dropped(CompiledDropout), scale=lambda step: 1.0 if is_plain(step) else 1.3)
    assert not verdict_of(wrong, **change).is_right


@pytest.mark.parametrize(
    "change", [{"optimizer": "sgd"}, {"precision": "bf16"}, {"compile": "blocks", "precision": "bf16"}], ids=str
)
@pytest.mark.parametrize("p", [0.5, 0.0])
def test_a_step_that_drops_otherwise_is_wrong(without_compiler, change, p):
    """Without dropout on both sides it is right, and so it was called."""

    def build(step):
        workload = source_of(dropped).build(step)
        for module in workload.module.modules() if not is_plain(step) else ():
            if isinstance(module, nn.Dropout):
                module.p = p
        return workload

    found = verdict_of(WorkloadSource("toy", build), **change)
    assert not found.is_right
    own = f"256 elements with p = {p:g}" if p else "nothing"
    assert str(found).endswith(f"drops from {own} in a pass, and the plain step from 256 elements with p = 0.3")


def test_of_compiled_code_probabilities_alone_are_known():
    assert drops_otherwise({0.3: 0}, {0.3: 512}, are_counted=False) == ""
    assert "drops from 0 elements" in drops_otherwise({0.3: 0}, {0.3: 512}, are_counted=True)
    assert "p = 0.1" in drops_otherwise({0.1: 0}, {0.3: 512}, are_counted=False)


@pytest.mark.parametrize("checkpointing", ["none", "every-1"])
def test_elements_that_are_dropped_again_in_backward_count_once(checkpointing):
    with dropout.without_dropout() as seen:
        step = build_step(source_of(dropped), StepConfig(device="cpu", checkpointing=checkpointing))
        step.gradients(step.next_batch())
    assert seen.elements == {0.3: 256}


def test_compiled_code_tells_what_it_would_drop():
    module = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.25))
    module.compile(fullgraph=True)
    with dropout.without_dropout() as seen:
        module(torch.randn(2, 8))
    assert seen.elements == {0.25: 0}


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


class OwnRandom(nn.Linear):
    """Leaves out rows that it draws itself; compiled it draws others, unless it is told to draw eager code's."""

    def forward(self, x):
        if getattr(self, "is_compiled", False) and not inductor.fallback_random:
            torch.rand(1)
        return super().forward(x) * (torch.rand(len(x), 1) > 0.3)


class OtherCompiled(nn.Linear):
    """Draws nothing, and is wrong where it is compiled as it is timed."""

    def forward(self, x):
        is_wrong = getattr(self, "is_compiled", False) and not inductor.fallback_random
        return super().forward(x) * (1.1 if is_wrong else 1.0)


def in_blocks(kind):
    return nn.Sequential(nn.Sequential(*(Block(kind(32, 32)) for _ in range(2))))


def test_what_a_compiled_model_draws_by_itself_is_compared_with_eager_code_s_numbers(without_compiler):
    source = source_of(lambda: in_blocks(OwnRandom))
    found = verdict_of(source, compile="blocks")
    assert (found.is_right, found.compared, found.own.note) == (True, "with eager code's random numbers", ""), found
    wrong = source_of(lambda: in_blocks(OwnRandom), scale=lambda step: 1.0 if is_plain(step) else 1.3)
    wrong_too = verdict_of(wrong, compile="blocks")
    assert (wrong_too.is_right, wrong_too.compared) == (False, "with eager code's random numbers")
    of_the_compiler = verdict_of(source_of(lambda: in_blocks(OtherCompiled)), compile="blocks")
    assert not of_the_compiler.is_right, "it draws nothing"
    assert str(of_the_compiler).endswith(f"({RIGHT_UNCOMPILED})")
    wrong_anyway = source_of(
        lambda: in_blocks(OtherCompiled), scale=lambda step: 1.3 if step.optimizer == "sgd" else 1.0
    )
    assert RIGHT_UNCOMPILED not in str(verdict_of(wrong_anyway, compile="blocks", optimizer="sgd"))


class OtherCompiledOnceTrained(nn.Linear):
    """Right with the weights that it starts from."""

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.first = self.weight.detach().clone()

    def forward(self, x):
        is_wrong = getattr(self, "is_compiled", False) and not torch.equal(self.weight, self.first)
        return super().forward(x) * (1.1 if is_wrong else 1.0)


def test_what_only_compiled_code_does_with_trained_weights_is_said_to_be_the_compilers(without_compiler):
    found = verdict_of(source_of(lambda: in_blocks(OtherCompiledOnceTrained)), compile="blocks")
    assert not found.is_right
    assert found.own.note == RIGHT_UNCOMPILED


def is_plain(step):
    return (step.precision, step.compile, step.optimizer) == ("fp32", "off", StepConfig().optimizer)


def test_a_wrong_step_allows_the_next_one_nothing():
    wrong = source_of(lambda: nn.Linear(32, 32), scale=lambda step: 1.0 if step.precision == "fp32" else 1.1)
    judge = StepCheck(wrong, StepConfig(device="cpu"))
    verdicts = [judge.judge(StepConfig(device="cpu", precision="bf16")) for _ in range(2)]
    assert [verdict.is_right for verdict in verdicts] == [False, False]
    assert verdicts[1].own.gradient_allowed < 0.05


def test_a_plain_step_that_does_not_fit_leaves_the_first_that_does_as_the_reference():
    def build(step):
        if step.attention == "eager":
            raise torch.OutOfMemoryError("CUDA out of memory")
        return PLAIN.build(step)

    judge = StepCheck(WorkloadSource("big", build), BASE)
    for change in ({"attention": "sdpa"}, {"attention": "sdpa", "optimizer": "adamw-fused"}):
        verdict = judge.judge(dataclasses.replace(BASE, **change))
        assert (verdict.is_right, verdict.not_in_float32) == (True, ""), "it is in float32 itself"
    assert judge.reference.config.attention == "sdpa"
    half = judge.judge(dataclasses.replace(BASE, attention="sdpa", precision="bf16"))
    assert (half.is_right, half.not_in_float32, half.float32.is_right) == (True, "", True)
    assert half.columns()["reference"] == "the first step that fits, as the plain one ended with out of memory"
    assert judge.is_stood_in_for
    assert StepCheck(PLAIN, BASE).judge(BASE).columns()["reference"] is None


def test_where_the_plain_step_does_not_fit_fused_attention_in_float32_is_the_reference():
    """A step in bf16 was its own reference, so that nothing could be wrong with it."""
    built = []

    def build(step, scale=1.0):
        built.append((step.attention, step.precision, step.checkpointing))
        if step.attention == "eager":
            raise torch.OutOfMemoryError("no room\nfor it")
        workload = PLAIN.build(step)
        if step.precision == "bf16":
            workload.module.blocks[0].attention.query.weight.register_hook(lambda gradient: scale * gradient)
        return workload

    for scale, is_right in ((1.0, True), (1.3, False)):
        judge = StepCheck(WorkloadSource("big", partial(build, scale=scale), PLAIN.model), BASE)
        built.clear()
        for _ in range(2):
            verdict = judge.judge(dataclasses.replace(BASE, attention="sdpa", precision="bf16"))
            assert verdict.is_right is is_right
            assert verdict.columns()["reference"] == (
                "the plain step with PyTorch's fused attention, as the plain one ended with out of memory"
            )
        assert built[:3] == [("eager", "fp32", "none"), ("eager", "fp32", "every-1"), ("sdpa", "fp32", "none")]
        assert not any(form[0] == "eager" for form in built[3:]), "they would not fit the second time either"


def test_where_the_plain_step_does_not_fit_the_same_with_blocks_computed_again_is_the_reference():
    """Fused attention was: its own roundings are inside one operator, where no random ones reach, and ours was called
    wrong for them."""

    def build(step):
        if step.attention == "eager" and step.checkpointing == "none":
            raise torch.OutOfMemoryError("no room")
        return PLAIN.build(step)

    judge = StepCheck(WorkloadSource("long", build, PLAIN.model), BASE)
    verdict = judge.judge(dataclasses.replace(BASE, attention="sdpa", precision="bf16", checkpointing="every-2"))
    assert verdict.is_right
    reference = judge.reference
    assert (reference.config.attention, reference.config.checkpointing) == ("eager", "every-1")
    said = "the plain step with every block computed again, as the plain one ended with out of memory"
    assert verdict.columns()["reference"] == said
    plain = Reference(PLAIN, BASE).places[0].gradients.by_name
    assert all(torch.equal(gradient, plain[name]) for name, gradient in reference.places[0].gradients.by_name.items())


class Routed(nn.Module):
    """A mixture of experts: which tokens an expert gets decides its shapes."""

    def __init__(self):
        super().__init__()
        self.router, self.experts = nn.Linear(32, 8), nn.Parameter(torch.randn(8, 32, 32) / 6)

    def forward(self, x):
        tokens = x.reshape(-1, 32)
        weights, chosen = self.router(tokens).softmax(-1).topk(2)
        out = torch.zeros_like(tokens)
        for expert, weight in enumerate(self.experts):
            token, place = (chosen == expert).nonzero(as_tuple=True)
            mixed = (tokens[token] @ weight.to(tokens.dtype)).tanh().to(weights.dtype) * weights[token, place, None]
            out = out.index_add(0, token, mixed.to(out.dtype))
        return x + out.reshape(x.shape)


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks, self.head = nn.ModuleList(Routed() for _ in range(3)), nn.Linear(32, 8)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def test_experts_get_the_same_tokens_where_the_reference_computes_blocks_again():
    """Random roundings were others the second time, and what was refused then was the judged step."""
    batches = [(torch.randn(16, 64, 32, generator=torch.Generator().manual_seed(seed)),) for seed in range(3)]

    def build(step):
        if step.checkpointing == "none" and step.precision == "fp32":
            raise torch.OutOfMemoryError("no room")
        torch.manual_seed(step.seed)
        loss = lambda outputs, batch: (outputs - 0.3).square().mean()  # noqa: E731
        return Workload(Experts(), batches, loss=loss, optimizer=partial(torch.optim.AdamW, lr=1e-3))

    verdict = StepCheck(WorkloadSource("own", build), BASE).judge(dataclasses.replace(BASE, precision="bf16"))
    assert verdict.is_right
    assert verdict.columns()["reference"].startswith("the plain step with every block computed again")


def test_where_the_plain_step_fits_with_the_step_s_checkpointing_alone_that_is_the_reference():
    """A step in bf16 was its own reference here, too."""

    def build(step):
        if step.checkpointing != "every-2":
            raise torch.OutOfMemoryError("no room")
        return PLAIN.build(step)

    judge = StepCheck(WorkloadSource("deep", build, PLAIN.model), BASE)
    verdict = judge.judge(dataclasses.replace(BASE, checkpointing="every-2", precision="bf16"))
    assert verdict.is_right
    assert (judge.reference.config.precision, judge.reference.config.checkpointing) == ("fp32", "every-2")
    said = "the plain step with its checkpointing, as the plain one ended with out of memory"
    assert verdict.columns()["reference"] == said
    assert not judge.is_stood_in_for


def test_a_plain_step_that_has_fused_attention_is_no_other_one():
    fused = dataclasses.replace(BASE, attention="sdpa")
    judge = StepCheck(PLAIN, fused)
    assert not judge.is_stood_in_for
    assert judge.judge(fused).columns()["reference"] is None
    assert not judge.is_stood_in_for


def test_a_form_that_did_not_fit_is_not_tried_for_the_next_step():
    built = []

    def build(step):
        built.append((step.attention, step.precision))
        if step.precision == "fp32" or step.optimizer == BASE.optimizer:
            raise torch.OutOfMemoryError("no room")
        return PLAIN.build(step)

    judge = StepCheck(WorkloadSource("larger", build, PLAIN.model), BASE)
    half = dataclasses.replace(BASE, attention="sdpa", precision="bf16")
    with pytest.raises(torch.OutOfMemoryError):
        judge.judge(half)
    assert judge.judge(dataclasses.replace(half, optimizer="adamw-fused")).is_right
    assert built.count(("eager", "fp32")) == 2, "as it is, and with blocks computed again"


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
    assert 0 < verdict.update.error < verdict.update.allowed


def test_a_wrong_update_in_backward_is_seen(in_backward, monkeypatch):
    right = UpdatesInBackward.update

    def lost(self, parameters):
        if len(parameters) > 1:  # of blocks
            parameters[-1].grad = None
        right(self, parameters)

    monkeypatch.setattr(UpdatesInBackward, "update", lost)
    verdict = StepCheck(PLAIN, BASE).judge(in_backward)
    assert not verdict.is_right
    assert verdict.update.name.startswith("blocks.")


def test_a_form_in_float32_that_does_not_fit_is_said():
    def build(step):
        if step.attention == "sdpa" and step.precision == "fp32":
            raise torch.OutOfMemoryError("CUDA out of memory")
        return PLAIN.build(step)

    judge = StepCheck(WorkloadSource("big", build), BASE)
    found = judge.judge(dataclasses.replace(BASE, attention="sdpa", precision="bf16"))
    assert found.is_right
    assert found.float32 is None
    assert found.columns()["not_in_float32"] == "out of memory: CUDA out of memory"
    assert found.columns()["float32_error"] is None


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
    without = dataclasses.replace(verdict, compared="without dropout")
    assert judge.end(step, without).compared == "without dropout", "of both places it is told where one was"
    assert losses[2] != losses[1]


def deviation(share, name="w"):
    return Deviation(share / 100, 0.01, share / 100, 0.01, 0.0, 0.01, share / 100, 0.01, name)


RIGHT_ONE, WRONG_ONE = deviation(0.5), deviation(1.2345, "head.weight")
UPDATED, NOT_UPDATED = UpdateError(1e-6, 2e-6, "w"), UpdateError(0.12345, 0.0023456, "w")


@pytest.mark.parametrize(
    ("verdict", "said"),
    [
        (Verdict(RIGHT_ONE, UPDATED), ""),
        (Verdict(RIGHT_ONE, UPDATED, RIGHT_ONE), ""),
        (Verdict(WRONG_ONE, UPDATED, RIGHT_ONE), str(WRONG_ONE)),
        (Verdict(RIGHT_ONE, UPDATED, WRONG_ONE), f"in float32, {WRONG_ONE}"),
        (Verdict(RIGHT_ONE, NOT_UPDATED), "12 updates of w from equal gradients off by 0.12 of 0.0023"),
        (Verdict(WRONG_ONE, NOT_UPDATED, WRONG_ONE), f"in float32, {WRONG_ONE}; {WRONG_ONE}; 12 updates of w from "
                                                     "equal gradients off by 0.12 of 0.0023"),
    ],
)  # fmt: skip
def test_a_verdict_says_each_part_that_is_wrong_and_no_other(verdict, said):
    assert verdict.is_right is (said == "")
    assert str(verdict) == said


def test_where_only_16_bits_fit_it_is_said_why_nothing_was_judged_in_float32():
    def build(step):
        if step.precision != "bf16-pure":
            raise torch.OutOfMemoryError("CUDA out of memory")
        return PLAIN.build(step)

    judge, narrow = StepCheck(WorkloadSource("big", build), BASE), dataclasses.replace(BASE, precision="bf16-pure")
    for _ in range(2):
        verdict = judge.judge(narrow)
        assert verdict.is_right
        assert verdict.not_in_float32 == "out of memory: CUDA out of memory"


def test_how_random_numbers_were_compared_is_told_of_both_precisions():
    """In float32 it draws as the plain step does, in bf16 it does not."""
    config = StepConfig(device="cpu", precision="bf16")
    _, verdict = StepCheck(source_of(lambda: dropped(OtherDropout)), StepConfig(device="cpu")).start(config)
    assert verdict.compared == "without dropout"


def test_a_verdict_s_columns():
    own, exact = deviation(0.5), deviation(0.25)
    alone = Verdict(own, UPDATED).columns()
    assert (alone["gradient_error"], alone["float32_error"], alone["float32_allowed"]) == (0.005, 0.005, 0.01)
    assert (alone["not_in_float32"], alone["compared"], alone["not_checked"], alone["batches"]) == (None,) * 4
    both = Verdict(own, UPDATED, exact, compared="without dropout").columns()
    assert (both["gradient_error"], both["float32_error"], both["compared"]) == (0.005, 0.0025, "without dropout")
    assert (both["update_error"], both["update_allowed"], both["worst_parameter"]) == (1e-6, 2e-6, "w")
    none = Verdict(own, UPDATED, None, "out of memory: no room").columns()
    assert (none["float32_error"], none["float32_allowed"]) == (None, None)
    assert none["not_in_float32"] == "out of memory: no room"


def test_what_is_within_a_budget_that_says_nothing_is_not_told():
    vague = Verdict(dataclasses.replace(deviation(0.5), gradient_allowed=0.567), UPDATED)
    assert vague.not_told == "rounding alone takes its gradients off by so much that 0.57 would be allowed"
    assert vague.columns()["not_checked"] == vague.not_told
    assert Verdict(dataclasses.replace(deviation(200), gradient_allowed=0.567), UPDATED).not_told == "", "it is wrong"
    assert Verdict(deviation(0.5), UPDATED).not_told == Verdict(deviation(200), UPDATED).not_told == ""


def test_the_plain_form_trains_alike_by_the_plainest_means():
    config = StepConfig(precision="bf16", compile="blocks", attention="sdpa", loss="chunked", optimizer="adamw-fused")
    assert plain_form(config) == StepConfig()
    assert plain_form(StepConfig(optimizer="sgd", batch=3, precision="bf16")) == StepConfig(optimizer="sgd", batch=3)


@pytest.mark.gpu
@pytest.mark.parametrize("change", [{"precision": "bf16"}, {"precision": "bf16", "compile": "blocks"}], ids=str)
def test_dropout_on_a_gpu(change):
    found = verdict_of(source_of(dropped), device="cuda", **change)
    assert found.is_right, str(found)
    assert found.own.gradient_allowed < 0.05


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["dq × 1.25", "all gradients × 1.02", "β₂ of 0.999", "one head without a mask"])
def test_planted_wrongs_on_a_gpu(name):
    planted, base = in_bf16_alone(WRONG[name]), dataclasses.replace(BASE, device="cuda")
    judge = StepCheck(PLAIN, base)
    assert judge.judge(dataclasses.replace(base, **planted.change)).is_right
    judge.source = planted.source()
    assert not judge.judge(dataclasses.replace(base, **planted.change)).is_right
