"""Four micro-batches a step, gradients clipped, two optimizers that update one model together."""

import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_

model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1))
optimizers = [torch.optim.SGD(model[0].parameters(), lr=0.1), torch.optim.AdamW(model[2].parameters())]
for micro_step in range(48):
    x = torch.randn(8, 16)
    (model(x).square().mean() / 4).backward()
    if micro_step % 4 == 3:
        clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
