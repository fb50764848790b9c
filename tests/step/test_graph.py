"""CUDA graphs of a step: the same numbers as without, other random numbers in each step, and what is refused."""

import dataclasses
import random
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from trainstep.base.config import SIZES, StepConfig
from trainstep.base.errors import UnsupportedError
from trainstep.bench.step import StepCase, run_cases
from trainstep.check.step import StepCheck, plain_form
from trainstep.measure.step import measure_step
from trainstep.step.training_step import build_step
from trainstep.step.workload import Workload, WorkloadSource, builtin_source

GRAPH = StepConfig(graph="step", batch=2, context=64, attention="sdpa", device="cuda")
TINY = builtin_source("tiny", SIZES["tiny"], None)


class Net(nn.Module):
    """Two layers with a dropout, a running mean, and whatever else a test plants in forward."""

    def __init__(self, plant=lambda net, x: x, p=0.5):
        super().__init__()
        self.one, self.norm, self.two = nn.Linear(16, 64), nn.BatchNorm1d(64), nn.Linear(64, 16)
        self.drop, self.plant = nn.Dropout(p), plant
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x):
        return self.two(self.drop(self.norm(self.one(self.plant(self, x)))))


ADAMW = partial(torch.optim.AdamW, lr=1e-2)


def workload(plant=lambda net, x: x, *, rows=lambda number: 8, optimizer=ADAMW, p=0.5):
    def build(step):
        torch.manual_seed(0)
        batches = [torch.randn(rows(number), 16) for number in range(5)]
        return Workload(
            Net(plant, p), batches, lambda y, x: F.mse_loss(y, x), optimizer, forward=lambda module, x: module(x)
        )

    return WorkloadSource("net", build)


def trained(source, config, steps=8, change=lambda step, number: None):
    """Losses and weights of so many steps."""
    step = build_step(source, config)
    torch.manual_seed(1)
    losses = []
    for number in range(steps):
        change(step, number)
        losses.append(step(step.next_batch()))
    return [float(each) for each in losses], [each.detach().clone() for each in step.module.state_dict().values()]


def without_graph(config):
    return dataclasses.replace(config, graph="off")


