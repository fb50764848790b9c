"""Reference of schemes: one process computes a workload on the ranks' shares, one after another.

It is the plain computation of the error budget, in float64 and float32 and in the precision at hand: schemes sum in
other orders and round elsewhere, but no more often.

A model with dropout draws random numbers. Here, and only here, each forward starts from a seed of its own, so that a
share's numbers are the same wherever it is run. In another precision a GPU drops other elements, so gradients, and what
the precision is off by, are taken without dropout. Training that is off by more is held against further training with
dropout, whose gradients alone are rounded at random: that is how schemes differ, which add them up in another order.

Batch normalisation takes its mean and variance from a share, in one process as on a rank, and each rank's statistics
begin where the others' do.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn

from trainstep.base.config import StepConfig
from trainstep.base.precision import PRECISIONS
from trainstep.base.tolerance import DRAWS, FLOAT32_AT_MOST, REPEATS, TRAINING_DRAWS, allowed_error, one_rounding
from trainstep.check.buffers import Watched, joined
from trainstep.check.dropout import without_dropout
from trainstep.check.gradients import Gradients, Rounding, dense
from trainstep.check.reference import Reference
from trainstep.check.rounding import RandomRounding
from trainstep.check.updates import UPDATES
from trainstep.measure.outcome import Failure, attempt
from trainstep.parallel.replicas import local_gradients
from trainstep.step.batches import map_tensors, share_of
from trainstep.step.casting import autocast_dtype, stored_dtype
from trainstep.step.randomness import from_seed
from trainstep.step.training_step import TrainingStep
from trainstep.step.weights import buffers_of, copied_to_host, load, load_buffers
from trainstep.step.workload import Workload, WorkloadSource

STEPS = 5
BATCHES = (1, 3)
"""The batches whose gradients are compared: the first with the initial weights, the third with those `MOVED`, and both
in one step of two parts with the initial weights."""
ACCUMULATED = 2
"""The place of that step, after those of `BATCHES`. A place's batch is a tuple of the parts of its step."""
SHRUNK, MOVED = 2.0**-5, 2.0**-13
"""There every weight is smaller by this part of itself, and then larger by that: a scheme that computes with weights
from before an update shows it, and so does one whose weights were zero. More of what is the same for all weights would
add up over a matrix's rows and through layers, until a deep model's blocks had hardly a gradient left. Where parameters
may go without a gradient, and so without an update, weights stay as they are."""
FILLED = (2.0**-7, *[-3 * 2.0**-7] * (UPDATES - 1))
"""Values that fill every gradient before each of the updates: large beside Adam's ε, and unlike in size and sign."""


@dataclass(frozen=True)
class Trained:
    """Result of `STEPS` steps in one process."""

    losses: tuple[float, ...]
    parameters: dict[str, Tensor]
    """Afterwards."""
    moved: float
    """‖parameters − initial ones‖."""
    frozen: int
    """Number of their elements that are not trained."""
    unused: bool
    """True if some share of a batch gave some parameter no gradient."""
    clips_all: bool
    """True if every gradient is that of a parameter that the optimizer has: what is clipped is what it is handed."""


@dataclass(frozen=True)
class Expected:
    """Results of one process, and how far a scheme may be from them."""

    gradients: Reference
    """Reference whose places are those of `BATCHES` and `ACCUMULATED`."""
    updates: Mapping[str, Tensor]
    """Movement of each parameter in updates of `FILLED`; without those that are not used in both."""
    trained: Trained
    loss_allowed: float
    """Tolerance of a scheme's losses, absolute."""
    update_allowed: float
    """Tolerance of its parameters after `STEPS`, relative to how far they moved."""
    share_difference: float | None
    """Distance of the first batch's gradients from the mean of its shares', relative; None where that is random."""
    train: Callable[..., Trained]
    """Trains as `trained` was; with a `seed`, all gradients are rounded at random."""

    def allowed(self, loss: float, update: float) -> tuple[float, float]:
        """Return the tolerances of losses and parameters for a scheme that is off by these after `STEPS`."""
        known = self.loss_allowed, self.update_allowed
        return known if loss <= known[0] and update <= known[1] else self._allowed_if_rounded

    @cached_property
    def _allowed_if_rounded(self) -> tuple[float, float]:
        drawn = [self.train(seed=seed) for seed in range(TRAINING_DRAWS)]
        loss, update = _allowed(self.trained, drawn, one_rounding(torch.float32))
        return max(self.loss_allowed, loss), max(self.update_allowed, update)

    @property
    def norm(self) -> float | None:
        """‖g‖ of the step of two parts; None where clipping takes other gradients into its norm."""
        squares = self.gradients.places[ACCUMULATED].gradients.squares
        return math.sqrt(sum(squares.values())) if self.trained.clips_all else None

    @property
    def initial(self) -> Mapping[str, Tensor]:
        """The initial weights, on the host, in float32."""
        return self.gradients.places[0].state


