"""Small modules with what makes sharding hard, and the training they are held against."""

import copy

import torch
import torch.nn.functional as F
from torch import nn


class Block(nn.Module):
    """A residual block with a bias, a gain, and matrices whose rows no number of ranks divides."""

    def __init__(self, width, inner):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, inner)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    """An embedding, a parameter of the module itself, blocks, a norm and a head: tokens (B, S) → logits (B, S, V)."""

    def __init__(self, *, vocabulary=23, width=12, inner=19, blocks=5, tied=False, frozen=False, unused=False):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.position = nn.Parameter(torch.randn(8, width) / 3)
        self.blocks = nn.ModuleList(Block(width, inner) for _ in range(blocks))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.register_buffer("scale", torch.ones(1))
        if tied:
            self.head.weight = self.embedding.weight
        if frozen:
            self.embedding.weight.requires_grad_(False)
            self.blocks[1].requires_grad_(False)
            self.blocks[2].up.requires_grad_(False)
            self.blocks[3].norm.requires_grad_(False)  # its last layer's gradient comes first, and is its only one;
            self.blocks[3].up.requires_grad_(False)  # backward then still goes through what is frozen
        if unused:
            self.blocks[1].spare = nn.Linear(width, 3)
            self.spare = nn.Linear(4, 4)

    def forward(self, tokens):
        x = self.embedding(tokens) * self.scale.to(self.position.dtype) + self.position[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def build(seed=0, **options):
    torch.manual_seed(seed)
    return Net(**options)


def batch(step, rows=4, vocabulary=23):
    """Tokens (rows, 9) of a step, the same for everyone."""
    return torch.randint(0, vocabulary, (rows, 9), generator=torch.Generator().manual_seed(100 + step))


def loss_of(module, tokens):
    """Next-token cross-entropy, in float32 or wider."""
    logits = module(tokens[:, :-1])
    wide = torch.promote_types(logits.dtype, torch.float32)
    return F.cross_entropy(logits.flatten(0, 1).to(wide), tokens[:, 1:].flatten())


OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.01),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
}


def mean_of_ranks(gradients):
    """[rank][round] → the mean over ranks of a single round."""
    return sum(rounds[0] for rounds in gradients) / len(gradients)


def train_alone(
    options, optimizer, steps, *, ranks, dtype=None, rounds=1, combine=mean_of_ranks, change=None, trained=torch.float32
):
    """What `ranks` ranks compute together, in one process: their gradients in turn, in `dtype`, averaged in `trained`.

    `combine` makes one gradient of those of every rank and round; `change` gets the module before the optimizer's step.
    """
    module = build(**options).to(trained)
    parameters = dict(module.named_parameters())
    optimizer = OPTIMIZERS[optimizer](module.parameters())
    for step in range(steps):
        found = {}
        for rank in range(ranks):
            for round_ in range(rounds):
                worker = copy.deepcopy(module)
                if dtype is not None:
                    for parameter in worker.parameters():
                        parameter.data = parameter.data.to(dtype)
                loss_of(worker, batch(step * rounds + round_).chunk(ranks)[rank]).backward()
                for name, parameter in worker.named_parameters():
                    if parameter.grad is not None:
                        found.setdefault(name, [[] for _ in range(ranks)])[rank].append(parameter.grad.to(trained))
        for name, gradients in found.items():
            parameters[name].grad = combine(gradients)
        if change is not None:
            change(module)
        optimizer.step()
        optimizer.zero_grad()
    return {name: parameter.detach() for name, parameter in parameters.items()}
