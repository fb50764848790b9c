"""Accelerate around a plain loop: accumulation by its context, an optimizer and a loader that it wraps."""

import os

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

WIDTH, STEPS = int(os.environ.get("WIDTH", "64")), int(os.environ.get("STEPS", "12"))
BATCH = int(os.environ.get("BATCH", "4"))

accelerator = Accelerator(cpu=not torch.cuda.is_available(), gradient_accumulation_steps=2)
model = nn.Sequential(nn.Linear(16, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 1))
optimizer = torch.optim.AdamW(model.parameters())
loader = DataLoader(TensorDataset(torch.randn(2 * BATCH * STEPS, 16)), batch_size=BATCH)
# by hand: from tests.observe.by_hand import clock
# by hand: clock.around(model, "forward", "forward")
# by hand: clock.around(torch.Tensor, "backward", "backward")
# by hand: clock.around(torch.nn.utils, "clip_grad_norm_", "optimizer")
# by hand: clock.around(torch.optim.Optimizer, "zero_grad", "optimizer")
# by hand: clock.around(torch.optim.AdamW, "step", "optimizer", ends=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for (x,) in loader:
    with accelerator.accumulate(model):
        loss = model(x).square().mean()
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