def expected(source: WorkloadSource, config: StepConfig, world_size: int) -> Expected:
    """Compute all of it in one process on the whole batch.

    Raises:
        UsageError: the loss or gradients are not finite.
    """
    plain_config = dataclasses.replace(config, compile="off")
    wide_config = dataclasses.replace(plain_config, precision="fp32")
    train = partial(_train, source, plain_config, world_size)
    with without_dropout() as dropout:
        shares = WorkloadSource(
            source.name, lambda step: seeded(source.build(step), itertools.cycle(range(world_size))), source.model
        )
        plain = train()
        wides = _trained_beside(plain, source, wide_config, world_size, double=config.precision == "fp32")
        places, mean = partial(_places, not plain.unused), partial(_mean_gradients, world_size)
        gradients = Reference(shares, wide_config, places, mean)
        apart = _share_difference(source, wide_config, world_size)
    rounding = one_rounding(autocast_dtype(config.precision) or stored_dtype(config.precision) or torch.float32)
    allowed = _allowed(plain, wides, rounding)
    if dropout.calls:
        plain = train()
    return Expected(gradients, _updates(source, plain_config, world_size), plain, *allowed, apart, train)


def _allowed(plain: Trained, others: Sequence[Trained], rounding: float) -> tuple[float, float]:
    """Return the tolerances of losses and parameters, from the same training with other roundings."""
    off = max(abs(a - b) for other in others for a, b in zip(plain.losses, other.losses, strict=True))
    own = max(_distance(plain.parameters, other.parameters) for other in others) / plain.moved
    return allowed_error(off, rounding * max(map(abs, plain.losses))), allowed_error(own, rounding)


def seeded(workload: Workload, seeds: Iterator[int]) -> Workload:
    """The workload, each forward drawing from the next seed, and nothing else from what that leaves."""
    forward = workload.forward

    def from_its_seed(module: nn.Module, batch: Any) -> Any:
        with from_seed(next(seeds), {parameter.device for parameter in module.parameters()}):
            return forward(module, batch)

    return dataclasses.replace(workload, forward=from_its_seed)


def fill_gradients(step: TrainingStep, values: Iterable[float | None]) -> None:
    """From now on the step's optimizer finds these in its gradients, one in each update; None: what backward left."""
    each = iter(values)

    def fill(*_: Any) -> None:
        value = next(each)
        if value is not None:
            for gradient in local_gradients(step.replica):
                gradient.fill_(value)

    step.optimizer.register_step_pre_hook(fill)


def ready_to_fill(workload: Workload, config: StepConfig) -> Workload:
    """The workload; weights that are stored in 16 bits are made zero, so that updates are rounded as themselves."""
    if PRECISIONS[config.precision].is_stored_half:
        with torch.no_grad():
            for parameter in workload.module.parameters():
                parameter.zero_()
    return workload


def batches(step: TrainingStep, count: int, passes: int) -> Iterator[Any]:
    """A batch for each pass: the first `count`, and the last of them again."""
    batch = None
    for number in range(passes):
        batch = step.next_batch() if number < count else batch
        yield batch


def _places(moves: bool, step: TrainingStep) -> Iterator[tuple[Any, ...]]:
    last, parts = BATCHES[-1], []
    start = copied_to_host(dict(step.module.named_parameters()))
    for number, batch in enumerate(batches(step, last, last), 1):
        if number == last and moves:
            with torch.no_grad():
                for parameter in (each for group in step.optimizer.param_groups for each in group["params"]):
                    if parameter.requires_grad:
                        parameter.sub_(parameter * SHRUNK - MOVED)  # as SGD does it
        if number in BATCHES:
            parts.append(batch)
            yield (batch,)
    load(step.module, start)
    yield tuple(parts)


def _shares(batch: Any, world_size: int) -> list[Any]:
    return [share_of(batch, rank, world_size) for rank in range(world_size)]


def on_rank(rank: int) -> str:
    """Ending of the names of buffers, each of which every rank has."""
    return f" of rank {rank}"


