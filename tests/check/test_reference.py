"""What steps are held against: the plain step's gradients in two places, in float64 where that is the same model."""

import dataclasses
import functools
import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import trainstep.check.reference as reference_module
from tests.check import source_of, verdict_of
from tools.trust.planted.step import BASE, PLAIN
from trainstep.base.config import StepConfig
from trainstep.base.errors import UsageError
from trainstep.base.tolerance import DRAWS, MORE_DRAWS, one_rounding
from trainstep.check.gradients import Gradients, compare
from trainstep.check.reference import OWN_ARITHMETIC, Reference, gradients_at
from trainstep.check.rounding import RandomRounding
from trainstep.step.batches import fingerprint
from trainstep.step.casting import cast_parameters
from trainstep.step.training_step import build_step
from trainstep.step.weights import load
from trainstep.step.workload import Workload, WorkloadSource

pytestmark = pytest.mark.usefixtures("small_pool")

CPU = StepConfig(device="cpu")


def test_a_model_that_cannot_run_in_float64_has_float32_for_reference():
    class OnlyFloat32(nn.Linear):
        def forward(self, x):
            assert x.dtype != torch.float64
            return super().forward(x)

    source = source_of(lambda: OnlyFloat32(32, 32))
    assert not Reference(source, StepConfig(device="cpu")).is_exact
    assert Reference(source_of(lambda: nn.Linear(32, 32)), StepConfig(device="cpu")).is_exact
    assert verdict_of(source, optimizer="sgd").gradients.gradient == 0
    found = verdict_of(source, precision="bf16")
    assert found.is_right
    assert found.gradients.gradient_allowed < 0.05


class Scales(nn.Module):
    """Nothing that autocast touches."""

    def __init__(self, make=lambda: torch.exp(torch.randn(32) / 10)):
        super().__init__()
        self.scales = nn.ParameterList([nn.Parameter(make()) for _ in range(80)])

    def forward(self, x):
        for scale in self.scales:
            x = x * scale
        return x


@pytest.mark.parametrize(
    "make",
    [Scales, lambda: Scales(lambda: torch.full((32,), 1 + 2**-9))],
    ids=["weights off at random", "weights off alike, as those of norms are"],
)
def test_weights_that_are_gathered_in_16_bits_round_more_than_autocast(make):
    """By hand: all weights cast, as FSDP gathers them. Autocast alone leaves such a model in float32."""
    source = source_of(make)
    reference = Reference(source, StepConfig(device="cpu"))
    step = build_step(source, StepConfig(device="cpu", precision="bf16"))
    cast_parameters(step.module, torch.bfloat16)
    found = gradients_at(step, reference.places[0].batch)
    assert not reference.compare(found, 0, "bf16").is_right
    assert reference.compare(found, 0, "bf16", narrow_weights=True).is_right
    wrong = Gradients(found.loss, {name: 3 * each for name, each in found.by_name.items()})
    assert not reference.compare(wrong, 0, "bf16", narrow_weights=True).is_right


class SumsInBf16(torch.autograd.Function):
    """A bias whose gradient is summed in the dtype of what arrives, as torch does for layer norms on a CPU."""

    @staticmethod
    def forward(ctx, x, bias):
        return x + bias.to(x.dtype)

    @staticmethod
    def backward(ctx, grad):
        total = torch.zeros_like(grad[0])
        for row in grad:
            total += row
        return grad, total.float()


class Shifted(nn.Linear):
    def forward(self, x):
        return SumsInBf16.apply(super().forward(x.repeat(256, 1)), self.bias)


