"""A gradient scaler on the CPU that leaves out the updates whose gradients are infinite: the third and the seventh."""

import torch
from torch import nn

model = nn.Linear(16, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
for step in range(1, 13):
    loss = model(torch.randn(8, 16)).square().mean()
    if step in (3, 7):
        loss = loss * float("inf")
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
