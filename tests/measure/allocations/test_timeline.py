import pytest

from trainstep.measure.allocations.timeline import (
    Allocation,
    Block,
    Frame,
    Group,
    PhaseSpan,
    Timeline,
    interned,
    made_at,
    outline,
)


def made(start, end, size, owner="temporaries"):
    return Allocation(Block(start, end, size, address=start), owner, "", "")


FIVE_EVENTS = Timeline(
    (made(0, None, 100, "parameters"), made(1, 4, 10), made(2, 3, 50), made(5, None, 7, "gradients")),
    events=5,
    phases=(PhaseSpan("forward", 0, 3), PhaseSpan("backward", 3, 5)),
)


def test_live_bytes_of_each_state():
    assert FIVE_EVENTS.live.tolist() == [100, 110, 160, 110, 100, 107]
    assert (FIVE_EVENTS.peak, FIVE_EVENTS.peak_state) == (160, 2)
    assert FIVE_EVENTS.totals(lambda each: each.owner, 2) == {"parameters": (100, 1), "temporaries": (60, 2)}
    assert FIVE_EVENTS.totals(lambda each: each.owner) == {
        "parameters": (100, 1), "temporaries": (60, 2), "gradients": (7, 1)
    }  # fmt: skip
    assert [FIVE_EVENTS.phase_of(state) for state in range(6)] == ["", *["forward"] * 3, *["backward"] * 2]


TORCH, MINE = Frame("/site/torch/nn/functional.py", 9, "linear"), Frame("C:\\me\\model\\block.py", 88, "forward")
UNWIND, ALLOCATOR = Frame("??", 0, "torch::unwind::unwind()"), Frame("/b/Allocator.cpp", 7, "c10::malloc(unsigned)")
ENGINE = Frame("/b/engine.cpp", 0, "torch::autograd::Engine::evaluate_function(std::shared_ptr<GraphTask>&)")


def node(name):
    return Frame("/b/Functions.cpp", 0, f"torch::autograd::{name}::apply(std::vector<at::Tensor>&&)")


@pytest.mark.parametrize(
    ("frames", "owner"),
    [
        ((Frame("??", 0, "at::empty"), TORCH, MINE), "model/block.py:88 forward"),
        ((UNWIND, ALLOCATOR, node("generated::AddmmBackward0"), ENGINE), "backward: Addmm"),
        ((UNWIND, node("generated::NativeLayerNormBackward0")), "backward: NativeLayerNorm"),
        ((UNWIND, node("AccumulateGrad"), ENGINE), "backward: AccumulateGrad"),
        ((UNWIND, MINE, node("PyNode"), ENGINE), "model/block.py:88 forward"),  # a Function's own backward
        ((UNWIND, node("generated::SumBackward1"), ENGINE, MINE), "backward: Sum"),  # as on a CPU
        ((UNWIND, node("PyNode"), ENGINE), "(backward)"),
        ((UNWIND, ALLOCATOR, ENGINE), "(backward)"),
        ((UNWIND, ALLOCATOR, TORCH), "nn/functional.py:9 linear"),
        ((UNWIND, ALLOCATOR), ""),
        ((), ""),
    ],
)  # fmt: skip
def test_the_owner_is_the_innermost_line_outside_of_torch_or_node_of_backward(frames, owner):
    assert made_at(frames) == owner


def test_an_outline_loses_nothing():
    drawn = outline(FIVE_EVENTS, lambda each: Group(each.owner, 0 if each.owner == "parameters" else 1), kept=2, bins=6)
    assert [group.name for group in drawn.groups] == ["parameters", "gradients", "temporaries"]
    assert [each.block.bytes for each, _ in drawn.kept] == [100, 50]
    assert drawn.smallest == 50
    assert drawn.edges.tolist() == [0, 1, 2, 3, 4, 5, 6]
    assert drawn.total.tolist() == FIVE_EVENTS.live.tolist()
    assert drawn.rest.tolist() == [[0] * 6, [0, 0, 0, 0, 0, 7], [0, 10, 10, 10, 0, 0]]


def test_thinned_out_sums_keep_the_peak():
    drawn = outline(FIVE_EVENTS, lambda each: Group("all", 0), kept=0, bins=2)
    assert drawn.edges.tolist() == [0, 3, 6]
    assert drawn.total.tolist() == drawn.rest[0].tolist() == [160, 110]


def test_interned():
    assert interned(["b", "a", "b"]) == (["b", "a"], [0, 1, 0])
