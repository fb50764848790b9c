"""Takes three steps and then ends as it is told; what is said on standard output is the script's own."""

import os
import signal
import sys

import torch
from torch import nn

model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)


def train(steps, update=optimizer.step):
    for _ in range(steps):
        model(torch.randn(2, 4)).mean().backward()
        update()


def by_hand():
    for parameter in model.parameters():
        parameter.data.sub_(parameter.grad, alpha=0.1)


how = sys.argv[1]
if how == "catches everything":
    for number in range(100):
        try:
            train(1)
        except BaseException:
            print("caught", number, flush=True)
elif how == "forks":
    child = os.fork()
    if child == 0:
        train(3)
        os._exit(0)
    os.waitpid(child, 0)
else:
    train(3, by_hand if how == "updates by hand" else optimizer.step)
print("trained", flush=True)
if how == "raises":
    raise ValueError("the loss is no number")
if how == "sys.exit":
    sys.exit(7)
if how == "os._exit":
    os._exit(5)
if how == "is killed":
    os.kill(os.getpid(), signal.SIGKILL)
