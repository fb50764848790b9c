"""One of three faults, on a GPU where there is one: the first argument says which, the second how many steps.

`reads`: the loss is read and printed in each step, so that what the host does next begins after the device is done.
`starves`: a loader with one worker, in memory that is not pinned, takes longer than the step. `recompiles`: each
step's input is longer than the last one's, and compiled code is told that no size changes.
"""

import sys
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

FAULT, STEPS = sys.argv[1], int(sys.argv[2])
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
WIDTH, ROWS = (2048, 8192) if DEVICE == "cuda" else (256, 256)
LOAD_S = 0.04 if FAULT == "starves" else 0.0
HOST_S = 0.015 if FAULT == "reads" or (FAULT == "starves" and DEVICE == "cpu") else 0.0  # of a step


class Rows(Dataset):
    """Random rows, the same for the same index, that take a while to load."""

    def __len__(self):
        return STEPS

    def __getitem__(self, index):
        time.sleep(LOAD_S)
        rows = ROWS + index if FAULT == "recompiles" else ROWS
        return torch.randn(rows, 16, generator=torch.Generator().manual_seed(index))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(16, WIDTH)
        self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))

    def forward(self, x):
        return self.layers(self.first(x)).square().mean()


torch.manual_seed(0)
model = Model().to(DEVICE)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
run = model
if FAULT == "recompiles":
    torch._dynamo.config.recompile_limit = STEPS
    run = torch.compile(model, backend="eager", dynamic=False)
total = 0.0
for step, x in enumerate(DataLoader(Rows(), batch_size=None, num_workers=1)):  # LOADER
    loss = run(x.to(DEVICE))  # AGAIN
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if FAULT == "reads":
        total += loss.item()  # READ
        print(step, loss.item())  # PRINT
    time.sleep(HOST_S)
print("in all", float(total))
