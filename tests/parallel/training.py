"""Small models with every trait that data parallel training must cope with, an optimizer that nobody knows, and their
training in one process."""

import contextlib
import random
import time

import torch
from torch import nn

WIDTH = 8
STEPS = 4


class Plain(nn.Module):
    """Layers of several sizes, one of them odd, and a norm with one-dimensional parameters and a buffer."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(WIDTH, 16)
        self.odd = nn.Linear(16, 7)
        self.middle = nn.Linear(7, 16, bias=False)
        self.norm = nn.LayerNorm(16)
        self.last = nn.Linear(16, WIDTH)
        self.register_buffer("scale", torch.rand(3) + 0.5)

    def forward(self, x):
        x = torch.tanh(self.first(x))
        x = torch.tanh(self.middle(torch.tanh(self.odd(x))))
        return self.last(self.norm(x)) * self.scale.mean()


class Tied(nn.Module):
    """The last layer has the first one's weight."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(WIDTH, 16)
        self.middle = nn.Linear(16, WIDTH)
        self.last = nn.Linear(WIDTH, 16)
        self.last.weight = self.first.weight

    def forward(self, x):
        return self.last(torch.tanh(self.middle(torch.tanh(self.first(x)))))[:, :WIDTH]


class Frozen(Plain):
    """The second layer is not trained."""

    def __init__(self):
        super().__init__()
        self.odd.requires_grad_(False)


class Uneven(nn.Module):
    """No parameter can be cut into two or four, and one has a single element."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(WIDTH, 5)
        self.middle = nn.Linear(5, 3)
        self.last = nn.Linear(3, WIDTH, bias=False)
        self.gain = nn.Parameter(torch.tensor(1.3))
        self.shift = nn.Parameter(torch.tensor([0.2]))

    def forward(self, x):
        return self.last(torch.tanh(self.middle(torch.tanh(self.first(x))))) * self.gain + self.shift


class Transposed(nn.Module):
    """A weight whose memory is not in the order of its indices."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(12, WIDTH).t())
        self.last = nn.Linear(12, WIDTH)

    def forward(self, x):
        return self.last(torch.tanh(x @ self.weight))


class Mixed(nn.Module):
    """Parameters of three types, one of them complex, in alternation."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(WIDTH, 16)
        self.narrow = nn.Linear(16, 16, dtype=torch.bfloat16)
        self.turn = nn.Parameter(torch.randn(16, dtype=torch.complex64))
        self.last = nn.Linear(16, WIDTH)

    def forward(self, x):
        x = torch.tanh(self.first(x))
        x = torch.tanh(self.narrow(x.bfloat16())).float()
        return self.last((x * self.turn).real + (x * self.turn).imag)


class Unused(Plain):
    """`spare` is never used, `sometimes` on odd rows of the batch's first column only: on some ranks."""

    def __init__(self):
        super().__init__()
        self.spare = nn.Linear(WIDTH, WIDTH)
        self.sometimes = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        y = super().forward(x)
        return y + self.sometimes(x) if x[0, 0] > 0 else y


class Branches(nn.Module):
    """Two branches; which one comes first, and so the order of the gradients, is up to the rank."""

    def __init__(self):
        super().__init__()
        self.left = nn.Sequential(nn.Linear(WIDTH, 16), nn.Tanh(), nn.Linear(16, WIDTH))
        self.right = nn.Sequential(nn.Linear(WIDTH, 16), nn.Tanh(), nn.Linear(16, WIDTH))

    def forward(self, x):
        if self.rank % 2:
            right, left = self.right(x), self.left(x)
        else:
            left, right = self.left(x), self.right(x)
        return left + right


