"""A plain loop over any model of tests/realworld/models.py; its arguments are the model's name and how many updates."""

import sys

import torch
from torch.utils.data import DataLoader

from tests.realworld import models
from trainstep.step.batches import map_tensors

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
made = getattr(models, sys.argv[1])()
model, updates = made.module.to(DEVICE), int(sys.argv[2])
optimizer = made.optimizer(model.parameters())
batches = list(made.batches)
# by hand: from tests.observe.by_hand import clock
for batch in DataLoader([batches[place % len(batches)] for place in range(updates)], batch_size=None):
    batch = map_tensors(batch, lambda tensor: tensor.to(DEVICE))
    # by hand: clock("other")
    output = made.forward(model, batch)
    # by hand: clock("forward")
    loss = made.loss(output, batch)
    # by hand: clock("other")
    loss.backward()
    # by hand: clock("backward")
    optimizer.step()
    optimizer.zero_grad()
    # by hand: clock("optimizer")
    # by hand: clock.step()
