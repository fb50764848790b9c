"""Ranks that have gradients of different parameters send alike all the same, by either transport."""

import contextlib
from typing import NamedTuple

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from trainstep.parallel import FullyShardedDataParallel

pytestmark = pytest.mark.distributed

WIDTH = 8


class Experts(nn.Module):
    """Calls the ones that are named, one after another; "skip" is none. `narrow` is trained in bfloat16."""

    def __init__(self, again):
        super().__init__()
        self.a, self.b, self.unused = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.narrow = nn.Linear(WIDTH, WIDTH, bias=False).bfloat16()
        self.gain = nn.Parameter(torch.ones(WIDTH))
        self.again = again

    def forward(self, x, names):
        x = x * self.gain
        for name in names:
            expert = getattr(self, name)
            x = checkpoint(expert, x, use_reentrant=True) if self.again else expert(x)
        return x


class Net(nn.Module):
    def __init__(self, case):
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH) if case.first else nn.Identity()
        self.blocks = nn.ModuleList([Experts(case.again), Experts(case.again)])
        for block in self.blocks:
            block.gain.requires_grad_(case.gain)

    def forward(self, x, names):
        x = self.first(x)
        for block in self.blocks:
            x = block(x, names)
        return x.float().square().mean()


def _batch(rank, call):
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(10 * rank + call))


class Case(NamedTuple):
    plan: list[list[list[str]]]  # what each rank's calls use
    apart: bool = False  # whether all but the last are under no_sync
    again: bool = False  # re-entrant checkpointing
    first: bool = False  # a layer before the blocks; without it the first block's input needs no gradient
    gain: bool = True  # whether it is trained


CASES = {
    "different experts": Case([[["a"]], [["b"]]]),
    "two backwards": Case([[["a"], ["a"]], [["a"], ["b"]]]),
    "twice in one backward": Case([[["a", "a"]], [["a", "b"]]], again=True, first=True),
    "twice, and the first block's input needs no gradient": Case([[["a", "a"]], [["a", "b"]]], again=True),
    "nothing to add up on one rank": Case([[["a"], ["a"]], [[], ["a"]]], apart=True),
    "added up on one rank alone": Case([[["a"], []], [[], ["b"]]], apart=True),
    "experts of different dtypes": Case([[["a"]], [["narrow"]]]),
    "all on one rank": Case([[["a", "b", "unused", "narrow"]], [["a"]]]),
    "all on one rank, in two backwards": Case([[["a", "b", "unused", "narrow"], ["a"]], [["a"], ["b"]]]),
    "none on one rank": Case([[["a"]], [[]]], first=True, gain=False),
    "none on one rank, in two backwards": Case([[["a"], []], [[], ["b"]]], first=True, gain=False),
    "none on one rank, added up": Case([[["a"], ["a"]], [[], []]], apart=True, first=True, gain=False),
}


def _make(case):
    torch.manual_seed(0)
    return Net(case)


def _train(process, case, transport):
    sharded = FullyShardedDataParallel(_make(case), compute_dtype=torch.bfloat16, transport=transport)
    calls = case.plan[process.rank]
    for number, names in enumerate(calls):
        with sharded.no_sync() if case.apart and number + 1 < len(calls) else contextlib.nullcontext():
            sharded(_batch(process.rank, number), names).backward()
    sharded.finish_gradient_synchronization()
    gradients = {name: parameter.grad for name, parameter in sharded.named_parameters()}
    plain = {name: getattr(grad, "plain", grad) for name, grad in gradients.items() if grad is not None}
    return {name: torch.empty(grad.shape, dtype=grad.dtype).copy_(grad) for name, grad in plain.items()}


def _alone(case):
    """The mean over ranks of what each one's calls add up to, in float32."""
    module, total = _make(case).bfloat16(), {}
    for rank, calls in enumerate(case.plan):
        for number, names in enumerate(calls):
            module.zero_grad()
            module(_batch(rank, number).bfloat16(), names).backward()
            for name, parameter in module.named_parameters():
                if parameter.grad is not None:
                    total[name] = total.get(name, 0) + parameter.grad.float() / len(case.plan)
    return total


@pytest.mark.parametrize("transport", ["collectives", "peer-copies"])
@pytest.mark.parametrize("case", CASES)
def test_ranks_need_not_have_gradients_of_the_same_parameters(two, case, transport):
    by_rank = two.run(_train, CASES[case], transport)
    expected = _alone(CASES[case])
    assert len(expected) >= 3
    for ours in by_rank:
        assert {name.removeprefix("module.") for name in ours} == set(expected)
    for name, wanted in expected.items():
        parts = [ours[f"module.{name}"].float() for ours in by_rank]
        whole = torch.cat(parts) if wanted.dim() > 1 else parts[0]
        assert torch.linalg.vector_norm(whole - wanted) <= 0.01 * torch.linalg.vector_norm(wanted), name
