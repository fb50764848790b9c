"""An evaluation after every fourth step."""

import torch
from torch import nn

model = nn.Sequential(nn.Linear(16, 32), nn.Dropout(0.1), nn.Linear(32, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(16):
    model(torch.randn(8, 16)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    if step % 4 == 3:
        model.eval()
        with torch.no_grad():
            for _ in range(5):
                model(torch.randn(64, 16))
        model.train()
