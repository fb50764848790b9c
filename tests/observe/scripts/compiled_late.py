"""A model two containers deep in an eager loop, and in each step a function that is compiled there first, whole."""

import tempfile

import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("gloo", init_method=f"file://{tempfile.mkdtemp()}/group", rank=0, world_size=1)


class Nets(nn.Module):
    def __init__(self):
        super().__init__()
        self.nets = nn.ModuleDict({"one": nn.Linear(16, 4)})


torch.manual_seed(0)
model = Nets()
optimizer = torch.optim.AdamW(model.parameters())
seen = []
for step in range(12):
    loss = model.nets["one"](torch.randn(8, 16)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()

    @torch.compile(backend="eager", fullgraph=True)
    def mean(value, number=step):
        value = value * number
        dist.all_reduce(value)
        return value

    if step >= 4:
        seen.append(round(mean(loss.detach()).item(), 5))
print("SEEN", seen)
dist.destroy_process_group()
