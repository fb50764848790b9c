"""Optimizers given a closure: one that calls it once, as Lightning has them, and LBFGS, which calls it often."""

import torch
from torch import nn

model = nn.Linear(16, 1)
x = torch.randn(64, 16)


def closure():
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    return loss


for optimizer in (torch.optim.SGD(model.parameters(), lr=0.1), torch.optim.LBFGS(model.parameters(), max_iter=3)):
    for _ in range(6):
        optimizer.step(closure)
