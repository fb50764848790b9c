"""Many small layers under torch's DistributedDataParallel, each rank on data of its own, by NCCL or else by Gloo."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

WIDTH = int(os.environ.get("WIDTH", "16"))
BATCH = int(os.environ.get("BATCH", "2"))
KIND = "cuda" if torch.cuda.device_count() >= int(os.environ["WORLD_SIZE"]) else "cpu"
DEVICE = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if KIND == "cuda" else torch.device("cpu")

if KIND == "cuda":
    torch.cuda.set_device(DEVICE)
dist.init_process_group("nccl" if KIND == "cuda" else "gloo")
torch.manual_seed(dist.get_rank())
layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.LayerNorm(WIDTH)) for _ in range(12)]
model = DistributedDataParallel(nn.Sequential(nn.Embedding(32, WIDTH), *layers, nn.Linear(WIDTH, 32)).to(DEVICE))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
# by hand: from tests.observe.by_hand import clock
for _ in range(40):
    tokens = torch.randint(32, (BATCH, 13), device=DEVICE)
    # by hand: clock("other")
    logits = model(tokens[:, :-1])
    # by hand: clock("forward")
    loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    # by hand: clock("other")
    optimizer.zero_grad()
    # by hand: clock("optimizer")
    loss.backward()
    # by hand: clock("backward")
    optimizer.step()
    # by hand: clock("optimizer")
    # by hand: clock.step()
dist.destroy_process_group()
