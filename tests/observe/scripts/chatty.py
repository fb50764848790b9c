"""A loop that reads its loss and prints it every step, as first scripts do."""

import torch
from torch import nn

model = nn.Linear(16, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(12):
    loss = model(torch.randn(8, 16)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    value = loss.item()  # READ
    print(step, value, loss)  # PRINT
