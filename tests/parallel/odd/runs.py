"""Train an odd model (`scenarios`) under a wrapper, ours or torch's, and say what came out.

`Alone` is the yardstick: one process that takes every rank's share of the batch in turn and averages their gradients.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from tests.workers import WorkerError, Workers
from trainstep.parallel import DistributedDataParallel, FullyShardedDataParallel, ShardedOptimizer
from trainstep.step.blocks import blocks_in_runs, find_blocks
from trainstep.step.training_step import recipe

RANKS, STEPS, ROWS, WIDTH = 2, 3, 4, 8
OURS = ("ddp", "sharded optimizer", "fsdp")
PEERS = ("torch ddp", "torch fsdp2")
TOLERANCE = 2e-5
"""Of how far a weight moved: float32 sums in another order; twice what the plain models are off by (6e-6)."""


def batch(step: int, rank: int, micro: int = 0) -> Tensor:
    """A rank's inputs, (ROWS, WIDTH)."""
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1000 * step + 10 * micro + rank))


def to_target(output: Tensor, x: Tensor) -> Tensor:
    return (output - x.flip(-1)).pow(2).mean()


def mean_loss(run: Run, x: Tensor) -> Tensor:
    return to_target(run.module(x), x)


def steps(change: Any = None, *, optimizer_first: bool = False, finish: bool = True, zero: bool = True) -> Any:
    """Three steps with `change(run)` between the gradients and the optimizer's step."""

    def train(run: Run) -> None:
        assert run.optimizer is not None
        for step in range(STEPS):
            run.backward(step)
            if finish:
                run.finish()
            if change is not None:
                change(run)
            run.optimizer.step()
            if zero:
                run.optimizer.zero_grad()

    return train


three_steps = steps()


