"""A model with a head, and how its head's loss is looked for in tests."""

from collections import OrderedDict
from importlib import import_module

import torch
import torch.nn.functional as F
from torch import nn

from trainstep.ladder.places.head_loss import HeadLoss
from trainstep.step.model.transformer import chunked_cross_entropy

BATCH, LENGTH, WIDTH, WORDS = 2, 6, 5, 11
IDS = torch.randint(WORDS, (BATCH, LENGTH), generator=torch.Generator().manual_seed(1))


class Model(nn.Module):
    """Its head comes first, so that it is known as one by its width alone, and the layer that is last is none."""

    def __init__(self, bias=False, is_tied=False, is_embedding=False):
        super().__init__()
        self.is_embedding = is_embedding
        self.head = nn.Linear(WIDTH, WORDS, bias=bias)
        self.embed, self.body = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WIDTH)
        if is_tied:
            self.head.weight = self.embed.weight

    def forward(self, ids):
        x = torch.tanh(self.body(self.embed(ids)))
        return F.linear(x, self.embed.weight) if self.is_embedding else self.head(x)


def model_of(**options):
    torch.manual_seed(0)
    return Model(**options).double()


def seen_by(finder, model):
    finder.see_model(model)
    return model


def plain(model, logits):
    return F.cross_entropy(logits.flatten(0, 1), IDS.flatten())


def finder_in(monkeypatch):
    """Looks for heads for the length of a test, and has what is noted as texts. Losses take several chunks, the last
    one smaller."""
    monkeypatch.setattr(F, "linear", F.linear)
    monkeypatch.setattr(import_module("torch.optim.optimizer"), "_global_optimizer_post_hooks", OrderedDict())
    monkeypatch.setitem(chunked_cross_entropy.__kwdefaults__, "chunk_tokens", 5)
    notes = []
    finder = HeadLoss(lambda line, how: notes.append(how))
    finder.notes = notes
    return finder