class Lazy(nn.Module):
    """A layer of real numbers, and weights that are, or whose gradients are, views whose memory is not their value."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.build(torch.randn(WIDTH, WIDTH, dtype=torch.complex64) / 3)

    def build(self, weight):
        self.weight = nn.Parameter(weight)

    def forward(self, x):
        return self.turned(self.first(x).to(torch.complex64)).abs()


class Conjugate(Lazy):
    def turned(self, x):
        return x @ self.weight.conj()


class Adjoint(Lazy):
    def turned(self, x):
        return x @ self.weight.mH


class ConjugateOnOneRank(Lazy):
    def turned(self, x):
        return x @ (self.weight.conj() if self.rank else self.weight.conj().resolve_conj())


class LazilyNegative(torch.autograd.Function):
    """-x, whose gradient is a lazy negative."""

    @staticmethod
    def forward(ctx, x):
        return -x

    @staticmethod
    def backward(ctx, gradient):
        return torch._neg_view(gradient.clone())


class NegativeGradient(Lazy):
    def build(self, weight):
        self.weight, self.shift = nn.Parameter(weight.real.clone()), nn.Parameter(torch.randn(1))

    def turned(self, x):
        return x @ LazilyNegative.apply(self.weight).to(x.dtype) + LazilyNegative.apply(self.shift)


class NegativeParameters(Lazy):
    def build(self, weight):
        self.weight = nn.Parameter(torch._neg_view(weight.real.clone()))
        self.shift = nn.Parameter(torch._neg_view(torch.randn(3)))

    def turned(self, x):
        return x @ self.weight.to(x.dtype) + self.shift.sum()


class ConjugateParameters(Lazy):
    def build(self, weight):
        self.weight, self.shift = nn.Parameter(weight.conj()), nn.Parameter(weight[0].clone().conj())
        self.other = nn.Parameter(weight[:3].clone().mH)

    def turned(self, x):
        return x @ self.weight + self.shift + self.other.sum()


class LazyBuffers(Lazy):
    def build(self, weight):
        self.weight = nn.Parameter(weight)
        self.register_buffer("turn", weight.mH)
        self.register_buffer("shift", torch._neg_view(torch.randn(WIDTH)))

    def turned(self, x):
        return x @ self.weight @ self.turn + self.shift


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(16, 16)

    def forward(self, x):
        return x + torch.tanh(self.inner(x))


class Stacked(nn.Module):
    """Blocks between parameters of the module's own, one of which it uses without calling its owner."""

    def __init__(self):
        super().__init__()
        self.start = nn.Linear(WIDTH, 16)
        self.blocks = nn.ModuleList([Block() for _ in range(4)])
        self.end = nn.Linear(16, WIDTH)

    def forward(self, x):
        x = torch.tanh(self.start(x))
        for block in self.blocks:
            x = block(x)
        return nn.functional.linear(x, self.end.weight, self.end.bias)


class TiedAcross(Stacked):
    """The first parameter outside of blocks is a block's as well, and one block is in two lists."""

    def __init__(self):
        super().__init__()
        self.widen = nn.Linear(16, 16)
        self.widen.weight = self.blocks[2].inner.weight
        self.again = nn.ModuleList([self.blocks[3]])

    def forward(self, x):
        x = self.widen(torch.tanh(self.start(x)))
        for block in (*self.blocks, *self.again):
            x = block(x)
        return self.end(x)


class SignDescent(torch.optim.Optimizer):
    """An optimizer that trainstep has never heard of; it looks at whole matrices, and counts steps in its groups."""

    def __init__(self, params, lr=0.01):
        super().__init__(params, {"lr": lr, "steps": 0})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["steps"] += 1
            for parameter in group["params"]:
                if parameter.grad is not None:
                    assert parameter.dim() < 2 or parameter.shape[0] > 1
                    count = self.state[parameter].setdefault("count", torch.zeros(parameter.shape[:1]))
                    count += 1
                    parameter -= group["lr"] / group["steps"] * parameter.grad / (parameter.grad.norm() + 1e-6)


MODELS = {each.__name__: each for each in (Plain, Tied, Frozen, Uneven, Transposed, Mixed, Unused, Branches)}
MODELS |= {each.__name__: each for each in (*Lazy.__subclasses__(), Stacked, TiedAcross)}
OPTIMIZERS = {
    "SGD": (torch.optim.SGD, {"lr": 0.125, "momentum": 0.5}),
    "AdamW": (torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1}),
}
EXCHANGE_MB = 700e-6
"""So little at once that these models need several exchanges."""


def build(name, seed=0, rank=0):
    """The model; `rank` is for those that differ by it."""
    torch.manual_seed(seed)
    model = MODELS[name]()
    model.rank = rank
    return model


