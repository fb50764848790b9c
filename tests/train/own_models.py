"""Workloads that a user may bring to `trainstep train`: small factories, as `--workload` takes them."""

import functools

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.realworld import models
from trainstep import Workload

ADAMW = functools.partial(torch.optim.AdamW, lr=3e-3)
ROWS = 4


def _pictures(count):
    random = torch.Generator().manual_seed(1)
    return torch.randn(count, 3, 8, 8, generator=random), torch.randint(5, (count,), generator=random)


def tied():
    """nanoGPT's: tied embeddings, dropout, the loss inside."""
    return models.nanogpt()


def encoder():
    """torch's own nn.TransformerEncoder, with its dropout."""
    return models.torch_transformer()


def lstm():
    return models.lstm()


class BatchNormalised(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)
        self.head = nn.Linear(8, 5)
        self.register_buffer("steps", torch.zeros((), dtype=torch.long), persistent=False)

    def forward(self, pictures):
        self.steps += self.training
        return self.head(F.relu(self.norm(self.first(pictures))).mean((2, 3)))


def batch_norm():
    """Running statistics, and a buffer that no checkpoint has; validated in eval mode."""
    pictures, labels = _pictures(24)
    batches = list(zip(pictures.split(ROWS), labels.split(ROWS), strict=True))
    return Workload(
        module=BatchNormalised(),
        batches=batches[:4],
        loss=lambda logits, batch: F.cross_entropy(logits, batch[1]),
        optimizer=functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9),
        validation=batches[4:],
    )


class TwoLosses(nn.Module):
    """Two heads over a frozen first layer; a parameter that no loss uses, where it is asked for."""

    def __init__(self, *, unused=False):
        super().__init__()
        self.frozen = nn.Linear(192, 16)
        self.frozen.requires_grad_(False)
        self.drop = nn.Dropout(0.2)
        self.label, self.brightness = nn.Linear(16, 5), nn.Linear(16, 1)
        if unused:
            self.unused = nn.Linear(3, 3)

    def forward(self, pictures):
        hidden = self.drop(torch.tanh(self.frozen(pictures.flatten(1))))
        return {"label": self.label(hidden), "brightness": self.brightness(hidden)[:, 0]}


def two_losses(*, unused=False):
    """A shuffling loader, which is iterated; groups of parameters with rates of their own."""
    module = TwoLosses(unused=unused)
    slow = {id(each) for each in module.brightness.parameters()}

    def optimizer(parameters):
        trained = [each for each in parameters if each.requires_grad]
        fast = [each for each in trained if id(each) not in slow]
        rest = [each for each in trained if id(each) in slow]
        groups = [{"params": fast}, {"params": rest, "lr": 1e-3}] if rest else [{"params": fast}]
        return torch.optim.AdamW(groups, lr=1e-2)

    def loss(outputs, batch):
        pictures, labels = batch
        brightness = F.mse_loss(outputs["brightness"], pictures.mean((1, 2, 3)))
        return F.cross_entropy(outputs["label"], labels) + 0.5 * brightness

    loader = DataLoader(TensorDataset(*_pictures(20)), batch_size=ROWS, shuffle=True)
    return Workload(module, loader, loss, optimizer)


def unused():
    return two_losses(unused=True)


class Counting(torch.optim.SGD):
    """Counts its updates in its groups, and takes smaller steps the more there were."""

    def __init__(self, parameters, lr):
        super().__init__(parameters, lr=lr)

    def step(self, closure=None):
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
            group["lr"] = 0.1 / group["count"]
        return super().step(closure)


def counting():
    pictures, labels = _pictures(20)
    return Workload(
        module=nn.Sequential(nn.Flatten(), nn.Linear(192, 5)),
        batches=[{"x": x, "y": y} for x, y in zip(pictures.split(ROWS), labels.split(ROWS), strict=True)],
        forward=lambda module, batch: module(batch["x"]),
        loss=lambda logits, batch: F.cross_entropy(logits, batch["y"]),
        optimizer=functools.partial(Counting, lr=0.1),
    )


def endless():
    """A generator that draws from a generator of its own, made where it is first asked."""
    made = counting()

    def draws():
        random = torch.Generator().manual_seed(7)
        while True:
            yield {"x": torch.randn(ROWS, 3, 8, 8, generator=random), "y": torch.randint(5, (ROWS,), generator=random)}

    made.batches = draws()
    return made


_never_seeded = torch.Generator()


def unseeded():
    """Draws from a generator that nobody seeds."""
    made = counting()
    _never_seeded.seed()

    def draws():
        while True:
            x = torch.randn(ROWS, 3, 8, 8, generator=_never_seeded)
            yield {"x": x, "y": torch.zeros(ROWS, dtype=torch.long)}

    made.batches = draws()
    return made


def by_lbfgs():
    made = counting()
    made.optimizer = torch.optim.LBFGS
    return made


def uneven():
    """Rows that no two ranks divide."""
    made = counting()
    made.batches = [{"x": torch.randn(3, 3, 8, 8), "y": torch.zeros(3, dtype=torch.long)}]
    return made
