"""One model whose matrices and vectors have an optimizer each."""

import sys

import torch
from torch import nn

WIDTH = 32
model = nn.Sequential(nn.Linear(16, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 1))
vectors = torch.optim.SGD([each for each in model.parameters() if each.dim() == 1], lr=1e-3)
matrices = torch.optim.Adam([each for each in model.parameters() if each.dim() == 2], lr=1e-3)
for _ in range(int(sys.argv[1])):
    model(torch.randn(8, 16)).square().mean().backward()
    vectors.step()
    matrices.step()
    vectors.zero_grad()
    matrices.zero_grad()
