"""Every model of tests/realworld/models.py trains: the tests and the table of docs/models.md rest on them."""

from __future__ import annotations

import pytest
import torch

from tests.realworld import models

pytestmark = pytest.mark.realworld


@pytest.mark.thorough
@pytest.mark.parametrize("name", models.MODELS)
def test_a_step_changes_the_loss_of_the_same_batch(name: str) -> None:
    pytest.importorskip(models.MODELS[name])
    torch.manual_seed(0)
    workload = getattr(models, name)()
    optimizer = workload.optimizer(workload.module.parameters())
    batch = next(iter(workload.batches))
    losses = []
    for _ in range(2):
        loss = workload.loss(workload.forward(workload.module, batch), batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert all(0 < loss < 100 for loss in losses)
    assert losses[0] != losses[1]
