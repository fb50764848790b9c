"""A user's workload that does as it is told by the environment: it hangs, raises or is slow, on one rank, once."""

import json
import os
import time
from functools import partial
from pathlib import Path

import torch
from torch import nn

from trainstep import Workload

FAULT = "TRAINSTEP_TEST_FAULT"
"""JSON: `what` (hang, raise, slow), `rank`, `update` (the number of the pass at which it comes, from 1), `once` (a file
that says it has come), and for slow the `seconds`."""
PACE_S = 0.003
"""That every pass takes, so that a fault from outside comes within the run."""


class Faulty(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Dropout(0.1), nn.Linear(32, 4))
        self.fault = json.loads(os.environ.get(FAULT, "{}"))
        self.rank = int(os.environ.get("RANK", "0"))
        self.passes = 0

    def forward(self, inputs):
        self.passes += 1
        time.sleep(PACE_S)
        if self.fault and self.rank == self.fault["rank"] and self.passes == self.fault["update"]:
            self.misbehave()
        return self.layers(inputs)

    def misbehave(self):
        try:
            Path(self.fault["once"]).touch(exist_ok=False)
        except FileExistsError:
            return
        if self.fault["what"] == "raise":
            raise ArithmeticError("a mistake of one rank's")
        time.sleep(self.fault.get("seconds", 600))


def workload():
    random = torch.Generator().manual_seed(3)
    inputs, targets = torch.randn(48, 8, generator=random), torch.randn(48, 4, generator=random)
    return Workload(
        module=Faulty(),
        batches=list(zip(inputs.split(8), targets.split(8), strict=True)),
        loss=lambda outputs, batch: (outputs - batch[1]).square().mean(),
        optimizer=partial(torch.optim.AdamW, lr=3e-3),
    )
