"""Attribution: on real profiles of a CPU, where FLOPs per module are known exactly, and on traces made by hand."""

import dataclasses
import itertools

import pytest
import torch
from torch import nn

from trainstep.attention.eager import pieces_announced
from trainstep.base.config import ModelConfig, StepConfig
from trainstep.measure.costs import UNKNOWN_LISTS, Lists
from trainstep.measure.profile.chrome import read_chrome_trace
from trainstep.measure.profile.kernels import MATMULS, profile_of
from trainstep.measure.profile.ranges import announce, classify_range, record_steps
from trainstep.measure.profile.trace import Range, Stream, Trace, Work, attribute, owner_of
from trainstep.measure.timing import CpuClock
from trainstep.step.training_step import build_step
from trainstep.step.workload import WorkloadSource, builtin_source

MODEL = ModelConfig(vocab_size=256, d_model=32, d_ff=48, num_layers=4, num_heads=2)
BATCH, CONTEXT = 2, 16
TOKENS = BATCH * CONTEXT
STEPS = 2


def profiled(tmp_path, source: WorkloadSource | None = None, *, lists: Lists = UNKNOWN_LISTS, **settings):
    """The kernels of `STEPS` steps of a small model."""
    config = StepConfig(batch=BATCH, context=CONTEXT, device="cpu", **settings)
    step = build_step(source or builtin_source("toy", MODEL), config)
    batch = step.next_batch()
    with pieces_announced(lambda piece: announce("attention", piece)):
        trace = tmp_path / "trace.json.gz"
        record_steps(lambda phase: step(batch, phase=phase), CpuClock(), STEPS, trace, step.module)
    return profile_of(read_chrome_trace(tmp_path / "trace.json.gz"), lists)


def product_flops(profile, phase, module, piece=None):
    """FLOPs per step of the matrix products of a module in a phase."""
    chosen = (each for each in profile.kernels if each.family in MATMULS and each.flops)
    return sum(each.flops for each in chosen if (each.phase, each.module, each.piece) == (phase, module, piece)) / STEPS


OF_NO_MODULE = {"aten::ones_like", "aten::empty_like", "aten::empty_strided", "aten::fill_", "aten::detach", "detach"}
"""What makes the gradient that backward begins with, and copies the loss."""


def assert_all_attributed(profile):
    without = {each.name for each in profile.kernels if each.phase is None or each.module is None}
    assert without <= OF_NO_MODULE
    known = [each.name not in OF_NO_MODULE for each in profile.kernels]  # not timed: any may take long
    assert sum(known) / len(known) >= 0.88, "not all of it may lie there"


def test_an_optimizer_that_goes_parameter_by_parameter_on_a_cpu_moves_its_bytes_once(tmp_path):
    profile = profiled(tmp_path, lists=Lists(elements=MODEL.num_parameters), optimizer="adamw")
    moved = [each for each in profile.kernels if each.phase == "optimizer" and each.bytes is not None]
    assert {each.name for each in moved} >= {"aten::lerp_", "aten::addcdiv_", "aten::sqrt"}
    assert not [each.name for each in moved if each.name.startswith("aten::_foreach_")]


def test_every_module_s_flops_are_where_they_belong(tmp_path):
    profile = profiled(tmp_path)
    assert profile.steps == STEPS
    assert_all_attributed(profile)
    linear, up = 2 * TOKENS * MODEL.d_model**2, 2 * TOKENS * MODEL.d_model * MODEL.d_ff
    for layer, (name, flops) in itertools.product(
        range(MODEL.num_layers),
        [("attention.query", linear), ("attention.output", linear), ("feed_forward.up", up), ("feed_forward.down", up)],
    ):
        module = f"blocks.{layer}.{name}"
        assert product_flops(profile, "forward", module) == flops
        assert product_flops(profile, "backward", module) == 2 * flops
    scores = 2 * TOKENS * CONTEXT * MODEL.d_model
    for piece in ("scores", "weighted sum"):
        assert product_flops(profile, "forward", "blocks.0.attention", piece) == scores
        assert product_flops(profile, "backward", "blocks.0.attention", piece) == 2 * scores
    assert product_flops(profile, "forward", "head") == 2 * TOKENS * MODEL.d_model * MODEL.vocab_size
    softmax = [each for each in profile.kernels if each.name == "aten::_softmax" and each.is_call]
    assert {each.piece for each in softmax} == {"softmax"}
    assert len(softmax) == STEPS * MODEL.num_layers
    updates = {each.module for each in profile.kernels if each.phase == "optimizer"}
    assert updates == {"(optimizer)"}
    losses = {each.phase for each in profile.kernels if each.module == "(loss)"}
    assert losses == {"loss", "backward"}


