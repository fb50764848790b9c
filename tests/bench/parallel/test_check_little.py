"""What a judgement of schemes says, of a model so small that it takes tenths of a second, mostly by one process."""

import dataclasses
import functools
import gc
import math
import os
import re
import weakref
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from tests.bench.parallel import by_scheme
from tools.trust.planted.parallel import (
    Planted,
    clipping,
    faster,
    forget,
    from_step,
    handed,
    no_sync,
    quick,
    scale,
    statistics,
    still,
    still_later,
    times,
    without_clipping,
)
from trainstep.base.config import StepConfig
from trainstep.base.errors import UnsupportedError, UsageError
from trainstep.base.schemes import SCHEMES
from trainstep.base.tolerance import DRAWS
from trainstep.bench.parallel import ParallelCase
from trainstep.check import ranks, reference
from trainstep.check.one_process import STEPS, expected
from trainstep.check.ranks import OF_TWO_PARTS, _checksum, compare_with_one_process
from trainstep.check.ranks import agreement as judge
from trainstep.measure.outcome import Failure
from trainstep.parallel.process import AgreedError, joined
from trainstep.parallel.replicas import local_gradients
from trainstep.step.workload import Workload, WorkloadSource

CONFIG = StepConfig(device="cpu")
FLAT, SINGLE, TORCH_DDP = SCHEMES["flat"], SCHEMES["single"], SCHEMES["torch-ddp"]
FAILED = "one process could not train on the whole batch, to compare with: "


