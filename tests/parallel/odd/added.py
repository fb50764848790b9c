"""Gradients that a backward adds to: kept at zero, finished twice, or thrown away; of data parallel training alone."""

import itertools

import torch
from torch import nn

from tests.parallel.odd.nets import UNUSED, net
from tests.parallel.odd.runs import ROWS, WIDTH, Scenario, steps


class Einsum(nn.Module):
    """The gradient comes with the weight's strides turned around."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, x):
        return torch.einsum("bi,oi->bo", x, self.weight)


class Transposed(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight, self.last = nn.Parameter(torch.randn(6, WIDTH).t()), nn.Parameter(torch.randn(6, WIDTH))

    def forward(self, x):
        return torch.tanh(torch.einsum("bi,ij->bj", x, self.weight)) @ self.last


class OneForThree(nn.Module):
    """One tensor is the gradient of two parameters, and of the output that the first layer's is computed from."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.one, self.other = nn.Parameter(torch.randn(ROWS, WIDTH)), nn.Parameter(torch.randn(ROWS, WIDTH))

    def forward(self, x):
        return self.first(x) + self.one + self.other


class Expanded(nn.Module):
    """The gradient is one number, seen many times."""

    def __init__(self):
        super().__init__()
        self.first, self.summed = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.randn(WIDTH, 2))

    def forward(self, x):
        return self.first(x) + self.summed.sum()


def _twice(run, step):
    run.backward(step, micro=1)
    run.finish()
    run.backward(step)


def _thrown_away(run, step):
    with run.no_sync():
        run.backward(step, micro=1, scale=10.0)
    run.optimizer.zero_grad(set_to_none=step % 2 == 0)
    run.backward(step)


def _to_zeros(run):
    stand_ins = getattr(run.module, "_stand_ins", {}).values()
    assert all(each.local is None for each in stand_ins), "nothing of this rank alone is held"
    run.optimizer.zero_grad(set_to_none=False)


HOW = {
    "kept at zero": steps(zero=_to_zeros),
    "finished twice": steps(backward=_twice),
    "thrown away": steps(backward=_thrown_away, zero=_to_zeros),
}
SCENARIOS = {}
for kind, how, transport, bucket_mb in itertools.product(
    (Einsum, Transposed, OneForThree, Expanded), HOW, ("collectives", "peer-copies"), (0, None)
):
    name, settings = (
        f"{kind.__name__}, {how}, {transport}, {bucket_mb}",
        {"transport": transport, "bucket_mb": bucket_mb},
    )
    SCENARIOS[name] = Scenario(name, kind, train=HOW[how], settings=settings)


def _used_at_first(net, x):
    """The first block is left out by a later backward: of the step, or in the next step."""
    return net.blocks[1](net.blocks[0](x) if net.micro or net.step % 2 == 0 else x)


SCENARIOS |= {
    f"left out, {how}": Scenario(how, net(body=_used_at_first), train=HOW[how], settings=UNUSED)
    for how in ("kept at zero", "finished twice")
}
