"""SwiGLU: results and gradients within the budget, strided inputs, and what is kept for backward."""

import pytest
import torch
from torch import nn

from tests.fused.places import DEVICE, DTYPES, HERE, draw
from trainstep.bench.check.fused import check
from trainstep.errors import UsageError
from trainstep.fused import eager, swiglu, swiglu_of

pytestmark = HERE
NAMES = ("y", "dgate", "dup")


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1,), (3, 5, 33), (2, 1024), (7, 1500)], ids=str)
def test_results_and_gradients(shape, dtype) -> None:
    gate, up = (draw(*shape, dtype=dtype, seed=seed) for seed in (1, 2))
    budget = check(swiglu, eager.swiglu, (gate, up), NAMES)
    assert budget.within, str(budget)


def test_halves_of_one_product() -> None:
    both = draw(6, 90)
    gate, up = both.chunk(2, -1)
    (found,) = torch.autograd.grad(swiglu(gate, up).sum(), both)
    (expected,) = torch.autograd.grad(eager.swiglu(gate, up).sum(), both)
    torch.testing.assert_close(found, expected)


def test_far_from_zero_nothing_overflows() -> None:
    gate = torch.tensor([-1e4, -200.0, 0.0, 200.0, 1e4], device=DEVICE).requires_grad_()
    up = torch.ones_like(gate, requires_grad=True)
    y = swiglu(gate, up)
    torch.testing.assert_close(y.detach(), torch.tensor([0.0, 0.0, 0.0, 200.0, 1e4], device=DEVICE))
    dgate, _ = torch.autograd.grad(y.sum(), (gate, up))
    torch.testing.assert_close(dgate, torch.tensor([0.0, 0.0, 0.5, 1.0, 1.0], device=DEVICE))


@pytest.mark.parametrize("recompute", [False, True])
def test_inputs_are_kept_or_computed_again(recompute) -> None:
    gate, up = (nn.Linear(12, 50, bias=False, device=DEVICE) for _ in range(2))
    x, kept, calls = draw(9, 12), [], []
    gate.register_forward_hook(lambda *_: calls.append("gate"))

    def keep(tensor):
        kept.append(tuple(tensor.shape))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        y = swiglu_of(x, gate, up, recompute=recompute)
    assert ((9, 50) in kept) is not recompute
    leaves = (x, gate.weight, up.weight)
    found = torch.autograd.grad(y.sum(), leaves)
    expected = torch.autograd.grad(eager.swiglu(gate(x), up(x)).sum(), leaves)
    for own, other in zip(found, expected, strict=True):
        torch.testing.assert_close(own, other)
    assert len(calls) == 2 + recompute


def test_bad_inputs() -> None:
    x = draw(4, 8)
    for gate, up in ((x, x[:2]), (x, x.half()), (x[:0], x[:0])):
        with pytest.raises(UsageError, match="one shape and dtype, neither empty: got gate"):
            swiglu(gate, up)
    with pytest.raises(TypeError, match="got gate"):
        swiglu(x.double(), x.double())