class Net(nn.Module):
    """Two layers and a frozen one. Compiling it does nothing."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
        self.frozen = nn.Linear(8, 8, bias=False).requires_grad_(False)

    def forward(self, x):
        return self.layers(self.frozen(x))

    def compile(self):
        return


class UsedByTwo(nn.Module):
    """Its second part is used by inputs that begin with a positive number alone."""

    def __init__(self):
        super().__init__()
        self.always, self.sometimes = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        return self.always(x) + (self.sometimes(x) if x[0, 0] > 0 else 0)


def mean_square(out, batch):
    return (out - batch[1]).square().mean()


def scaled(factor, out, batch):
    return mean_square(out, batch) * factor


def inputs():
    """The first two begin with a positive number, the others with a negative one."""
    every = [torch.randn(4, 8) for _ in range(STEPS + 2)]
    for number, each in enumerate(every):
        each[:, 0] = 1.0 if number < 2 else -1.0
    return every


def little(step, module=Net, loss=mean_square):
    torch.manual_seed(step.seed)
    built = module()
    batches = [(each, each.flip(-1)) for each in inputs()]
    return Workload(built, batches, loss, functools.partial(torch.optim.AdamW, lr=0.01))


def no_memory(out, batch):
    raise MemoryError("no room on the host")


def no_kernel(out, batch):
    raise RuntimeError("no kernel for this")


def not_here(out, batch):
    raise UnsupportedError("this machine has no such kernel")


def mistaken(out, batch):
    raise UsageError("the loss wants labels; give it some")


def source_of(**parts):
    return WorkloadSource("little", functools.partial(little, **parts))


SOURCE = source_of()


@functools.cache
def wanted_of(source=SOURCE, config=CONFIG):
    return expected(source, config, 1)


@pytest.fixture(scope="module")
def alone():
    """This process in a group of its own."""
    store = dist.HashStore()
    with (
        joined(torch.device("cpu"), rank=0, world_size=1, store=store) as process,
        quick(),
        mock.patch.object(reference, "MORE_DRAWS", DRAWS),
    ):
        yield process


def judged(process, wrong=None, config=CONFIG, source=SOURCE):
    wrong = wrong or Planted(FLAT)
    with wrong.planted():
        return judge(ParallelCase(source, config, wrong.scheme), wanted_of(source, config), process)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16-pure"])
def test_a_right_scheme_is_right_in_each_precision_and_in_float32(alone, precision):
    found = judged(alone, config=dataclasses.replace(CONFIG, precision=precision))
    assert (str(found), found.holds) == ("", True)
    assert (found.float32 is None) is (precision == "fp32")
    exact = found.float32 or found.gradients
    assert exact.gradient <= exact.gradient_allowed < 1e-5
    assert (
        found.parts["optimizer"].error <= found.parts["optimizer"].allowed < (0.5 if precision == "bf16-pure" else 1e-2)
    )


@pytest.mark.parametrize(("first", "last"), [(1, 1), (2, math.inf), (11, math.inf)])
def test_gradients_that_are_wrong_in_the_first_pass_or_in_a_late_one_are_found(alone, first, last):
    found = judged(alone, Planted(FLAT, handed(times(1.05), first=first, last=last)))
    assert found.gradients.scale == pytest.approx(0.05, rel=1e-3)
    assert "the gradients off by 0.05" in str(found)


@pytest.mark.parametrize(
    ("built", "said"),
    [
        (clipping(lambda clip, *_: lambda most: clip(2 * most)), "the gradients off by 1 of"),
        (clipping(without_clipping()), "the gradients off by 1 of"),
        (clipping(lambda clip, *_: lambda most: clip(most) * 1.1), "it clips by a norm of "),
        (no_sync(forget), OF_TWO_PARTS),
        (no_sync(scale(2.0)), OF_TWO_PARTS),
        (no_sync(forget, first=2), OF_TWO_PARTS),
    ],
)
def test_a_step_in_two_parts_is_clipped_to_half_of_its_norm(alone, built, said):
    found = judged(alone, Planted(FLAT, built))
    assert not found.holds
    assert said in str(found)
    assert all(part.is_right for part in found.parts.values()), "no other step has parts, or is clipped"


def test_a_factor_that_clipping_would_hide_shows_and_the_norm_that_is_returned_is_compared(alone):
    """Twice the gradients, clipped to the same norm, are the same."""
    found = judged(alone, Planted(FLAT, handed_in_parts(times(2.0))))
    assert found.gradients.scale == pytest.approx(1.0, rel=1e-3)
    (fault,) = found.faults
    known, norm = (float(each) for each in re.findall(r"\d\.\d+", fault))
    assert known == pytest.approx(2 * norm, rel=1e-4)


def handed_in_parts(change):
    """Gradients changed before they are clipped."""
    return clipping(lambda clip, replica, _: lambda most: (change(local_gradients(replica)), clip(most))[1])


def some_of(parameters):
    return torch.optim.AdamW(list(parameters)[:2], lr=0.01)


def test_gradients_that_the_optimizer_has_not_are_clipped_with_the_others_so_nothing_is(alone):
    """They would be in the norm, and are not among what is compared."""
    source = WorkloadSource("some", lambda step: dataclasses.replace(little(step), optimizer=some_of))
    assert wanted_of(source).norm is None
    assert judged(alone, Planted(FLAT, clipping(without_clipping())), source=source).holds
    assert not judged(alone, Planted(FLAT, no_sync(forget)), source=source).holds


@pytest.mark.parametrize(("number", "factor"), [(4, 0.0), (10, -1.0), (14, 1.02), (15, math.nan)])
def test_passes_over_one_batch_with_the_same_weights_have_the_same_gradients(alone, number, factor):
    found = judged(alone, Planted(TORCH_DDP, handed(times(factor, slice(1, 2)), wanted=lambda step: step == number)))
    assert found.gradients.is_right
    assert [f"the gradients of pass {number} on rank 0 are" in each for each in found.faults] == [True]


def test_a_difference_that_roundings_make_between_passes_is_none(alone):
    assert judged(alone, Planted(FLAT, handed(times(1.002), wanted=lambda step: step == 10))).faults == ()


class Normed(Net):
    """Batch normalisation between its layers."""

    def __init__(self):
        super().__init__()
        self.layers.insert(1, nn.BatchNorm1d(8))


@pytest.mark.parametrize("change", [still, still_later])
def test_statistics_that_stand_still_are_found(alone, change):
    source = source_of(module=Normed)
    assert judged(alone, source=source).holds
    found = judged(alone, Planted(FLAT, statistics(change)), source=source)
    assert "buffer layers.1.running_" in str(found)
    assert "of rank 0 off by 1 of" in str(found)


def test_steps_that_are_too_long_show_in_losses_and_in_how_far_parameters_move(alone):
    found = judged(alone, Planted(FLAT, optimizer=faster(1.05)))
    assert found.gradients.is_right
    assert found.parts["optimizer"].error == pytest.approx(0.05, rel=0.01)
    assert found.parts["update"].error == pytest.approx(0.05, rel=0.1)
    assert not found.parts["loss"].is_right, "the first loss is the same, and the others are not"


class Kinked(Net):
    """A rounding of its weights shows a thousand times over where dropout drops."""

    def forward(self, x):
        dropped = F.dropout(torch.ones_like(x), 0.5) == 0
        return super().forward(x) + dropped * torch.sin(2.0**10 * self.layers[2].weight.sum())


def test_training_that_turns_on_a_rounding_of_gradients_is_not_called_wrong(alone):
    source, rounding = source_of(module=Kinked), handed(times(1 + 2.0**-23, slice(1, 3)))
    found, wanted = judged(alone, Planted(FLAT, rounding), source=source), wanted_of(source)
    assert found.holds, str(found)
    assert wanted.update_allowed < found.parts["update"].error <= found.parts["update"].allowed < 0.5
    plain = wanted_of()
    assert plain.allowed(math.inf, math.inf) == (plain.loss_allowed, plain.update_allowed), "no more than it did"


def test_a_step_that_is_too_long_after_ten_is_the_optimizers_fault_alone(alone):
    """What it does to the weights of the last pass is less than bf16 rounds."""
    config = dataclasses.replace(CONFIG, precision="bf16")
    found = judged(alone, Planted(FLAT, from_step(11, faster(1.05))), config)
    assert (found.gradients.is_right, found.parts["optimizer"].is_right) == (True, False)
    assert (found.parts["loss"].error, found.parts["update"].error) == (0.0, 0.0), "training is over by then"


@pytest.mark.parametrize("factor", [2.0**50, 2.0**-20])
def test_gradients_of_any_size_are_shown(alone, factor):
    """A loss may be a sum over everything, or scaled by its author: what is shown has all of float32's digits."""
    found = judged(alone, source=source_of(loss=functools.partial(scaled, factor)))
    assert found.gradients.is_right, str(found)
    assert found.gradients.gradient < 1e-6