def test_a_precision_whose_plain_step_is_off_by_more_than_roundings_is_said_to_be():
    """Not the change is wrong then, but what any step in that precision computes."""
    source = source_of(lambda: Shifted(32, 32))
    of_the_plain = verdict_of(source, precision="bf16")
    assert not of_the_plain.is_right
    assert "bias off by" in str(of_the_plain)
    assert f"(so is the plain step in bf16, {OWN_ARITHMETIC})" in str(of_the_plain)
    reference = Reference(source, StepConfig(device="cpu"))
    step = build_step(source, StepConfig(device="cpu", precision="bf16"))
    load(step.module, reference.places[1].state)
    trained = reference.compare(gradients_at(step, reference.places[1].batch), 1, "bf16")
    assert not trained.is_right
    assert OWN_ARITHMETIC in trained.note
    other = source_of(lambda: Shifted(32, 32), scale=lambda step: 1.0 if step.optimizer == "adamw-foreach" else 1.3)
    assert OWN_ARITHMETIC not in str(verdict_of(other, precision="bf16", optimizer="sgd"))
    in_float32 = verdict_of(other, optimizer="sgd")
    assert not in_float32.is_right
    assert "plain step" not in str(in_float32)


def test_sizes_are_those_of_the_initial_weights():
    source, config = source_of(lambda: nn.Linear(32, 32)), StepConfig(device="cpu")
    parameters = source.build(config).module.named_parameters()
    assert Reference(source, config).sizes == {name: float(value.norm()) for name, value in parameters}


def test_float64_computes_blocks_again_where_it_does_not_fit_otherwise():
    """Its activations are twice as large."""

    def source(fits):
        def build(step):
            workload = PLAIN.build(step)
            workload.module.norm.register_forward_pre_hook(
                lambda _, inputs: None if inputs[0].dtype != torch.float64 or fits(step) else no_room()
            )
            return workload

        return WorkloadSource("long", build, PLAIN.model)

    def no_room():
        raise torch.OutOfMemoryError("no room")

    expected = Reference(PLAIN, BASE).places[1].gradients.by_name
    found = Reference(source(lambda step: step.checkpointing == "every-1"), BASE)
    assert found.is_exact
    assert all(torch.equal(gradient, expected[name]) for name, gradient in found.places[1].gradients.by_name.items())
    assert not Reference(source(lambda step: False), BASE).is_exact


def test_float64_that_fails_for_another_reason_is_not_tried_twice():
    tried = []

    def only_float32(_, inputs):
        if inputs[0].dtype == torch.float64:
            tried.append(inputs)
            raise TypeError("no float64")

    def build(step):
        workload = PLAIN.build(step)
        workload.module.norm.register_forward_pre_hook(only_float32)
        return workload

    assert not Reference(dataclasses.replace(PLAIN, build=build), BASE).is_exact
    assert len(tried) == 1


def test_a_reference_that_is_not_finite():
    source = source_of(lambda: nn.Linear(32, 32), scale=lambda step: math.nan)
    with pytest.raises(UsageError, match=r"in fp32, the loss of the first batch is nan"):
        verdict_of(source)


def test_a_model_that_is_off_in_float64_by_as_much_as_float32_never_is_is_not_believed():
    """A thousandth is a hundred times what rounding to float32 does."""

    def slightly(factor):
        class Slightly(nn.Linear):
            def forward(self, x):
                return super().forward(x) * (factor if x.dtype == torch.float64 else 1.0)

        return Reference(source_of(lambda: Slightly(32, 32)), CPU).is_exact

    assert [slightly(1 + off) for off in (1e-4, 2e-4, 4e-4)] == [True, True, False], "gradients of squares: twice that"


def test_a_loss_that_is_not_finite_after_some_training():
    """Nothing could be held against it: every setting would be called wrong."""
    source = source_of(lambda: nn.Linear(32, 32))

    def build(step):
        workload = source.build(step)
        return Workload(
            workload.module, workload.batches, workload.loss, optimizer=functools.partial(torch.optim.SGD, lr=1e30)
        )

    with pytest.raises(UsageError, match=r"the loss of a batch after some training is nan.*its learning rate"):
        Reference(WorkloadSource("diverges", build), CPU)