def test_recomputation_belongs_to_its_module_in_backward(tmp_path):
    profile = profiled(tmp_path, checkpointing="every-1")
    assert_all_attributed(profile)
    linear = 2 * TOKENS * MODEL.d_model**2
    for layer in range(MODEL.num_layers):
        module = f"blocks.{layer}.attention.query"
        assert product_flops(profile, "forward", module) == linear
        assert product_flops(profile, "backward", module) == 3 * linear


def test_an_autograd_function_of_our_own(tmp_path):
    profile = profiled(tmp_path, attention="flash-reference")
    assert_all_attributed(profile)
    own = [each for each in profile.kernels if each.module == "blocks.1.attention" and each.phase == "backward"]
    assert sum(each.flops or 0 for each in own) > 0


class Reentrant(nn.Module):
    """Two linear layers behind a reentrant checkpoint, which runs a backward inside of backward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)

    def forward(self, x):
        x = self.first(x)
        return torch.utils.checkpoint.checkpoint(self.second, x, use_reentrant=True)


def test_reentrant_checkpointing(tmp_path):
    profile = profiled(tmp_path, toy_source(Reentrant))
    assert_all_attributed(profile)
    flops = 2 * 4 * 8 * 8
    assert product_flops(profile, "backward", "second") == 3 * flops
    assert product_flops(profile, "backward", "first") == flops, "its input needs no gradient"


class Tied(nn.Module):
    """One weight, used twice: its gradient is added up."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8, bias=False)

    def forward(self, x):
        return self.layer(self.layer(x))


def test_gradients_added_to_others_belong_to_their_module(tmp_path):
    profile = profiled(tmp_path, toy_source(Tied))
    adds = [each for each in profile.kernels if each.name in ("aten::add", "aten::add_") and each.phase == "backward"]
    assert sum(each.is_call for each in adds) == STEPS
    assert {each.module for each in adds} == {"layer"}


def toy_source(module):
    from trainstep.step.workload import Workload

    def build(step):
        return Workload(
            module=module(),
            batches=[(torch.randn(4, 8),)],
            loss=lambda outputs, _: outputs.square().mean(),
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        )

    return WorkloadSource("toy", build)


# Traces made by hand

MAIN, BACKWARD = (1, 10), (1, 20)


def ranges(*rows):
    """(thread, start, end, text[, sequence]) → ranges as a reader makes them."""
    made = []
    for thread, start, end, text, *sequence in rows:
        kind, name, number = classify_range(text, is_backward=text.endswith("Backward0"))
        made.append(Range(thread, start, end, kind, name, sequence[0] if sequence else number))
    return sorted(made, key=lambda each: (each.thread, each.start, -each.end))


def kernel(thread, launched, start=0.0):
    return Work("kernel", "kernel", start or launched + 100, 1.0, Stream(0, 7), (thread, launched))


def places(rows, *launches):
    trace = Trace(ranges(*rows), [kernel(*launch) for launch in launches], "GPU")
    found = attribute(trace)
    by_launch = {work.launch: place for work, place in found}
    return [by_launch[launch] for launch in launches]


FORWARD = [
    (MAIN, 0, 1000, "step:0"),
    (MAIN, 1, 400, "phase:forward"),
    (MAIN, 10, 100, "module:a"),
    (MAIN, 20, 90, "aten::linear", 5),
    (MAIN, 30, 40, "aten::t", 5),
    (MAIN, 50, 80, "aten::mm", 6),
    (MAIN, 110, 200, "module:b"),
    (MAIN, 111, 112, "aten::ones", 7),  # shows the number, but makes no node
    (MAIN, 120, 130, "aten::mm", 7),
    (MAIN, 410, 900, "phase:backward"),
]


def test_backward_on_another_thread_goes_by_sequence_numbers_not_by_the_clock():
    backward = [
        (BACKWARD, 420, 450, "autograd::engine::evaluate_function: MmBackward0", 7),
        (BACKWARD, 421, 440, "MmBackward0", 7),
        (BACKWARD, 422, 430, "aten::mm"),
        (BACKWARD, 460, 480, "autograd::engine::evaluate_function: torch::autograd::AccumulateGrad"),
        (BACKWARD, 461, 470, "aten::add_"),
        (BACKWARD, 500, 550, "autograd::engine::evaluate_function: MmBackward0", 6),
        (BACKWARD, 510, 520, "aten::mm"),
        (BACKWARD, 600, 650, "autograd::engine::evaluate_function: MysteryBackward0", 99),
    ]
    found = places(
        [*FORWARD, *backward], (BACKWARD, 425), (BACKWARD, 465), (BACKWARD, 515), (BACKWARD, 610), (MAIN, 55)
    )
    assert [(each.phase, each.module, each.step) for each in found] == [
        ("backward", "b", "0"),
        ("backward", "b", "0"),
        ("backward", "a", "0"),
        ("backward", None, "0"),
        ("forward", "a", "0"),
    ]