def test_a_parameter_that_later_batches_do_not_use_is_judged_by_the_two_that_do(alone):
    source = source_of(module=UsedByTwo)
    found = compare_with_one_process([ParallelCase(source, CONFIG, FLAT)], alone)
    assert found.allow_unused
    assert "sometimes.weight" in wanted_of(source).updates
    assert (str(by_scheme(found)[FLAT]), by_scheme(found)[FLAT].holds) == ("", True)


def test_each_scheme_is_judged_and_what_is_known_of_the_model_comes_with_it(alone):
    cases = [ParallelCase(SOURCE, CONFIG, scheme) for scheme in (SINGLE, FLAT, TORCH_DDP)]
    found = compare_with_one_process(cases, alone)
    assert list(by_scheme(found)) == [SINGLE, FLAT, TORCH_DDP]
    assert by_scheme(found)[SINGLE] is None, "it trains another model where there are several ranks"
    assert [by_scheme(found)[each].holds for each in (FLAT, TORCH_DDP)] == [True, True]
    assert (found.num_parameters, found.frozen) == (2 * (64 + 8) + 64, 64)
    assert (found.allow_unused, found.share_difference) == (False, 0.0)


def test_compiled_or_not_a_scheme_is_held_against_one_process_that_computed_once(alone):
    cases = [ParallelCase(SOURCE, dataclasses.replace(CONFIG, compile=each), FLAT) for each in ("off", "blocks")]
    judged = {case: f"judged with compile {case.config.compile}" for case in cases}
    with (
        mock.patch.object(ranks, "expected", side_effect=ranks.expected) as computed,
        mock.patch.object(ranks, "agreement", side_effect=lambda case, wanted, process: judged[case]),
    ):
        found = compare_with_one_process(cases, alone)
    assert found.cases == judged
    assert computed.call_count == 1


