"""DistributedDataParallel on Gloo; the last rank sleeps a while before it computes, and the others wait for it."""

import os
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 1)))
optimizer = torch.optim.AdamW(model.parameters())
is_last = dist.get_rank() == dist.get_world_size() - 1
for _ in range(14):
    loss = model(torch.randn(16, 32)).square().mean()
    if is_last and "LATE" in os.environ:
        time.sleep(float(os.environ["LATE"]))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
dist.barrier()
dist.destroy_process_group()
