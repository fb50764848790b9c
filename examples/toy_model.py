"""The classic question of mixed precision, which dtype does everything have under autocast, on the smallest model:

trainstep dtypes --workload examples.toy_model:workload --precision fp16,bf16
"""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainstep import Workload


class ToyModel(nn.Module):
    """A linear layer, ReLU, layer normalisation and a linear layer: features (batch, 5) → logits (batch, 3)."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 10, bias=False)
        self.norm = nn.LayerNorm(10)
        self.last = nn.Linear(10, 3, bias=False)

    def forward(self, features: Tensor) -> Tensor:
        return self.last(self.norm(F.relu(self.first(features))))


def workload() -> Workload:
    """What `--workload` names."""
    random = torch.Generator().manual_seed(0)
    features, classes = torch.randn(8, 5, generator=random), torch.randint(3, (8,), generator=random)
    return Workload(
        module=ToyModel(),
        batches=[(features, classes)],
        loss=lambda logits, batch: F.cross_entropy(logits, batch[1]),
        optimizer=functools.partial(torch.optim.AdamW, lr=1e-3),
    )
