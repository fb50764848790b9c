"""Many small layers under torch's DDP, or FSDP2 where the argument is fsdp, each rank on data of its own, by NCCL where
each has a GPU, else by Gloo."""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

SHARDED = sys.argv[1:] == ["fsdp"]
WIDTH = int(os.environ.get("WIDTH", "16"))
BATCH = int(os.environ.get("BATCH", "2"))
KIND = "cuda" if torch.cuda.device_count() >= int(os.environ["WORLD_SIZE"]) else "cpu"
DEVICE = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if KIND == "cuda" else torch.device("cpu")

if KIND == "cuda":
    torch.cuda.set_device(DEVICE)
dist.init_process_group("nccl" if KIND == "cuda" else "gloo")
mesh = init_device_mesh(KIND, (dist.get_world_size(),))
torch.manual_seed(0)
layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.LayerNorm(WIDTH)) for _ in range(4 if SHARDED else 12)]
model = nn.Sequential(nn.Embedding(32, WIDTH), *layers, nn.Linear(WIDTH, 32)).to(DEVICE)
if SHARDED:
    for part in (*layers, model):
        fully_shard(part, mesh=mesh)
else:
    model = DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
torch.manual_seed(dist.get_rank())
# by hand: from tests.observe.by_hand import clock
for _ in range(24 if SHARDED else 40):
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