def places_of(change):
    """The first batch, and then what `change` makes of it."""

    def places(step):
        batch = step.next_batch()
        yield batch
        yield change(batch)

    return places


def test_a_place_has_the_batch_that_was_there_though_the_loader_fills_it_anew():
    found = Reference(source_of(lambda: nn.Linear(32, 32)), CPU, places_of(lambda batch: (batch[0].mul_(2),))).places
    (first,), (second,) = (place.batch for place in found)
    assert torch.equal(2 * first, second)


def test_a_workload_is_reproducible_though_its_places_have_other_batches():
    found = Reference(source_of(lambda: nn.Linear(32, 32)), CPU, places_of(lambda batch: (batch[0] * 2,)))
    assert not found.batches_differ
    first, second = (fingerprint(place.batch) for place in found.places)
    assert first != second


def test_more_is_drawn_while_the_roundings_do_not_explain_an_error(monkeypatch):
    """As many as it takes, in the place that is asked about alone, and what was drawn before is not drawn again."""
    drawn = []

    class Seen(RandomRounding):
        def __init__(self, precision, seed):
            super().__init__(precision, seed)
            drawn.append(seed)

    monkeypatch.setattr(reference_module, "RandomRounding", Seen)
    reference = Reference(source_of(lambda: nn.Linear(32, 32)), CPU)
    found = gradients_at(build_step(reference.source, CPU), reference.places[0].batch)

    def off(share):
        """Off by a share of the gradients' typical element, each in a direction of its own."""
        signs = {name: torch.sign(torch.randn(each.shape)) for name, each in found.by_name.items()}
        size = share * math.sqrt(sum(float(each.square().sum()) for each in found.by_name.values()) / (32 * 33))
        return Gradients(found.loss, {name: each + size * signs[name] for name, each in found.by_name.items()})

    torch.manual_seed(0)
    assert reference.compare(off(0.0), 0, "fp32").is_right
    assert drawn == [], "float64 shows what float32 is off by"
    assert reference.compare(off(0.0), 0, "bf16").is_right
    assert drawn == 2 * [*range(DRAWS)], "in both places"
    assert not reference.compare(off(0.5), 0, "bf16").is_right
    assert drawn[2 * DRAWS :] == [*range(DRAWS, MORE_DRAWS)]
    assert not reference.compare(off(0.5), 0, "bf16").is_right
    assert drawn[2 * DRAWS :] == [*range(DRAWS, MORE_DRAWS)], "there are no more"
    assert not reference.compare(off(0.5), 1, "bf16").is_right
    assert drawn[2 * DRAWS :] == 2 * [*range(DRAWS, MORE_DRAWS)], "of the other place"


def test_no_more_is_drawn_than_explains_the_error(monkeypatch):
    """Roundings that are told to be larger each time: the third drawing explains what the first two do not."""
    reference = Reference(source_of(lambda: nn.Linear(32, 32)), CPU)
    draw, draws = reference._draw, []

    def growing(*asked):
        more = draw(*asked)
        draws.append(more.draws)
        return dataclasses.replace(more, most=more.most.times({3: 0.0, 6: 0.01, 12: 1.0}[more.draws]))

    monkeypatch.setattr(reference, "_draw", growing)
    found = gradients_at(
        build_step(reference.source, StepConfig(device="cpu", precision="bf16")), reference.places[0].batch
    )
    assert reference.compare(found, 0, "bf16").is_right
    assert draws == [3, 3, 6, 12]


