"""A loader whose one worker takes longer than the step, in memory that is not pinned; and a model behind a wrapper that
is never called."""

import time

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Slow(Dataset):
    def __len__(self):
        return 24

    def __getitem__(self, index):
        time.sleep(0.04)
        return torch.randn(16)


class Learner(nn.Module):
    def __init__(self):
        super().__init__()
        self.model = nn.Linear(16, 1)

    def training_step(self, batch):
        return self.model(batch).square().mean()


learner = Learner()
optimizer = torch.optim.SGD(learner.parameters(), lr=0.1)
for batch in DataLoader(Slow(), batch_size=2, num_workers=1):  # LOADER
    learner.training_step(batch).backward()
    optimizer.step()
    optimizer.zero_grad()
