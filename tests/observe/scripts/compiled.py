"""A compiled model given a longer input each step, which compiles it again; and one whose layers are compiled."""

import torch
from torch import nn


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.product = nn.Sequential(nn.Linear(16, 16))

    def forward(self, x):
        return self.product(x).relu()


model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 1))
compiled = torch.compile(model, backend="eager", dynamic=False)
layers = nn.Sequential(Layer(), nn.Linear(16, 1))
layers[0].compile(backend="eager", fullgraph=True)
optimizer = torch.optim.SGD([*model.parameters(), *layers.parameters()], lr=0.1)
for step in range(1, 6):
    x = torch.randn(step, 16)
    loss = compiled(x).mean()  # AGAIN
    loss = loss + layers(torch.randn(4, 16)).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
torch.compiler.reset()
