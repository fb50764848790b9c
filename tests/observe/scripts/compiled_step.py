"""A whole step that is compiled, with its optimizer's update, and a function that allows no break in its graph."""

import torch
from torch import nn

graphs = []


def counted(graph, inputs):
    graphs.append(len(graph.graph.nodes))
    return graph


torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
optimizer = torch.optim.AdamW(model.parameters())
inputs, targets = torch.randn(16, 8, 16), torch.randint(4, (16, 8))


@torch.compile(backend=counted)
def step(x, y):
    loss = nn.functional.cross_entropy(model(x), y)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


@torch.compile(backend=counted, fullgraph=True)
def evaluated(x, y):
    return nn.functional.cross_entropy(model(x), y)


for number in range(16):
    loss = step(inputs[number], targets[number])
    with torch.no_grad():
        model(inputs[number])
        loss = evaluated(inputs[number], targets[number])
print("GRAPHS", graphs, loss.item())