def shares(world_size, step, rows=3):
    """Every rank's inputs of a step; the sign of the first element alternates, for `Unused`."""
    generator = torch.Generator().manual_seed(100 + step)
    x = torch.randn(world_size, rows, WIDTH, generator=generator)
    x[:, 0, 0] = torch.tensor([1.0 if (rank + step) % 2 else -1.0 for rank in range(world_size)])
    return x


def loss_of(model, x, autocast=None):
    x = x.to(next(model.parameters()).device)
    context = torch.autocast(x.device.type, autocast) if autocast else contextlib.nullcontext()
    with context:
        y = model(x)
    return (y.float() - x.flip(-1)).pow(2).mean()


def reference(
    name, optimizer, world_size, *, steps=STEPS, accumulate=1, autocast=None, dtype=None, clip=None, device="cpu"
):
    """One process: the gradients of the ranks' shares, one after the other, averaged in the order of the ranks."""
    model = build(name).to(device=device, dtype=dtype)
    optimizer_cls, options = OPTIMIZERS[optimizer] if isinstance(optimizer, str) else optimizer
    optimizer = optimizer_cls([p for p in model.parameters() if p.requires_grad], **options)
    for step in range(steps):
        totals = {}
        for model.rank in range(world_size):
            model.zero_grad()
            for micro in range(accumulate):
                x = shares(world_size, step * accumulate + micro)[model.rank]
                loss_of(model, x.to(dtype), autocast).backward()
            for p in model.parameters():
                if p.grad is not None:
                    part = p.grad / world_size
                    totals[p] = totals[p] + part if p in totals else part
        for p in model.parameters():
            p.grad = totals.get(p)
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
    return state(model)


def whole_batch(name, optimizer, world_size):
    """One process on all shares at once, as one batch."""
    model = build(name)
    optimizer_cls, options = OPTIMIZERS[optimizer]
    optimizer = optimizer_cls([p for p in model.parameters() if p.requires_grad], **options)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, shares(world_size, step).flatten(0, 1)).backward()
        optimizer.step()
    return state(model)


def state(model):
    """Parameters and buffers, their values in memory."""
    values = {name: tensor.detach().resolve_conj().resolve_neg() for name, tensor in model.state_dict().items()}
    return {name: value.cpu().clone() for name, value in values.items()}


def step_of(
    process, ddp, optimizer, step, *, accumulate=1, clip=None, set_to_none=True, autocast=None, dtype=None, update=True
):
    """A step on this rank's shares, in so many backward passes, of which the last one sends gradients."""
    optimizer.zero_grad(set_to_none)
    for micro in range(accumulate):
        x = shares(process.world_size, step * accumulate + micro)[process.rank].to(dtype)
        with ddp.no_sync() if micro < accumulate - 1 else contextlib.nullcontext():
            loss_of(ddp, x, autocast).backward()
    ddp.finish_gradient_synchronization()
    if clip is not None:
        own = getattr(optimizer, "clip_grad_norm_", None)
        own(clip) if own is not None else nn.utils.clip_grad_norm_(ddp.parameters(), clip)
    if update:
        optimizer.step()


def train_steps(process, ddp, optimizer, *, steps=STEPS, delays=None, **how):
    """The state after so many steps; with `delays`, a number, ranks and layers are late, each time otherwise."""
    dice = random.Random(f"{delays} {process.rank}")
    if delays is not None:
        delay(ddp.module, dice)
    for step in range(steps):
        if delays is not None:
            time.sleep(dice.random() * 0.01)
        step_of(process, ddp, optimizer, step, **how)
    getattr(optimizer, "wait_for_parameters", lambda: None)()
    return state(ddp.module)


def differing(a, b, relative=0.0):
    """Names whose tensors differ: in any bit, or by more than `relative` of their norm."""
    assert a.keys() == b.keys()
    if not relative:
        return [name for name in a if not torch.equal(a[name], b[name])]
    return [name for name in a if (a[name] - b[name]).norm() > relative * (b[name].norm() + 1e-3)]


def delay(model, dice, longest=0.004):
    """Sleep for a random time whenever a layer is called, and whenever its gradients are being made."""

    def late(*_):
        time.sleep(dice.random() * longest)

    for layer in model.modules():
        if isinstance(layer, nn.Linear):
            layer.register_forward_pre_hook(late)
            layer.register_full_backward_pre_hook(late)
