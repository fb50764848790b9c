"""A script's head that is joined with its loss by our kernels."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.fused.places import DEVICE, DTYPES, HERE, draw
from trainstep.base.errors import UnsupportedError
from trainstep.check.fused import compare, expected
from trainstep.ladder.places.head_loss import HeadLoss

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
    assert budget.is_right, str(budget)


@pytest.mark.parametrize("is_weight", [True, False])
def test_what_logits_come_of_is_as_it_was_where_the_kernels_compute_their_loss(is_weight, monkeypatch) -> None:
    monkeypatch.setattr(F, "linear", F.linear)
    head, hidden = nn.Linear(8, 23, bias=False, device=DEVICE), draw(2, 9, 8)
    HeadLoss(lambda line, how: None).see_model(head)
    logits = F.linear(hidden, head.weight)
    with torch.no_grad():
        (head.weight if is_weight else hidden).mul_(2)
    with pytest.raises(UnsupportedError, match="after it has changed what they come of"):
        F.cross_entropy(logits.flatten(0, 1), torch.zeros(18, dtype=torch.int64, device=DEVICE))
