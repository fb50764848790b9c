"""A loop that reads its loss every step, prints a tensor every third, and takes rows by a tensor as their index."""

import torch
from torch import nn

model = nn.Linear(16, 1)
optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
total, rows = 0.0, [1.0, 2.0, 3.0]
for step in range(12):
    loss = model(torch.randn(8, 16)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    total += loss.item()  # READ
    total += rows[torch.randint(3, ())]
    if step % 3 == 0:
        print(loss)  # PRINT