def sgd(parameters: Iterable[Any]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


@dataclass(frozen=True)
class Scenario:
    what: str  # in words, for a table
    model: Callable[[], nn.Module]
    loss: Callable[[Run, Tensor], Tensor] = mean_loss
    train: Callable[[Run], None] = three_steps
    optimizer: Callable[[Iterable[Any]], torch.optim.Optimizer] = sgd
    settings: dict[str, bool] | None = None  # of data parallel wrappers: unused=True, overlap=False


class Run:
    """A scenario's module under one wrapper on this rank."""

    scheme = ""

    def __init__(self, scenario: Scenario, inner: nn.Module, rank: int) -> None:
        self.scenario, self.inner, self.rank = scenario, inner, rank
        self.module: Any = inner
        self._optimizer: torch.optim.Optimizer | None = None
        inner.rank = rank  # type: ignore[assignment] # for models that differ by rank

    def parameters(self) -> list[nn.Parameter]:
        """What a user gives the optimizer and torch's functions."""
        return [each for each in self.module.parameters() if each.requires_grad]

    def make_optimizer(self) -> torch.optim.Optimizer:
        return self.scenario.optimizer(self.parameters())

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        if self._optimizer is None:
            self._optimizer = self.make_optimizer()
        return self._optimizer

    def backward(self, step: int, micro: int = 0, scale: float = 1.0) -> None:
        """Backward of this rank's loss; alone: of every rank's in turn."""
        self.each_rank(step, lambda x: (self.scenario.loss(self, x) * scale).backward(), micro)

    def each_rank(self, step: int, call: Callable[[Tensor], object], micro: int = 0) -> None:
        """`call(x)` on this rank's share of a step; alone: on every rank's, then `.grad` has the mean of theirs."""
        self.inner.step = step  # type: ignore[assignment]
        call(batch(step, self.rank, micro))

    def finish(self) -> None:
        """Wait for the gradients' means."""

    def no_sync(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def clip(self, max_norm: float) -> Tensor:
        return nn.utils.clip_grad_norm_(self.parameters(), max_norm)

    def weights(self) -> dict[str, Tensor]:
        return {name: parameter.detach().clone() for name, parameter in self.inner.named_parameters()}


class Alone(Run):
    scheme = "alone"

    def each_rank(self, step: int, call: Callable[[Tensor], object], micro: int = 0) -> None:
        self.inner.step = step  # type: ignore[assignment]
        before = {each: each.grad for each in self.inner.parameters()}
        sums: dict[Tensor, Tensor] = {}
        for rank in range(RANKS):
            self.inner.rank = rank  # type: ignore[assignment]
            self.inner.zero_grad()
            call(batch(step, rank, micro))
            for each in self.inner.parameters():
                if each.grad is not None:
                    part = each.grad / RANKS
                    sums[each] = sums[each] + part if each in sums else part
        for each in self.inner.parameters():
            had, has = before.get(each), sums.get(each)
            each.grad = had if has is None else has if had is None else had + has


class Ddp(Run):
    scheme = "ddp"

    def __init__(self, scenario: Scenario, inner: nn.Module, rank: int) -> None:
        super().__init__(scenario, inner, rank)
        settings = dict(scenario.settings or {})
        allow_unused = settings.pop("unused", False)
        self.module = DistributedDataParallel(inner, bucket_mb=0.0005, allow_unused=allow_unused, **settings)

    def finish(self) -> None:
        self.module.finish_gradient_synchronization()

    def no_sync(self) -> AbstractContextManager[Any]:
        return self.module.no_sync()


class Sharded(Ddp):
    scheme = "sharded optimizer"

    def make_optimizer(self) -> torch.optim.Optimizer:
        made = self.scenario.optimizer(self.parameters())
        groups, options = recipe(made)
        return ShardedOptimizer(groups, type(made), ddp=self.module, **options)

    def clip(self, max_norm: float) -> Tensor:
        assert isinstance(self.optimizer, ShardedOptimizer)
        return self.optimizer.clip_grad_norm_(max_norm)

    def each_rank(self, step: int, call: Callable[[Tensor], object], micro: int = 0) -> None:
        assert self.optimizer is not None  # it is there before backward, so that gradients are scattered
        super().each_rank(step, call, micro)


class Fsdp(Run):
    scheme = "fsdp"

    def __init__(self, scenario: Scenario, inner: nn.Module, rank: int) -> None:
        super().__init__(scenario, inner, rank)
        self.module = FullyShardedDataParallel(inner)

    def finish(self) -> None:
        self.module.finish_gradient_synchronization()

    def no_sync(self) -> AbstractContextManager[Any]:
        return self.module.no_sync()

    def clip(self, max_norm: float) -> Tensor:
        return self.module.clip_grad_norm_(max_norm)

    def weights(self) -> dict[str, Tensor]:
        return self.module.gather_full_parameters()


class FsdpInPairs(Fsdp):
    """Two blocks are gathered together; comes out as `Fsdp` does."""

    scheme = "fsdp in pairs"

    def __init__(self, scenario: Scenario, inner: nn.Module, rank: int) -> None:
        Run.__init__(self, scenario, inner, rank)
        self.module = FullyShardedDataParallel(inner, groups=blocks_in_runs(inner, 2))


class TorchDdp(Run):
    scheme = "torch ddp"

    def __init__(self, scenario: Scenario, inner: nn.Module, rank: int) -> None:
        super().__init__(scenario, inner, rank)
        unused = (scenario.settings or {}).get("unused", False)
        self.module = nn.parallel.DistributedDataParallel(inner, find_unused_parameters=unused)

    def no_sync(self) -> AbstractContextManager[Any]:
        return self.module.no_sync()


class TorchFsdp2(Run):
    scheme = "torch fsdp2"

    def __init__(self, scenario: Scenario, inner: nn.Module, rank: int) -> None:
        super().__init__(scenario, inner, rank)
        mesh = init_device_mesh("cpu", (RANKS,))
        for part in (*find_blocks(inner), inner):
            fully_shard(part, mesh=mesh)

    def no_sync(self) -> AbstractContextManager[Any]:
        return _without_sync(self.inner)

    def weights(self) -> dict[str, Tensor]:
        return {
            name: value.full_tensor() if isinstance(value := parameter.detach(), DTensor) else value.clone()
            for name, parameter in self.inner.named_parameters()
        }


class _without_sync(AbstractContextManager):  # type: ignore[type-arg]
    def __init__(self, module: Any) -> None:
        self._module = module

    def __enter__(self) -> None:
        self._module.set_requires_gradient_sync(False)

    def __exit__(self, *_: object) -> None:
        self._module.set_requires_gradient_sync(True)


RUNS = {each.scheme: each for each in (Ddp, Sharded, Fsdp, FsdpInPairs, TorchDdp, TorchFsdp2)}


@dataclass(frozen=True)
class Outcome:
    """What a scenario came to under a wrapper."""

    what: str  # trains, wrong, raises, hangs, crashes
    detail: str = ""  # by how much it is wrong; the error
    is_named: bool = False  # whether the error is one of trainstep's, which say what to do


def outcome_of(name: str, scheme: str, workers: Workers) -> Outcome:
    """Run one scenario under one wrapper on every worker."""
    try:
        found = workers.run(_train, name, scheme)
    except WorkerError as error:
        return _of_failures(error.failures)
    off, detail = max(found)
    return Outcome("trains") if off <= TOLERANCE else Outcome("wrong", detail)


def _of_failures(failures: dict[int, str]) -> Outcome:
    last = [text.strip().splitlines() for text in failures.values()]
    lines = [
        next((line for line in reversed(each) if re.match(r"^[\w.]+(Error|Exception)\b", line)), each[-1])
        for each in last
    ]
    ours = [re.sub(r"^[\w.]*\.", "", line) for line in lines if line.startswith("trainstep.")]
    said = [line for line in lines if not re.search(r"no answer in time|imed out|timeout", line)]
    if ours:
        return Outcome("raises", ours[0], is_named=True)
    if any(re.search(r"exit code -", line) for line in lines):
        return Outcome("crashes", next(line for line in lines if "exit code -" in line))
    lost = "Connection closed|Connection reset|connection|Broken pipe|recvVector"
    alone = [line for line in said if not re.search(lost, line)]
    if alone:
        return Outcome("raises", alone[0])
    return Outcome("hangs", lines[0])


def _train(process: Any, name: str, scheme: str) -> tuple[float, str]:
    """How far the weights are off on this rank, of how far they moved; and in words."""
    from tests.parallel.odd.scenarios import SCENARIOS

    scenario = SCENARIOS[name]
    reference = scenario_weights(name)
    torch.manual_seed(0)
    inner = scenario.model()
    run = RUNS[scheme](scenario, inner, process.rank)
    scenario.train(run)
    return difference(run.weights(), reference)


@functools.cache
def scenario_weights(name: str) -> dict[str, tuple[Tensor, Tensor]]:
    """Every weight at the start and after training in one process."""
    from tests.parallel.odd.scenarios import SCENARIOS

    torch.manual_seed(0)
    inner = SCENARIOS[name].model()
    before = {key: parameter.detach().clone() for key, parameter in inner.named_parameters()}
    alone = Alone(SCENARIOS[name], inner, 0)
    SCENARIOS[name].train(alone)
    after = alone.weights()
    return {key: (before.get(key, after[key]), after[key]) for key in after}


def difference(weights: dict[str, Tensor], reference: dict[str, tuple[Tensor, Tensor]]) -> tuple[float, str]:
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
