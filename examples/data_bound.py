"""A script that waits for its batches: `trainstep run python examples/data_bound.py` says so, with the line."""

import time

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset


class Slow(Dataset[Tensor]):
    """Samples that take 4 ms each to read."""

    def __len__(self) -> int:
        return 400

    def __getitem__(self, index: int) -> Tensor:
        time.sleep(0.004)
        return torch.full((128,), float(index % 2))


model = torch.nn.Sequential(torch.nn.Linear(128, 512), torch.nn.ReLU(), torch.nn.Linear(512, 128))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for batch in DataLoader(Slow(), batch_size=8):
    loss = (model(batch) - batch).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