@pytest.mark.parametrize(
    ("loss", "status", "reason"),
    [
        (no_kernel, "failed", f"{FAILED}RuntimeError: no kernel for this"),
        (no_memory, "out of memory", f"{FAILED}no room on the host"),
        (not_here, "unsupported", "this machine has no such kernel"),
    ],
)
def test_what_one_process_cannot_train_is_the_failure_of_every_scheme(alone, loss, status, reason):
    cases = [ParallelCase(source_of(loss=loss), CONFIG, scheme) for scheme in (SINGLE, FLAT)]
    found = compare_with_one_process(cases, alone)
    assert list(by_scheme(found)) == [SINGLE, FLAT]
    for each in by_scheme(found).values():
        assert isinstance(each, Failure)
        assert each.status == status
        assert each.reason.startswith(reason)
    assert (found.num_parameters, found.frozen) == (0, 0)
    assert (found.allow_unused, found.share_difference) == (False, None)


def test_a_mistake_in_the_workload_is_that_of_the_whole_run(alone):
    with pytest.raises(AgreedError, match=r"^the loss wants labels; give it some$"):
        compare_with_one_process([ParallelCase(source_of(loss=mistaken), CONFIG, SINGLE)], alone)


def test_a_rank_that_has_nothing_to_compare_with_says_nothing(alone):
    assert judge(ParallelCase(SOURCE, CONFIG, FLAT), None, alone) is None


def test_an_error_in_a_comparison_is_raised_after_all_parts(alone):
    """Until then other ranks would wait for this one in a collective."""
    passed = []

    def fail(*_, **__):
        raise RuntimeError("no room on the host")

    wanted = expected(SOURCE, CONFIG, 1)
    wanted.gradients.compare = fail
    built = Planted(FLAT, built=lambda *_: passed.append("built"))
    with built.planted(), pytest.raises(RuntimeError, match="no room on the host"):
        judge(ParallelCase(SOURCE, CONFIG, FLAT), wanted, alone)
    assert len(passed) == 5, "three for gradients, one for updates and one for training"


@pytest.mark.parametrize("precision", ["fp32", "bf16-pure"])
def test_a_sum_in_the_16_bits_of_autocast_needs_autocast(alone, precision):
    narrow = SCHEMES["torch-fsdp2-bf16-reduce"]
    config = dataclasses.replace(CONFIG, precision=precision)
    with pytest.raises(UnsupportedError, match=f"{precision} has none; use bf16"):
        judge(ParallelCase(SOURCE, config, narrow), None, alone)


def test_on_a_cpu_each_rank_computes_with_the_threads_that_it_was_given(alone):
    """torchrun gives each one of them; more would take those of the others."""
    used = []

    def counted(out, batch):
        used.append(torch.get_num_threads())
        return mean_square(out, batch)

    before, given = torch.get_num_threads(), len(os.sched_getaffinity(0)) + 1
    torch.set_num_threads(given)
    try:
        compare_with_one_process([ParallelCase(source_of(loss=counted), CONFIG, FLAT)], alone)
        assert set(used) == {given}
    finally:
        torch.set_num_threads(before)


