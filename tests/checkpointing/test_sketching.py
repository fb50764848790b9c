"""What a recomputed block saves is compared with what it saved in forward: in the first step, by more than rounding."""

import math
import types

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from trainstep.base.errors import UnsupportedError
from trainstep.checkpointing import sketching, writes
from trainstep.checkpointing.policies import BlockPolicy, Policy
from trainstep.checkpointing.recomputing import Checkpointing
from trainstep.checkpointing.sketching import sketch

OFFLOADING = Policy({f"blocks.{place}": BlockPolicy(recompute=True, host=(0,)) for place in range(2)})
KEEPING = Policy({f"blocks.{place}": BlockPolicy(recompute=True, kept=("addmm#0",)) for place in range(2)})
POLICIES = ["every-1", "selective", OFFLOADING, KEEPING]


calls = bytearray(1)  # memory that is not put back


def noise():
    calls[0] += 1
    return math.sin(2.4 * calls[0])


class Block(nn.Module):
    def __init__(self, noise, is_nested):
        super().__init__()
        self.fc, self.out = nn.Linear(8, 8), nn.Linear(8, 8)
        self.noise, self.is_nested = noise, is_nested

    def inner(self, x):
        return torch.tanh(self.out(x))

    def forward(self, x):
        x = x + torch.tanh(self.fc(x) * (1 + self.noise * noise()))
        return x + (checkpoint(self.inner, x, use_reentrant=False) if self.is_nested else self.inner(x))


def run(policy, noise=0.0, steps=3, precision=torch.float32, is_nested=False):
    torch.manual_seed(0)
    calls[0] = 0
    module = nn.Module()
    module.blocks = nn.ModuleList(Block(noise, is_nested) for _ in range(2))
    Checkpointing(module, policy)
    for _ in range(steps):
        with torch.autocast("cpu", precision, enabled=precision is not torch.float32):
            x = torch.ones(3, 5, 8).cumsum(1)
            for block in module.blocks:
                x = block(x)
        x.float().square().mean().backward()
    return [each.grad for each in module.parameters()]


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("is_nested", [False, True])
@pytest.mark.parametrize("policy", POLICIES)
def test_a_difference_names_the_block_and_equal_blocks_pass(policy, is_nested, precision):
    if policy is KEEPING and precision is torch.bfloat16:
        pytest.skip("autocast casts, and the product has another number")
    options = {"precision": precision, "is_nested": is_nested}
    plain = run("none", **options)
    assert all(torch.equal(a, b) for a, b in zip(run(policy, **options), plain, strict=True))
    with pytest.raises(UnsupportedError, match=r"blocks\.\d does not compute in backward what it computed in forward"):
        run(policy, noise=0.5, steps=1, **options)


@pytest.mark.parametrize(("noise", "precision"), [(1e-6, torch.float32), (1e-3, torch.bfloat16)])
def test_rounding_is_no_difference_but_where_algorithms_are_deterministic(noise, precision):
    run("every-1", noise, precision=precision)
    torch.use_deterministic_algorithms(True)
    try:
        with pytest.raises(UnsupportedError, match="does not compute in backward"):
            run("every-1", 10 * noise, precision=precision)
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("policy", POLICIES)
def test_after_the_first_step_no_values_are_read(policy, monkeypatch):
    steps, read = [], []
    for module in (sketching, writes):
        monkeypatch.setattr(module, "sketch", lambda tensor: read.append(len(steps)))
    module = nn.Module()
    module.blocks = nn.ModuleList(Block(0.0, False) for _ in range(2))
    Checkpointing(module, policy)
    for _ in range(3):
        x = torch.ones(3, 5, 8)
        for block in module.blocks:
            x = block(x)
        x.sum().backward()
        steps.append(1)
    assert set(read) == {0}


def scrambled(x):
    return x.flatten()[torch.randperm(x.numel())].view(x.shape)


CHANGES = {
    "noise": lambda x: x + 0.1 * torch.randn_like(x),
    "scale": lambda x: 1.1 * x,
    "shift": lambda x: x + 0.1,
    "order": scrambled,
    "rows": lambda x: x.roll(1, 0),
    "signs": lambda x: x * torch.randint_like(x, 2).mul(2).sub(1),
    "zero": torch.zeros_like,
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("part", [7, 10**6])
def test_a_sketch_estimates_the_relative_error(change, part, monkeypatch):
    torch.manual_seed(0)
    monkeypatch.setattr(sketching, "PART", part)
    estimates = []
    for x in (torch.randn(9, 33), torch.rand(33, 9).T, torch.rand(9, 1).expand(9, 33), torch.randn(5).add(3)):
        y = CHANGES[change](x)
        truth = float((x - y).norm() / torch.maximum(x.norm(), y.norm()))
        estimates.append(sketching._relative_error(sketch(x), sketch(y)) / truth if truth else 1.0)
        assert sketching._relative_error(sketch(x), sketch(x.clone())) == 0
    assert sorted(estimates)[1] > 0.2
    assert max(estimates) < 4


def test_what_a_sketch_reads():
    nan, inf = torch.tensor([1.0, float("nan")]), torch.tensor([1.0, float("inf")])
    assert sketching._relative_error(sketch(nan), sketch(nan.clone())) == 0
    assert sketching._relative_error(sketch(nan), sketch(inf)) > 0.1
    for dtype in (torch.bool, torch.int64, torch.bfloat16, torch.complex64, torch.float8_e4m3fn):
        a, b = torch.ones(3).to(dtype), torch.zeros(3).to(dtype)
        assert sketching._relative_error(sketch(a), sketch(b)) > 0.7
    for none in (torch.ones(0), torch.ones(2, device="meta"), torch.ones(2, 2).to_sparse()):
        assert sketch(none) is None


@pytest.mark.parametrize(
    ("saved", "unwritten"),
    [
        (["cuda float32 3", "cpu int64 0", "cpu int64 0", "cuda float32 3"], {1, 2}),
        (["cuda float32 3", "cpu int64 0", "cuda float32 3", "cpu int64 0"], set()),  # counters of a block
        (["cpu float32 3", "cpu int64 0", "cpu int64 0"], set()),
        (["cuda float32 3", "cuda uint64 1", "cuda uint64 0"], {1, 2}),
    ],
)
def test_a_generators_state_that_attention_does_not_write_is_not_compared(saved, unwritten):
    def of(form):
        device, dtype, dims = form.split()
        return types.SimpleNamespace(is_cuda=device == "cuda", dtype=getattr(torch, dtype), shape=(1,) * int(dims))

    assert sketching._unwritten([of(form) for form in saved]) == unwritten
