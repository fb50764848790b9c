"""A language model trained as small repositories do it: batches cut from one long array, attention written out,
gradients accumulated and clipped, a learning rate by the step, now and then an evaluation, a log line, a checkpoint.

Its arguments: updates, the model's width and the context's length.
"""

import math
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

UPDATES = int(sys.argv[1]) if len(sys.argv) > 1 else 12
WIDTH = int(sys.argv[2]) if len(sys.argv) > 2 else 32
CONTEXT = int(sys.argv[3]) if len(sys.argv) > 3 else 32
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HEADS, BLOCKS, VOCAB, BATCH, PARTS, EVAL_EVERY = 4, 4, 96, 4, 2, 10

torch.manual_seed(1337)
torch.set_num_threads(1)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.projected, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("seen", torch.tril(torch.ones(CONTEXT, CONTEXT)))

    def forward(self, x):
        batch, length, _ = x.shape
        q, k, v = (
            each.view(batch, length, HEADS, WIDTH // HEADS).transpose(1, 2)
            for each in self.projected(x).split(WIDTH, dim=2)
        )
        scores = q @ k.transpose(-2, -1) / math.sqrt(k.size(-1))
        scores = scores.masked_fill(self.seen[:length, :length] == 0, float("-inf"))
        mixed = F.softmax(scores, dim=-1) @ v  # ATTENTION
        return self.out(mixed.transpose(1, 2).reshape(batch, length, WIDTH))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.before, self.attention, self.between = nn.LayerNorm(WIDTH), Attention(), nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x):
        x = x + self.attention(self.before(x))
        return x + self.mlp(self.between(x))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCAB, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)
        self.head.weight = self.tokens.weight
        nn.init.normal_(self.tokens.weight, std=0.02)

    def forward(self, tokens, targets):
        x = self.tokens(tokens) + self.places.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())  # LOSS


text = np.random.default_rng(7).integers(0, VOCAB, 20_000)


def batch_of(part):
    starts = torch.randint(len(part) - CONTEXT - 1, (BATCH,))
    x = torch.stack([torch.from_numpy(part[start : start + CONTEXT]) for start in starts])
    y = torch.stack([torch.from_numpy(part[start + 1 : start + 1 + CONTEXT]) for start in starts])
    return x.to(DEVICE), y.to(DEVICE)


@torch.no_grad()
def evaluated(model):
    model.eval()
    losses = [model(*batch_of(text[18_000:]))[1].item() for _ in range(2)]
    model.train()
    return sum(losses) / len(losses)


def rate(step):
    warm = 5
    return 1e-3 * (step + 1) / warm if step < warm else 1e-4 + 0.45e-3 * (1 + math.cos(math.pi * step / UPDATES))


model = Model().to(DEVICE)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)
# by hand: from tests.observe.by_hand import clock
# by hand: clock.around(torch.Tensor, "backward", "backward")
with tempfile.TemporaryDirectory() as folder:
    x, y = batch_of(text[:18_000])
    for step in range(UPDATES):
        for group in optimizer.param_groups:
            group["lr"] = rate(step)
        if step and step % EVAL_EVERY == 0:
            print(f"step {step}: held-out loss {evaluated(model):.3f}")
            torch.save({"model": model.state_dict(), "step": step}, Path(folder) / "checkpoint.pt")
        for _ in range(PARTS):
            # by hand: clock("other")
            _, loss = model(x, y)
            # by hand: clock("forward")
            x, y = batch_of(text[:18_000])
            (loss / PARTS).backward()
        # by hand: clock("other")
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        # by hand: clock("optimizer")
        # by hand: clock.step()
        if step % 5 == 0:
            print(f"step {step}: loss {loss.item():.3f}")  # READ
