"""A loop on the GPU that copies from pageable memory, and reads its loss each step. First argument: the width."""

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

width = int(sys.argv[1])
model = nn.Sequential(*(nn.Linear(width, width) for _ in range(6)), nn.Linear(width, 1)).cuda()
optimizer = torch.optim.AdamW(model.parameters())
total = 0.0
for (x,) in DataLoader(TensorDataset(torch.randn(60 * 256, width)), batch_size=256):
    x = x.to("cuda")  # COPY
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    total += loss.item()  # READ
    chosen = x[x[:, 0] > 0]  # MASK
print("trained", total > 0)