def test_numbers_of_the_backward_thread_are_not_mistaken_for_those_of_forward():
    """Recomputed operators count from the backward thread's own numbers, which here collide with forward's."""
    rows = [
        *FORWARD,
        (BACKWARD, 420, 500, "autograd::engine::evaluate_function: MmBackward0", 7),
        (BACKWARD, 430, 460, "module:recomputed"),
        (BACKWARD, 440, 450, "aten::mm", 6),
        (BACKWARD, 600, 650, "autograd::engine::evaluate_function: MmBackward0", 6),
    ]
    recomputed, after = places(rows, (BACKWARD, 445), (BACKWARD, 610))
    assert (recomputed.phase, recomputed.module) == ("backward", "recomputed")
    assert (after.phase, after.module) == ("backward", "a")


def test_what_loss_and_optimizer_start_belongs_to_them_and_the_rest_is_unknown():
    rows = [
        (MAIN, 0, 1000, "step:0"),
        (MAIN, 10, 50, "phase:loss"),
        (MAIN, 20, 30, "aten::log_softmax", 3),
        (MAIN, 60, 90, "phase:optimizer"),
        (MAIN, 100, 200, "phase:forward"),
        (BACKWARD, 300, 350, "autograd::engine::evaluate_function: LogSoftmaxBackward0", 3),
    ]
    loss, optimizer, outside, backward = places(rows, (MAIN, 25), (MAIN, 70), (MAIN, 150), (BACKWARD, 310))
    assert owner_of(loss) == "(loss)"
    assert owner_of(optimizer) == "(optimizer)"
    assert owner_of(outside) is None
    assert (backward.phase, owner_of(backward)) == ("backward", "(loss)")


def test_work_on_an_unknown_thread_is_unknown():
    ((_, place),) = attribute(Trace(ranges(*FORWARD), [kernel((1, 99), 50)], "GPU"))
    assert (place.phase, place.step) == (None, "0"), "it counts as unknown"


@pytest.mark.parametrize(
    ("unlaunched", "launched", "step"),
    [
        ((104, 7), [(105, 140, 7)], None),  # a warm-up's work runs on as the step begins
        ((150, 7), [(105, 140, 7)], "0"),  # a launch in the step that the profiler lost
        ((150, 20), [(105, 140, 7), (190, 210, 20)], None),  # another stream is further behind
        ((104, 20), [(105, 140, 7)], None),  # a stream that the steps do not use
        ((150, 20), [(105, 140, 7)], "0"),
        ((230, 7), [(105, 240, 7)], None),  # the device lags by a whole step
        ((104, 7), [], "0"),  # a reader without launches
        ((90, 7), [], None),
    ],
)
def test_a_stream_runs_in_order_so_work_before_its_first_launch_was_queued_before(unlaunched, launched, step):
    steps = ranges((MAIN, 100, 200, "ProfilerStep#3"), (MAIN, 200, 300, "ProfilerStep#4"))
    work = [Work("a", "kernel", unlaunched[0], 1.0, Stream(0, unlaunched[1]), None)]
    work += [Work("b", "kernel", start, 1.0, Stream(0, stream), (MAIN, time)) for time, start, stream in launched]
    found = {each.name: place.step for each, place in attribute(Trace(steps, work, "GPU"))}
    assert found["a"] == (step and "ProfilerStep#3")


def test_steps_are_told_apart_and_work_between_them_is_left_out():
    rows = [(MAIN, 0, 100, "step:0"), (MAIN, 200, 300, "step:1")]
    work = [kernel(MAIN, 50), kernel(MAIN, 150), dataclasses.replace(kernel(MAIN, 250), duration=3.0)]
    profile = profile_of(Trace(ranges(*rows), work, "GPU"))
    assert [each.step for each in profile.kernels] == ["0", "1"]
    assert profile.steps == 2
    assert profile.outside_us == 1.0
    assert profile.per_step_ms() == pytest.approx(2e-3)
