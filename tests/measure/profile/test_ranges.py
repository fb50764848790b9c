"""Ranges: who is announced, that nothing stays behind, and that compiled code is not compiled anew."""

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from trainstep.attention import attention, eager
from trainstep.attention.eager import PIECES, pieces_announced
from trainstep.measure.profile.ranges import (
    ANNOUNCED,
    ROOT,
    announce,
    classify_range,
    modules_announced,
    modules_to_announce,
    parse_range,
)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.relu = nn.Linear(4, 4), nn.ReLU()

    def forward(self, x):
        return self.relu(self.linear(x))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.tied = self.blocks[0].linear

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def announced(work):
    """Names of our own ranges, in the order in which they began."""
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        work()
    events = sorted(profiler.events(), key=lambda event: event.time_range.start)
    return [event.name for event in events if parse_range(event.name)]


def test_every_module_once_under_its_own_name_and_containers_not_at_all():
    names = [name for name, _ in modules_to_announce(Net())]
    inside = [f"blocks.{index}{part}" for index in range(2) for part in ("", ".linear", ".relu")]
    assert names == [ROOT, *inside]


def test_calls_are_ranges_while_entered_and_nothing_stays_behind():
    net, x = Net(), torch.randn(2, 4)
    with modules_announced(net):
        names = announced(lambda: net(x))
    assert names == [f"module:{name}" for name, _ in modules_to_announce(net)]
    assert announced(lambda: net(x)) == []
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in net.modules())


def test_a_failing_forward_closes_its_ranges():
    net = Net()
    with modules_announced(net):
        with pytest.raises(RuntimeError):
            net(torch.randn(2, 5))
        names = announced(lambda: net(torch.randn(2, 4)))
    assert names[0] == f"module:{ROOT}"
    assert len(names) == 7


def test_a_compiled_module_is_one_range_and_is_not_compiled_again():
    net, x = Net(), torch.randn(2, 4)
    compilations = []

    def backend(graph, inputs):
        compilations.append(graph)
        return graph

    for block in net.blocks:
        block.compile(backend=backend)
    net(x)
    before, compiled = len(compilations), net.blocks[0]._compiled_call_impl
    with modules_announced(net):
        names = announced(lambda: net(x))
    assert names == [f"module:{ROOT}", "module:blocks.0", "module:blocks.1"]
    assert net.blocks[0]._compiled_call_impl is compiled
    net(x)
    assert len(compilations) == before > 0


def test_attention_announces_its_pieces_and_then_no_more():
    q = torch.randn(1, 2, 8, 4)
    functions = [getattr(eager, name) for name in PIECES.values()]
    expected = attention(q, q, q, impl="eager", is_causal=True)
    with pieces_announced(lambda piece: announce("attention", piece)):
        names = announced(lambda: attention(q, q, q, impl="eager", is_causal=True))
        inside = attention(q, q, q, impl="eager", is_causal=True)
    assert names == ["attention:scores", "attention:softmax", "attention:weighted sum"]
    assert torch.equal(inside, expected)
    assert [getattr(eager, name) for name in PIECES.values()] == functions
    assert announced(lambda: attention(q, q, q, impl="eager")) == []


@pytest.mark.parametrize("text", ["phase", "phase:", "other:x", "aten::mm", "module", ":x"])
def test_other_people_s_ranges_are_not_ours(text):
    assert parse_range(text) is None


@pytest.mark.parametrize("kind", ANNOUNCED)
@pytest.mark.parametrize("name", ["a", "blocks.0.attention", "(model)", "weighted sum", "module:a", "0"])
def test_what_is_announced_is_read_back(kind, name):
    """Under torch.profiler, and with what NVTX appends."""
    with profile(activities=[ProfilerActivity.CPU]) as profiler, announce(kind, name):
        pass
    (text,) = [event.name for event in profiler.events() if parse_range(event.name)]
    assert parse_range(text) == (kind, name)
    assert classify_range(f"{text}, op_id = 3") == classify_range(text) == (kind, name, None)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("aten::mm, seq = 115", ("operator", "aten::mm", 115)),
        ("aten::mm, seq = 115, op_id = 7", ("operator", "aten::mm", 115)),
        ("aten::add_, op_id = 12, sizes = [[2, 3], []]", ("operator", "aten::add_", None)),
        ("MmBackward0, seq = 115", ("node", "MmBackward0", 115)),
        ("autograd::engine::evaluate_function: MmBackward0, seq = 3", ("node", "MmBackward0", 3)),
        ("torch::autograd::AccumulateGrad, op_id = 3", ("node", "torch::autograd::AccumulateGrad", None)),
        ("CompiledFunctionBackward, seq = 9", ("node", "CompiledFunctionBackward", 9)),
        ("CompiledFunction, seq = 9", ("operator", "CompiledFunction", 9)),
        ("module:blocks.0, op_id = 3", ("module", "blocks.0", None)),
        ("phase:backward", ("phase", "backward", None)),
        ("Optimizer.step#AdamW.step", ("other", "Optimizer.step#AdamW.step", None)),
        ("", ("other", "", None)),
        ("gloo:all_reduce", ("collective", "gloo:all_reduce", None)),
        ("## Call CompiledFxGraph abc ##", ("compiled", "## Call CompiledFxGraph abc ##", None)),
    ],
)
def test_what_a_range_is_called_says_what_it_is(text, expected):
    assert classify_range(text) == expected
