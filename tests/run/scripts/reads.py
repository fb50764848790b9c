"""A loop that reads its loss every step, and prints a tensor every third."""

import torch
from torch import nn

model = nn.Linear(16, 1)
optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
total = 0.0
for step in range(12):
    loss = model(torch.randn(8, 16)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    total += loss.item()  # READ
    if step % 3 == 0:
        print(loss)  # PRINT
