"""Train an odd model (`scenarios`) under a wrapper, ours or torch's, and say what came out.

`Alone` is the yardstick: one process that takes every rank's share of the batch in turn and averages their gradients.
"""

import functools
import re
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from tests.workers import WorkerError
from trainstep.parallel import DistributedDataParallel, FullyShardedDataParallel, ShardedOptimizer
from trainstep.step.blocks import blocks_in_runs, find_blocks
from trainstep.step.training_step import recipe

RANKS, STEPS, ROWS, WIDTH = 2, 3, 4, 8
OURS = ("ddp", "sharded optimizer", "fsdp")
PEERS = ("torch ddp", "torch fsdp2")
TOLERANCE = 2e-5
"""Of how far a weight moved: float32 sums in another order; twice what the plain models are off by (6e-6)."""


def batch(step, rank, micro=0):
    """A rank's inputs, (ROWS, WIDTH)."""
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1000 * step + 10 * micro + rank))


def to_target(output, x):
    return (output - x.flip(-1)).pow(2).mean()


def mean_loss(run, x):
    return to_target(run.module(x), x)


def steps(
    change=lambda run: None,
    *,
    of=None,
    backward=lambda run, step: run.backward(step),
    finish=True,
    zero=lambda run: run.optimizer.zero_grad(),
):
    """Three steps: `backward(run, step)`, or `of(run, x)` of each rank's share; `change(run)` between the gradients and
    the optimizer's step; `zero(run)`."""

    def train(run):
        assert run.optimizer is not None, "it is there before backward"
        for step in range(STEPS):
            if of is None:
                backward(run, step)
            else:
                run.each_rank(step, functools.partial(of, run))
            if finish:
                run.finish()
            change(run)
            run.optimizer.step()
            zero(run)

    return train


three_steps = steps()


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


@dataclass(frozen=True)
class Scenario:
    what: str  # in words, for a table
    model: Any  # makes the module
    loss: Any = mean_loss  # of a run and a rank's inputs
    train: Any = three_steps  # of a run
    optimizer: Any = sgd  # of parameters
    settings: Any = None  # of data parallel wrappers: unused=True, overlap=False


class Run:
    """A scenario's module under one wrapper on this rank."""

    scheme = ""

    def __init__(self, scenario, inner, rank):
        self.scenario, self.inner, self.rank = scenario, inner, rank
        self._optimizer = None
        inner.rank = rank  # for models that differ by rank
        self.module = self.wrapped(inner, **(scenario.settings or {}))

    def wrapped(self, inner, **settings):
        return inner

    def parameters(self):
        """What a user gives the optimizer and torch's functions."""
        return [each for each in self.module.parameters() if each.requires_grad]

    def make_optimizer(self):
        return self.scenario.optimizer(self.parameters())

    @property
    def optimizer(self):
        if self._optimizer is None:
            self._optimizer = self.make_optimizer()
        return self._optimizer

    def backward(self, step, micro=0, scale=1.0):
        """Backward of this rank's loss; alone: of every rank's in turn."""
        self.each_rank(step, lambda x: (self.scenario.loss(self, x) * scale).backward(), micro)

    def each_rank(self, step, call, micro=0):
        """`call(x)` on this rank's share of a step; alone: on every rank's, then `.grad` has the mean of theirs."""
        self.inner.step, self.inner.micro = step, micro
        call(batch(step, self.rank, micro))

    def finish(self):
        """Wait for the gradients' means."""
        getattr(self.module, "finish_gradient_synchronization", lambda: None)()

    def no_sync(self):
        return getattr(self.module, "no_sync", nullcontext)()

    def clip(self, max_norm):
        return nn.utils.clip_grad_norm_(self.parameters(), max_norm)

    def weights(self):
        return {name: parameter.detach().clone() for name, parameter in self.inner.named_parameters()}


class Alone(Run):
    scheme = "alone"

    def each_rank(self, step, call, micro=0):
        self.inner.step, self.inner.micro = step, micro
        before = {each: each.grad for each in self.inner.parameters()}
        sums = {}
        for self.inner.rank in range(RANKS):
            self.inner.zero_grad()
            call(batch(step, self.inner.rank, micro))
            for each in self.inner.parameters():
                if each.grad is not None:
                    part = each.grad / RANKS
                    sums[each] = sums[each] + part if each in sums else part
        for each in self.inner.parameters():
            had, has = before.get(each), sums.get(each)
            each.grad = had if has is None else has if had is None else had + has


class Ddp(Run):
    scheme = "ddp"

    def wrapped(self, inner, unused=False, **settings):
        return DistributedDataParallel(inner, allow_unused=unused, **{"bucket_mb": 0.0005} | settings)


class Sharded(Ddp):
    scheme = "sharded optimizer"

    def make_optimizer(self):
        made = self.scenario.optimizer(self.parameters())
        groups, options = recipe(made)
        return ShardedOptimizer(groups, type(made), ddp=self.module, **options)

    def clip(self, max_norm):
        return self.optimizer.clip_grad_norm_(max_norm)

    def each_rank(self, step, call, micro=0):
        assert self.optimizer is not None  # it is there before backward, so that gradients are scattered
        super().each_rank(step, call, micro)


