"""A plain loop over a model with dropout."""

import torch
from torch import nn

torch.set_num_threads(1)
model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(8):
    model(torch.randn(32, 16)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