def assert_same(found, expected):
    assert found[0] == expected[0]
    assert all(torch.equal(a, b) for a, b in zip(found[1], expected[1], strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize(
    "form",
    [
        {},
        {"optimizer": "adamw-fused"},
        {"precision": "bf16", "optimizer": "adamw-fused"},
        {"precision": "bf16", "compile": "blocks", "loss": "fused", "fused": "rope", "attention": "flash-triton"},
        {"precision": "bf16", "checkpointing": "every-1"},
        {"precision": "fp16", "optimizer": "adamw-fused"},
    ],
    ids=str,
)
def test_a_step_in_a_graph_trains_bit_for_bit_as_without(form):
    config = dataclasses.replace(GRAPH, **form)
    # A learning rate that is a tensor is rounded to float32, and so the plain one has to be.
    own = [trained(TINY, each, change=as_tensor) for each in (config, without_graph(config))]
    assert_same(*own)
    assert own[0][0][0] > own[0][0][-1]


def as_tensor(step, number):
    """Have the plain step's optimizer take the same path as one in a graph."""
    for group in step.optimizer.param_groups if number == 0 and step.graph is None else ():
        group |= {"lr": torch.tensor(group["lr"], device="cuda"), "capturable": True}


@pytest.mark.gpu
def test_dropout_buffers_and_seeds_are_those_of_the_step_without_a_graph():
    assert_same(*(trained(workload(), each, change=as_tensor) for each in (GRAPH, without_graph(GRAPH))))


@pytest.mark.gpu
def test_elements_that_are_dropped_differ_from_step_to_step():
    source = workload(optimizer=partial(torch.optim.SGD, lr=0.0), rows=lambda number: 8)
    step = build_step(source, GRAPH)
    batch = step.next_batch()
    losses = {float(step(batch)) for _ in range(6)}
    assert len(losses) == 6


@pytest.mark.gpu
def test_a_schedule_reaches_the_graph():
    def schedule(step, number):
        as_tensor(step, number)
        for group in step.optimizer.param_groups:
            group["lr"].fill_(1e-2 / (number + 1))

    assert_same(*(trained(TINY, each, change=schedule) for each in (GRAPH, without_graph(GRAPH))))


@pytest.mark.gpu
def test_parts_and_clipping_in_a_graph_are_those_without():
    found = []
    for config in (GRAPH, without_graph(GRAPH)):
        step = build_step(TINY, config)
        as_tensor(step, 0)
        results = [step.accumulate([step.next_batch() for _ in range(3)], 0.1) for _ in range(5)]
        found.append([(float(loss), float(norm)) for loss, norm in results])
    assert found[0] == found[1]
    assert found[0][0][1] > 0.1  # it was clipped


@pytest.mark.gpu
def test_a_loaded_optimizer_is_the_one_that_the_graph_updates():
    found = []
    for config in (GRAPH, without_graph(GRAPH)):
        step = build_step(TINY, config)
        as_tensor(step, 0)
        batches = [step.next_batch() for _ in range(10)]
        for batch in batches[:5]:
            step(batch)
        step.optimizer.load_state_dict(step.optimizer.state_dict())  # into other memory
        found.append([float(step(batch)) for batch in batches[5:]])
    assert found[0] == found[1]


@pytest.mark.gpu
def test_gradients_are_not_written_over_by_the_next_pass():
    step = build_step(TINY, GRAPH)
    step.gradients(step.next_batch())
    first = [each.grad for each in step.module.parameters()]
    kept = [each.clone() for each in first]
    step.optimizer.zero_grad(set_to_none=True)
    step.gradients(step.next_batch())
    assert all(torch.equal(a, b) for a, b in zip(first, kept, strict=True))
    assert not all(torch.equal(a, each.grad) for a, each in zip(first, step.module.parameters(), strict=True))


def grows(net, x):
    net.scale = net.scale * 1.0
    return x


PLANTED = {
    "draws random numbers on the host": lambda net, x: x * random.random(),
    "replaces a buffer": grows,
    "reads a value of the device on the host": lambda net, x: x * float(x.sum()),
}


@pytest.mark.gpu
@pytest.mark.parametrize("why", PLANTED)
def test_what_a_graph_would_repeat_is_refused(why):
    step = build_step(workload(PLANTED[why]), GRAPH)
    with pytest.raises(UnsupportedError, match=why):
        step(step.next_batch())
    torch.ones(1, device="cuda").sum().item()  # the device goes on


@pytest.mark.gpu
def test_batches_of_another_shape_are_refused():
    step = build_step(workload(rows=lambda number: 8 + number // 2), GRAPH)
    step(step.next_batch())
    step(step.next_batch())
    with pytest.raises(UnsupportedError, match=r"\(9, 16\).*the first had.*\(8, 16\).*one shape"):
        step(step.next_batch())


class Lion(torch.optim.Optimizer):
    """Has neither form."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 1e-3})

    def step(self):
        raise AssertionError


@pytest.mark.gpu
def test_an_optimizer_without_a_capturable_form_is_refused():
    with pytest.raises(UnsupportedError, match="Lion has no fused implementation"):
        build_step(workload(optimizer=Lion), GRAPH)


@pytest.mark.gpu
def test_a_step_in_a_graph_is_right_and_its_peak_is_that_of_the_step_without():
    source = builtin_source("small", SIZES["small"], None)
    config = dataclasses.replace(GRAPH, batch=4, context=512, precision="bf16", optimizer="adamw-fused")
    verdict = StepCheck(source, plain_form(config)).judge(config)
    assert verdict.is_right, str(verdict)
    peaks = [measure_step(source, each, warmup=3, steps=7).memory.peak for each in (config, without_graph(config))]
    assert peaks[0] <= 1.05 * peaks[1]


@pytest.mark.gpu
def test_a_row_of_a_step_in_a_graph_has_its_phases_and_says_so():
    (row,) = run_cases([StepCase(TINY, GRAPH, warmup=3, steps=7)])
    assert (row.status, row.graph) == ("ok", "step")
    assert all(row.times[name].median > 0 for name in ("forward", "loss", "backward", "optimizer"))


def test_a_graph_needs_a_gpu():
    with pytest.raises(UnsupportedError, match="CUDA graphs need a GPU"):
        build_step(TINY, dataclasses.replace(GRAPH, device="cpu"))


def test_a_row_says_nothing_of_graphs_where_there_is_none():
    (row,) = run_cases(
        [StepCase(TINY, dataclasses.replace(without_graph(GRAPH), device="cpu"), warmup=1, steps=1)], check=False
    )
    assert row.graph is None