def test_a_compiled_step_is_gone_before_the_next_is_built_or_gradients_are_compared(alone):
    """Both would be in memory, where the reference is, too. Random numbers are those of eager code throughout."""
    from torch._inductor import config as inductor

    config, modules, alive, drawn = dataclasses.replace(CONFIG, compile="model"), [], [], []
    wanted = expected(SOURCE, config, 1)
    right = wanted.gradients.compare

    def note():
        alive.append(sum(each() is not None for each in modules))

    def build(step):
        note()
        workload = little(step)
        modules.append(weakref.ref(workload.module))
        workload.module.itself = [workload.module]  # a circle, as wrappers make them
        return workload

    def compare(*arguments, **options):
        note()
        return right(*arguments, **options)

    def loss(out, batch):
        drawn.append(inductor.fallback_random)
        return mean_square(out, batch)

    def noted(step):
        return dataclasses.replace(build(step), loss=loss)

    wanted.gradients.compare = compare
    gc.disable()
    try:
        assert judge(ParallelCase(WorkloadSource("circles", noted), config, FLAT), wanted, alone).holds
    finally:
        gc.enable()
    assert alive == [0] * 8, "five steps and three comparisons"
    assert drawn[-STEPS:] == [True] * STEPS, "of training"


def test_on_a_cpu_nothing_is_collected_between_steps_that_are_not_compiled(alone):
    """A collection takes longer than a small step."""
    with mock.patch.object(ranks, "release_memory") as release:
        assert judged(alone).holds
    assert not release.called


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float16, torch.float32, torch.float64])
def test_a_checksum_differs_for_each_bit_of_each_element(dtype):
    """And of their places, whatever the strides."""
    value = torch.arange(1, 7).to(dtype).view(2, 3)
    assert _checksum(value) == _checksum(value.t().contiguous().t())
    bits = value.flatten().view(torch.uint8)
    sums = [int(_checksum(each)) for each in (value, value.flip(0), value.roll(1, 1))]
    for place in range(len(bits)):
        for bit in range(8):
            changed = bits.clone()
            changed[place] ^= 1 << bit
            sums.append(int(_checksum(changed.view(dtype))))
    assert all(each != sums[0] for each in sums[1:])


def _between_two(process):
    found, rank = {}, process.rank
    with quick(), mock.patch.object(reference, "MORE_DRAWS", DRAWS):
        case = ParallelCase(SOURCE, CONFIG, FLAT)
        found["right"] = compare_with_one_process([case], process)
        with Planted(FLAT, handed(times(1.05), rank=1)).planted():
            found["apart"] = compare_with_one_process([case], process)
        for loss in (no_kernel, mistaken):
            try:
                single = ParallelCase(source_of(loss=loss if rank == 0 else mean_square), CONFIG, SINGLE)
                found[loss.__name__] = compare_with_one_process([single], process)
            except AgreedError as error:
                found[loss.__name__] = str(error)
    return found


@pytest.mark.distributed
def test_all_ranks_know_what_the_first_has_found(two):
    first, second = two.run(_between_two)
    right, elsewhere = first["right"], second["right"]
    assert (by_scheme(right)[FLAT].holds, str(by_scheme(right)[FLAT])) == (True, "")
    assert by_scheme(elsewhere) == by_scheme(right)
    assert (right.num_parameters, right.frozen) == (2 * (64 + 8) + 64, 64)
    assert right.share_difference == pytest.approx(0, abs=1e-6)
    assert (elsewhere.num_parameters, elsewhere.frozen, elsewhere.share_difference) == (0, 0, None)
    assert by_scheme(first["apart"])[FLAT].gradients.is_right, "the first rank's are"
    assert str(by_scheme(first["apart"])[FLAT]).endswith("its ranks have different parameters")
    assert by_scheme(first["no_kernel"]) == by_scheme(second["no_kernel"])
    assert by_scheme(first["no_kernel"])[SINGLE].reason.startswith(FAILED)
    assert first["mistaken"] == second["mistaken"] == "the loss wants labels; give it some"