class Fsdp(Run):
    scheme = "fsdp"

    def wrapped(self, inner, **settings):
        return FullyShardedDataParallel(inner)

    def clip(self, max_norm):
        return self.module.clip_grad_norm_(max_norm)

    def weights(self):
        return self.module.gather_full_parameters()


class FsdpInPairs(Fsdp):
    """Two blocks are gathered together; comes out as `Fsdp` does."""

    scheme = "fsdp in pairs"

    def wrapped(self, inner, **settings):
        return FullyShardedDataParallel(inner, groups=blocks_in_runs(inner, 2))


class TorchDdp(Run):
    scheme = "torch ddp"

    def wrapped(self, inner, unused=False, **settings):
        return nn.parallel.DistributedDataParallel(inner, find_unused_parameters=unused)


class TorchFsdp2(Run):
    scheme = "torch fsdp2"

    def wrapped(self, inner, **settings):
        mesh = init_device_mesh("cpu", (RANKS,))
        for part in (*find_blocks(inner), inner):
            fully_shard(part, mesh=mesh)
        return inner

    @contextmanager
    def no_sync(self):
        self.inner.set_requires_gradient_sync(False)
        yield
        self.inner.set_requires_gradient_sync(True)

    def weights(self):
        return {
            name: value.full_tensor() if isinstance(value := parameter.detach(), DTensor) else value.clone()
            for name, parameter in self.inner.named_parameters()
        }


RUNS = {each.scheme: each for each in (Ddp, Sharded, Fsdp, FsdpInPairs, TorchDdp, TorchFsdp2)}


@dataclass(frozen=True)
class Outcome:
    """What a scenario came to under a wrapper."""

    what: str  # trains, wrong, raises, hangs, crashes
    detail: str = ""  # by how much it is wrong; the error
    is_named: bool = False  # whether the error is one of trainstep's, which say what to do


def outcome_of(name, scheme, workers):
    """Run one scenario under one wrapper on every worker."""
    try:
        found = workers.run(_train, name, scheme)
    except WorkerError as error:
        return _of_failures(error.failures, is_peer=scheme in PEERS)
    off, detail = max(found)
    return Outcome("trains") if off <= TOLERANCE else Outcome("wrong", detail)


def _of_failures(failures, *, is_peer):
    last = [text.strip().splitlines() for text in failures.values()]
    lines = [
        next((line for line in reversed(each) if re.match(r"^[\w.]+(Error|Exception)\b", line)), each[-1])
        for each in last
    ]
    ours = [re.sub(r"^[\w.]*\.", "", line) for line in lines if line.startswith("trainstep.")]
    said = [line for line in lines if not re.search(r"no answer in time|imed out|timeout", line)]
    if ours and is_peer:  # our roll call ended ranks of torch's that had lost one, or would have waited for ever
        return Outcome("crashes" if "does not answer" in ours[0] else "hangs", ours[0])
    if ours:
        return Outcome("raises", ours[0], is_named=True)
    if any(re.search(r"exit code -", line) for line in lines):
        return Outcome("crashes", next(line for line in lines if "exit code -" in line))
    lost = "Connection closed|Connection reset|connection|Broken pipe|recvVector"
    alone = [line for line in said if not re.search(lost, line)]
    if alone:
        return Outcome("raises", alone[0])
    return Outcome("hangs", lines[0])


def _train(process, name, scheme):
    """How far the weights are off on this rank, of how far they moved; and in words."""
    scenario, inner = _made(name)
    reference = scenario_weights(name)
    run = RUNS[scheme](scenario, inner, process.rank)
    scenario.train(run)
    return difference(run.weights(), reference)


def _made(name):
    from tests.parallel.odd.scenarios import EVERY

    torch.manual_seed(0)
    return EVERY[name], EVERY[name].model()


@functools.cache
def scenario_weights(name):
    """Every weight at the start and after training in one process."""
    scenario, inner = _made(name)
    before = {key: parameter.detach().clone() for key, parameter in inner.named_parameters()}
    alone = Alone(scenario, inner, 0)
    scenario.train(alone)
    after = alone.weights()
    return {key: (before.get(key, after[key]), after[key]) for key in after}


def difference(weights, reference):
    worst, words = 0.0, "no weight differs"
    for name, (before, after) in reference.items():
        kind = torch.complex128 if after.is_complex() else torch.float64
        before, after, found = (each.to(kind) for each in (before, after, weights[name]))
        moved = (after - before).norm().item() + 1e-6 * after.norm().item() + 1e-12
        off = (found - after).norm().item() / moved
        off = off if off == off else float("inf")
        if off > worst:
            worst, words = off, f"{name} by {100 * off:.2g} % of its movement"
    return worst, words
