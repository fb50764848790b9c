"""Many small layers under torch's DistributedDataParallel on Gloo, each rank on data of its own."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())
layers = [nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.LayerNorm(16)) for _ in range(12)]
model = DistributedDataParallel(nn.Sequential(nn.Embedding(32, 16), *layers, nn.Linear(16, 32)))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for _ in range(40):
    tokens = torch.randint(32, (2, 13))
    loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
dist.destroy_process_group()