def _mean_gradients(world_size: int, step: TrainingStep, parts: Sequence[Any]) -> Gradients:
    """The mean over the parts' shares, with each rank's buffers.

    It has zeros for what the optimizer does not have, or no share uses. As ranks do, it sums in float32 at least,
    whatever the weights are cast to.
    """
    losses, sums = [], dict[nn.Parameter, Tensor]()
    trained = {id(parameter) for group in step.optimizer.param_groups for parameter in group["params"]}
    watched, start = Watched(step.module, on_host=False), buffers_of(step.module)
    buffers = [start] * world_size
    for part in parts:
        for rank, share in enumerate(_shares(part, world_size)):
            load_buffers(step.module, buffers[rank])
            losses.append(step.gradients(share))
            buffers[rank] = buffers_of(step.module)
            for parameter in step.module.parameters():
                if id(parameter) in trained and parameter.grad is not None:
                    gradient = dense(parameter.grad)
                    gradient = gradient.to(torch.promote_types(gradient.dtype, torch.float32))
                    sums[parameter] = sums[parameter] + gradient if parameter in sums else gradient
                parameter.grad = None
    changes = []
    for rank, after in enumerate(buffers):
        load_buffers(step.module, after)
        changes.append(watched.changes(on_rank(rank)))
    load_buffers(step.module, start)
    by_name = {}
    for name, parameter in step.module.named_parameters():
        gradient = sums.pop(parameter) / len(losses) if parameter in sums else torch.zeros_like(parameter)
        by_name[name] = gradient.float()
    return Gradients(float(torch.stack(losses).mean()), by_name, joined(changes))


def _updates(source: WorkloadSource, config: StepConfig, world_size: int) -> dict[str, Tensor]:
    plain = config if config.optimizer == "sgd" else dataclasses.replace(config, optimizer=StepConfig().optimizer)
    step = TrainingStep(ready_to_fill(seeded(source.build(plain), itertools.count()), plain), plain)
    used = dict(step.module.named_parameters())
    before = {name: value.detach().clone() for name, value in used.items()}

    def drop_unused(*_: Any) -> None:
        for name in [name for name, value in used.items() if value.grad is None]:
            del used[name]

    step.optimizer.register_step_pre_hook(drop_unused)
    fill_gradients(step, FILLED)
    for batch in batches(step, 2, len(FILLED)):
        step.accumulate(_shares(batch, world_size))
    moved = {name: (value.detach().double() - before[name].double()).float() for name, value in used.items()}
    return copied_to_host(moved)


def _trained_beside(
    plain: Trained, source: WorkloadSource, config: StepConfig, world_size: int, *, double: bool
) -> list[Trained]:
    """The same training without the precision's rounding; or, where a model does not run in float64 or computes
    something else in it, with more of float32's."""
    if not double:
        return [_train(source, config, world_size)]
    exact = attempt(lambda: _train(source, config, world_size, double=True))
    if not isinstance(exact, Failure) and math.isclose(exact.losses[0], plain.losses[0], rel_tol=FLOAT32_AT_MOST):
        return [exact]
    drawn = []
    for seed in range(DRAWS):
        with RandomRounding(config.precision, seed):
            drawn.append(_train(source, config, world_size))
    return drawn


def _share_difference(source: WorkloadSource, config: StepConfig, world_size: int) -> float | None:
    """Rounding alone, where a loss is a mean over as many terms in every share of a batch; None where random
    numbers make a difference too, which a share draws for other rows."""
    seeds = itertools.chain(itertools.repeat(0, world_size + 1), itertools.repeat(1))
    step = TrainingStep(seeded(source.build(config), seeds), config)
    batch = step.next_batch()
    mean, whole, again = (_mean_gradients(parts, step, (batch,)) for parts in (world_size, 1, 1))
    is_random = Rounding.between(whole, again).relative(whole) > REPEATS
    return None if is_random else Rounding.between(whole, mean).relative(mean)


def _train(
    source: WorkloadSource, config: StepConfig, world_size: int, *, double: bool = False, seed: int | None = None
) -> Trained:
    """Train in one process.

    Args:
        double: in float64.
        seed: of random roundings of the gradients; None for none.
    """
    workload = seeded(source.build(config), itertools.count())
    if double:
        workload.module.double()
    step = TrainingStep(workload, config)
    trained = [parameter for parameter in step.module.parameters() if parameter.requires_grad]
    came: list[nn.Parameter] = []
    for parameter in trained:
        parameter.register_post_accumulate_grad_hook(came.append)
    if seed is not None:
        rounding = RandomRounding("fp32", seed)
        step.optimizer.register_step_pre_hook(lambda *_: rounding.round(local_gradients(step.replica)))
    before = {name: value.detach().clone() for name, value in step.module.named_parameters()}
    losses = []
    for _ in range(STEPS):
        batch = step.next_batch()
        if double:
            batch = map_tensors(batch, lambda tensor: tensor.double() if tensor.is_floating_point() else tensor)
        losses.append(step.accumulate(_shares(batch, world_size))[0])
    after = {name: value.detach() for name, value in step.module.named_parameters()}
    unused = len(came) < len(trained) * STEPS * world_size
    frozen = sum(parameter.numel() for parameter in step.module.parameters() if not parameter.requires_grad)
    had = {id(parameter) for group in step.optimizer.param_groups for parameter in group["params"]}
    clips_all = all(id(parameter) in had for parameter in trained)
    return Trained(tuple(float(loss) for loss in losses), after, _distance(after, before), frozen, unused, clips_all)


def _distance(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    return math.sqrt(sum(float((a[name].double() - b[name].double()).square().sum()) for name in a))
