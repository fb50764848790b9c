"""`plan --workload`: which policies are traced, operators timed alone, and the measured step beside the prediction."""

import math

import pytest
import torch
from torch import nn

from tests.bench.test_tracing import CPU, OWN, source_of
from trainstep.base.config import StepConfig
from trainstep.base.errors import UnsupportedError
from trainstep.bench.planning import host_seconds, machine_here, timed_here, traced_cases
from trainstep.bench.tracing import trace_calls
from trainstep.measure import operators
from trainstep.measure.operators import operator_seconds


def test_policies_are_traced_as_far_as_they_can_be():
    found = traced_cases(OWN, StepConfig(device="cpu", precision="bf16"))
    assert list(found) == ["none", "every-1", "selective"]
    assert found["every-1"].step.peak < found["selective"].step.peak < found["none"].step.peak
    assert found["none"].sharded.weights == found["none"].step.weights // 2
    without_blocks = source_of(lambda: nn.Linear(16, 16))
    assert list(traced_cases(without_blocks, CPU)) == ["none"]
    with pytest.raises(UnsupportedError, match="needs blocks"):
        traced_cases(without_blocks, CPU, ["every-1"])


def test_operators_take_longer_where_there_is_more_to_do():
    times = {}
    for width in (32, 512):
        _, calls = trace_calls(source_of(lambda width=width: nn.Linear(width, width), shape=(512, width)), CPU)
        seconds = operator_seconds(calls, torch.device("cpu"))
        assert all(each is not None and each > 0 for each in seconds)
        times[width] = next(each for call, each in zip(calls, seconds, strict=True) if call.name == "aten::addmm")
    assert times[512] > 8 * times[32], "256 times the FLOPs"


def test_an_embedding_is_looked_up_all_over(monkeypatch):
    class Words(nn.Module):
        def __init__(self):
            super().__init__()
            self.words = nn.Embedding(1000, 4)

        def forward(self, x):
            return self.words((x * 0).long())

    _, calls = trace_calls(source_of(Words), CPU)
    tables = [call for call in calls if "embedding" in call.name]
    assert len(tables) == 2
    for call in tables:
        (args, _) = operators._arguments(call, torch.device("cpu"))
        (indices,) = (each for each in args if isinstance(each, torch.Tensor) and each.dtype == torch.int64)
        assert len(indices.unique()) > 50
        assert int(indices.max()) < 1000


def test_a_step_is_timed_by_its_operators_and_as_a_whole():
    source = source_of(lambda: nn.Sequential(*(nn.Linear(256, 256) for _ in range(4))), shape=(256, 256))
    traced, row = timed_here(source, CPU)
    assert all(each.seconds is not None for each in traced.operators)
    assert row.status == "ok"
    assert row.strategy == "single"
    assert abs(row.memory_error) < 1e-3
    assert row.time_error == pytest.approx(row.predicted_ms / row.step_ms - 1)
    assert abs(math.log(row.predicted_ms / row.step_ms)) < math.log(3), "of one order, on whatever machine this is"


def test_the_host_takes_something_for_every_operator():
    found = host_seconds(torch.device("cpu"))
    assert set(found) == {"forward", "loss", "backward", "optimizer"}
    assert found["forward"] > 0
    assert max(found.values()) < 1e-2


def test_a_cpu_is_a_machine_by_itself():
    machine = machine_here(torch.device("cpu"), "fp32")
    assert not machine.is_connected
    assert machine.memory_bytes > 2**28
    assert machine.matmul_flops["fp32"] > 1e8
    assert machine.copy_bytes_per_s > 1e8