class Counting(nn.Module):
    """Its forward changes a buffer that its result depends on."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(32, 32)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls.add_(1)
        return self.linear(x) * (1 + self.calls)


def test_every_drawing_begins_with_the_buffers_of_its_place(monkeypatch):
    monkeypatch.setattr(Reference, "at", None)  # sketches show that further passes begin with them too
    found = verdict_of(source_of(Counting), precision="bf16")
    assert found.is_right
    assert found.gradients.gradient_allowed < 0.05, "one call more would be a budget of a half"


def test_narrow_weights_are_those_of_their_place():
    """Ten steps of a large learning rate away from the initial weights, which would be off by most of themselves."""

    def build(step):
        torch.manual_seed(step.seed)
        batch = (torch.randn(4, 32, generator=torch.Generator().manual_seed(1)),)
        return Workload(
            nn.Linear(32, 32),
            [batch],
            lambda out, batch: F.mse_loss(out, batch[0]),
            functools.partial(torch.optim.SGD, lr=1.0),
        )

    reference = Reference(WorkloadSource("far", build), CPU)
    start, trained = (place.gradients for place in reference.places)
    assert float(trained.by_name["weight"].norm()) < 0.8 * float(start.by_name["weight"].norm()), "it went somewhere"
    for rounding in reference._narrowing():
        assert 0 < rounding.relative(start) < 0.02


def test_float32_may_lose_on_tensor_cores_what_was_measured_there():
    reference = Reference(source_of(lambda: nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 32))), CPU)
    found = gradients_at(build_step(reference.source, CPU), reference.places[0].batch)
    measured = reference._measure("fp32", False)[0].most
    six = compare(found, reference.places[0].gradients, measured.times(6), one_rounding("fp32"))
    assert reference.compare(found, 0, "fp32").gradient_allowed == six.gradient_allowed > one_rounding("fp32")


def tokens(*batches, rows=9):
    """The plain step of an embedding and a layer on tokens and a factor of the loss."""

    def build(step):
        torch.manual_seed(0)
        given = [(torch.tensor(each[:2]), torch.tensor([1.0, *each[2:]][-1])) for each in batches]
        loss = lambda out, batch: out.square().sum() * batch[1]  # noqa: E731
        module = nn.Sequential(nn.Embedding(rows, 2), nn.Linear(2, 3))
        return Workload(module, given, loss, functools.partial(torch.optim.SGD, lr=1e-3))

    return Reference(WorkloadSource("tokens", build), CPU)


def further_of(reference):
    return [batch[0].tolist() for batch, _ in reference.further]


def test_further_batches_reach_other_rows_and_rows_without_a_gradient_are_named():
    """Of a rare token anything would be right."""
    found = tokens([0, 1], *[[1, 2]] * 30, [4, 4], *[[1, 2]] * 60, [4, 5], *[[0, 2]] * 30, [6, 6])
    assert further_of(found)[:4] == [[1, 2], [4, 4], [4, 5], [0, 2]], "0 was in the first, which is looked at apart"
    assert further_of(found)[4:] == [[0, 2]] * 6 + [[6, 6], [0, 1]] + [[1, 2]] * 4
    assert found.unseen == "3 of 9 rows of 0.weight"


def test_where_all_rows_have_a_gradient_further_batches_are_the_next_that_are_finite():
    found = tokens([0, 1], *[[1, 0]] * 11, [0, 0, math.inf], [1, 1, 1e3], rows=2)
    assert further_of(found) == [[1, 0]] * 11 + [[1, 1], [0, 1]] + [[1, 0]] * 3
    assert found.unseen == ""


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_further_pass_may_be_off_by_roundings_of_its_own_size(precision):
    found = tokens([0, 1], *[[1, 0]] * 11, [1, 0, 1e3], rows=2)
    step = build_step(found.source, dataclasses.replace(CPU, precision=precision))
    found.compare(gradients_at(step, found.places[0].batch), 0, precision)
    found._measured[precision, False][1] = None  # of the other place, which is not asked
    for factor, number, is_alike in ((1.0, 0, True), (1.1, 0, False), (1.0, 11, True), (1.1, 11, False)):
        own = gradients_at(step, found.further[number][0], number + 1)
        own = Gradients(own.loss, {name: factor * each for name, each in own.by_name.items()})
        assert found.resembles(own, number, precision) is is_alike
