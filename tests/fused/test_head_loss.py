"""A script's head that is joined with its loss by our kernels."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.fused.places import DEVICE, DTYPES, HERE, draw
from trainstep.bench.check.fused import compare, expected
from trainstep.run.head_loss import HeadLoss

pytestmark = HERE


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_kernels_take_what_a_script_does_with_its_logits(dtype, reduction, monkeypatch) -> None:
    monkeypatch.setattr(F, "linear", F.linear)
    hidden, weight = draw(2, 9, 8, dtype=dtype, seed=1), draw(23, 8, dtype=dtype, seed=2)
    ids = torch.randint(23, (2, 9), generator=torch.Generator().manual_seed(3)).to(DEVICE)
    ids[1, 4:] = -100

    def loss(states, of):
        logits = F.linear(states, of)[:, :-1].contiguous()
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return F.cross_entropy(wide.view(-1, 23), ids[:, 1:].flatten(), reduction=reduction) / 3

    upstream = [torch.tensor(0.75, device=DEVICE)]
    plain, exact = expected(loss, (hidden, weight), upstream)
    head, notes = nn.Linear(8, 23, bias=False, device=DEVICE, dtype=dtype), []
    head.weight = nn.Parameter(weight.detach())
    HeadLoss(lambda line, how: notes.append(how)).see_model(head)
    own = loss(hidden, head.weight)
    found = [own.detach(), *torch.autograd.grad(own, (hidden, head.weight), upstream)]
    assert notes == ["by our kernels"]
    assert [each.dtype for each in found] == [each.dtype for each in plain]
    budget = compare(found, plain, exact, ("loss", "dhidden", "dweight"))
    assert budget.within, str(budget)
