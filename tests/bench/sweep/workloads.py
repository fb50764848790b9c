"""Workloads for sweeps: a small one that trains, and ones that go wrong in every way a process can."""

import os
import sys
import time
from functools import partial

import torch
from torch import nn

from trainstep import Workload


def trains(forward=None):
    random = torch.Generator().manual_seed(0)
    batches = [(torch.randn(4, 8, generator=random), torch.randn(4, 1, generator=random)) for _ in range(4)]
    return Workload(
        module=nn.Linear(8, 1),
        batches=batches,
        forward=forward or (lambda module, batch: module(batch[0])),
        loss=lambda outputs, batch: (outputs - batch[1]).square().mean(),
        optimizer=partial(torch.optim.SGD, lr=0.1),
    )


def crashes():
    os.abort()


def runs_out_of_memory():
    return trains(lambda module, batch: module(batch[0]) + torch.empty(2**46))  # more than any machine addresses


def hangs():
    print(f"hanging as {os.getpid()}.", flush=True)
    time.sleep(3600)


def mixed():
    """`trains`, except for one case of a grid that crashes and one that runs out of memory."""
    flags = dict(zip(sys.argv[1:], sys.argv[2:], strict=False))
    if (flags["--seed"], flags["--mode"]) == ("2", "step"):
        crashes()
    if (flags["--seed"], flags["--mode"]) == ("4", "forward"):
        return runs_out_of_memory()
    return trains()
