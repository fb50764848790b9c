"""Does a scheme train what one process would? It is judged in three parts, and shows no speed if it fails any.

1. The gradients that it hands its optimizer, per parameter and row, scale included: in float32, at about 1e-5,
   and in the precision at hand (`check.gradients`), in the first pass through the wrapper and in a later
   one with other weights: buckets are filled anew after one, weights may be stale after an update, and something may go
   wrong after ten. An optimizer that adapts hides a factor: five steps of AdamW are the same with gradients × 100.
   Passes in between have one batch and the same weights, and each rank must have the same gradients in all of them.
   A third step adds up two parts and is clipped to half of its norm, which is compared too, as clipping hides a factor.
   Each rank's buffers, such as running statistics, are compared in all three.
2. Twelve updates of its optimizer, every gradient filled with one constant, which is the same for shards and wholes, at
   float32's tolerance (`check.updates`).
3. Loss and parameters after `STEPS` steps of training: state and buckets that go wrong over steps.

A scheme that shards weights gathers them in the type it computes in: more of it rounds than under autocast alone, and
how much more is measured in one process (`Reference.compare`).

A scheme that sums gradients in the 16 bits of autocast sums them in float32 where there is none: in float32 all else of
it is judged, at float32's budget, and in its precision the sum too, at that precision's.

Gradients are read as any wrapper, ours or torch's, shows them: by what SGD with a learning rate of 2⁴⁰ does to the
parameters. A power of two is exact, and 2⁴⁰ · g so much larger than the weights that (before − after) / 2⁴⁰ has all of
float32's digits of g.

Each time, all ranks must have the same parameters, to the bit.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from trainstep.base.config import StepConfig
from trainstep.base.errors import UnsupportedError, UsageError
from trainstep.base.precision import PRECISIONS, PrecisionName
from trainstep.base.tolerance import FLOAT32_ROUNDOFF, REPEATED, REPEATS, allowed_error, larger, one_rounding
from trainstep.check.buffers import Buffers, Watched, joined
from trainstep.check.dropout import eager_random, without_dropout
from trainstep.check.gradients import Gradients, dense
from trainstep.check.one_process import (
    ACCUMULATED,
    BATCHES,
    FILLED,
    MOVED,
    SHRUNK,
    STEPS,
    Expected,
    batches,
    expected,
    fill_gradients,
    on_rank,
    ready_to_fill,
    seeded,
)
from trainstep.check.parts import norm
from trainstep.check.updates import compare_updates, named
from trainstep.check.verdict import Deviation, Part, Verdict
from trainstep.measure.outcome import Failure, attempt, attempt_on_all_ranks, release_memory
from trainstep.parallel.process import AgreedError, Process
from trainstep.parallel.replicas import full_parameters, local_gradients
from trainstep.step.training_step import TrainingStep
from trainstep.step.weights import buffers_of, load_buffers
from trainstep.step.workload import Workload

if TYPE_CHECKING:
    from trainstep.bench.parallel import ParallelCase

Result = TypeVar("Result")

RANKS_DIFFER = "its ranks have different parameters"
LEARNING_RATE = 2.0**40
"""By which SGD shows gradients."""
PASSES = 16
"""More than a dozen, so that what goes wrong after ten is among them, and what goes wrong in every tenth; in float32
beside another precision, three."""
CLIPPED, ADDED = 0.5, 1e-6
"""Part of the norm to which the step of two parts is clipped, and what torch adds to the norm before it divides."""
OF_TWO_PARTS = "of a step in two parts, the first under no_sync, clipped to half of its norm"
"""Note on that step where it is wrong."""


@dataclass(frozen=True)
class Comparison:
    """All cases, each beside one process."""

    cases: Mapping[ParallelCase, Verdict | Failure | None]
    """None for single: it trains on its own batch alone, another model, and has only a time to compare with."""
    num_parameters: int
    """Size of the model, on rank 0; 0 on others."""
    frozen: int
    """Number of these that are not trained."""
    allow_unused: bool
    """True if parameters may get no gradient."""
    share_difference: float | None = None
    """Distance of a batch's gradients from the mean of its shares', relative; None but on rank 0."""


def compare_with_one_process(
    cases: Sequence[ParallelCase], process: Process, on_part: Callable[[str], object] = lambda part: None
) -> Comparison:
    """Judge every case on all ranks, beside one process on rank 0. All ranks call it.

    They may differ in scheme and compilation: one process computes the same for all of them. Where it cannot train on
    the whole batch, that is every scheme's failure.

    Raises:
        AgreedError: the workload cannot be trained for a reason that its author can mend.
    """
    on_part("what one process computes of the whole batch")
    wanted, allow_unused = expected_on_first_rank(cases[0], process)
    if isinstance(wanted, Failure):
        return Comparison(dict.fromkeys(cases, wanted), 0, 0, allow_unused)
    judged: dict[ParallelCase, Verdict | Failure | None] = dict.fromkeys(cases)
    for case in (each for each in cases if each.scheme.communicates):
        on_part(f"{case.label} is judged")
        tried = dataclasses.replace(case, allow_unused=allow_unused)
        found = attempt_on_all_ranks(partial(agreement, tried, wanted, process), process)
        judged[case] = found if isinstance(found, Failure) else found[0]
    if wanted is None:
        return Comparison(judged, 0, 0, allow_unused)
    count = sum(value.numel() for value in wanted.trained.parameters.values())
    return Comparison(judged, count, wanted.trained.frozen, allow_unused, wanted.share_difference)


def expected_on_first_rank(case: ParallelCase, process: Process) -> tuple[Expected | Failure | None, bool]:
    """Compute in one process, on rank 0, and return that there and None elsewhere; on all ranks, why it could not, and
    whether it left parameters unused. All ranks call it.

    Raises:
        AgreedError: the workload cannot be trained for a reason that its author can mend.
    """
    found: Expected | Failure | None = None
    mistake: str | None = None
    if process.rank == 0:
        try:
            with _host_threads(process):
                found = attempt(lambda: expected(case.source, case.whole(process.world_size), process.world_size))
        except UsageError as error:  # the others wait for what is sent to them
            mistake = str(error)
    failure = found if isinstance(found, Failure) else None
    if failure is not None and failure.status != "unsupported":
        said = "one process could not train on the whole batch, to compare with: "
        failure = dataclasses.replace(failure, reason=said + failure.reason)
    known: list[Any] = [mistake, failure, isinstance(found, Expected) and found.trained.unused]
    dist.broadcast_object_list(known, group=process.group, group_src=0)
    mistake, failure, allow_unused = known
    if mistake is not None:
        raise AgreedError(mistake)
    return failure or found, allow_unused


def agreement(case: ParallelCase, wanted: Expected | None, process: Process) -> Verdict | None:
    """Judge a scheme: every part on every rank; rank 0 has what is wanted, and it alone gets the result."""
    if case.scheme.narrow_reduce and not PRECISIONS[case.config.precision].is_autocast:
        raise UnsupportedError(
            f"{case.scheme.name} sums in the 16 bits of autocast, and {case.config.precision} has none; use bf16"
        )
    trial = _Trial(case, wanted, process)
    with without_dropout():
        own = trial.gradients(case.config.precision, PASSES)
        float32 = None if case.config.precision == "fp32" else trial.gradients("fp32", BATCHES[-1])
    optimizer = trial.updates()
    loss, update = trial.training()
    if trial.error is not None:
        raise trial.error
    if wanted is None or own is None or optimizer is None:
        return None
    trial._release()
    with _host_threads(process):
        allowed = wanted.allowed(loss, update)
    parts = {
        "optimizer": named(optimizer),
        "loss": Part(loss, allowed[0], f"after {STEPS} steps its loss"),
        "update": Part(update, allowed[1], f"after {STEPS} steps its parameters' movement"),
    }
    return Verdict(own, float32, parts, (*trial.faults, *(() if trial.ranks_agree else (RANKS_DIFFER,))))


@dataclass
class _Trial:
    """The parts of one scheme's judgement; all ranks go through each."""

    case: ParallelCase
    wanted: Expected | None
    process: Process
    ranks_agree: bool = True
    faults: list[str] = field(default_factory=list)
    """Mistakes without a number; none but on rank 0."""
    error: Exception | None = None
    """Error that rank 0 met while the others went on."""

    def gradients(self, precision: PrecisionName, most: int) -> Deviation | None:
        """In the first pass, the one numbered `most` or the step of two parts, whichever uses most of what is allowed;
        None but on rank 0."""
        # A fused SGD, which has no sharding strategy for FSDP2's DTensors, shows no more.
        unfused = StepConfig().optimizer
        form = (precision == "fp32" and self.case.float32) or self.case.config
        config = dataclasses.replace(form, precision=precision, optimizer=unfused)
        case = dataclasses.replace(self.case, config=config)
        norms: list[Any] = [None if self.wanted is None else self.wanted.norm]
        dist.broadcast_object_list(norms, group=self.process.group, group_src=0)
        found = []
        for place, passes in enumerate((1, most, 2)):
            step = self._build(case, self._shown_by_sgd)
            clips = place == ACCUMULATED and step.scaler is None and norms[0] is not None
            loss, norm, buffers = self._pass_on(step, place, passes, norms[0])
            moved = self._moved(step, place)
            del step
            self._release()
            if self.wanted is not None:
                # By the factor that its own norm gives, which is compared apart.
                rate = -LEARNING_RATE * (CLIPPED * (norms[0] + ADDED) / (norm + ADDED) if clips else 1.0)
                shown = Gradients(loss, {name: value / rate for name, value in moved.items()}, buffers)
                found.append(self._alone(partial(self._compare, self.wanted, shown, norm, place, precision)))
        known = [each for each in found if each is not None]
        return max(known, key=lambda each: each.severity, default=None)

    def _compare(
        self, wanted: Expected, shown: Gradients, norm: float, place: int, precision: PrecisionName
    ) -> Deviation:
        """Compare what a step showed in a place, and the norm that it was clipped by, NaN if it was not."""
        narrow = self.case.scheme.shards_weights
        found = wanted.gradients.compare(shown, place, precision, narrow_weights=narrow)
        allowed = found.gradient_allowed
        if wanted.norm is not None and self.process.device.type == "cpu":  # there torch adds squares up in float32
            mean = wanted.gradients.places[ACCUMULATED].gradients.by_name.values()
            allowed = allowed_error(abs(float(nn.utils.get_total_norm(mean)) / wanted.norm - 1), allowed)
        if wanted.norm is not None and abs(norm - wanted.norm) > allowed * wanted.norm:
            self.faults.append(f"it clips by a norm of {norm:.6g}, where the mean gradient has {wanted.norm:.6g}")
        return found if place != ACCUMULATED or found.is_right else dataclasses.replace(found, note=OF_TWO_PARTS)

    def _pass_on(
        self, step: TrainingStep, place: int, passes: int, whole: float | None
    ) -> tuple[float, float, Buffers]:
        """Take a place's passes, the last of which moves the weights by its gradients.

        Args:
            whole: `Expected.norm`. Where it is None, gradients that the optimizer has not add up from pass to pass.

        Returns:
            Its loss and the norm before it was clipped, NaN if it was not, as means over the ranks, and all ranks'
            buffers.
        """
        start, count = buffers_of(step.module), BATCHES[min(place, 1)]
        max_norm = None if whole is None or step.scaler is not None else CLIPPED * (whole + ADDED)
        off = _repeats(step, range(count, count if whole is None else passes))
        rates = [(0.0, 0.0)] * (passes - 1) + [(LEARNING_RATE, 0.0)]
        if place == 1 and not self.case.allow_unused:
            rates[-2] = (1.0, SHRUNK)
            fill_gradients(step, [None] * (passes - 2) + [-MOVED, None])
        given = batches(step, count, count if place == ACCUMULATED else passes)
        if place == ACCUMULATED:
            parts = [batch for number, batch in enumerate(given, 1) if number in BATCHES]
            given = itertools.repeat(parts, passes)
        for rate, batch in zip(rates, given, strict=True):
            for group in step.optimizer.param_groups:
                group["lr"], group["weight_decay"] = rate
            load_buffers(step.module, start)
            watched = Watched(step.module, on_host=False)
            loss, norm = (step(batch), None) if place != ACCUMULATED else step.accumulate(batch, max_norm)
        assert loss is not None, "a step has a loss"
        norm = torch.full_like(loss, math.nan) if norm is None else norm
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        means = _mean_over_ranks([loss.double(), norm.double()], self.process)
        everywhere: list[Any] = [None] * self.process.world_size
        told = watched.changes(on_rank(self.process.rank)), off
        dist.all_gather_object(everywhere, told, group=self.process.group)
        offs = [each for _, each in everywhere]
        rank = max(range(len(offs)), key=lambda each: max(offs[each], default=0.0))
        worst = max(offs[rank], default=0.0)
        if self.wanted is not None and worst > REPEATED * max(REPEATS, one_rounding(step.config.precision)):
            self.faults.append(
                f"with one batch and the same weights, the gradients of pass {count + offs[rank].index(worst)} on rank "
                f"{rank} are {worst:.2g} off those of pass {count}"
            )
        return means[0], means[1], joined(each for each, _ in everywhere)

    def updates(self) -> Part | None:
        """Check the workload's optimizer, from equal gradients; None but on rank 0."""
        config = self.case.config
        seeds = itertools.count(self.process.rank, self.process.world_size)
        uncompiled = dataclasses.replace(config, compile="off")  # what backward computes is filled over
        case = dataclasses.replace(self.case, config=uncompiled)
        step = self._build(case, lambda workload: ready_to_fill(seeded(workload, seeds), config))
        fill_gradients(step, FILLED)
        for batch in batches(step, 2, len(FILLED)):
            _loss_of(step, batch)
        entry = PRECISIONS[config.precision]
        moved = self._moved(step, None if entry.is_stored_half else 0)
        if self.wanted is None:
            return None
        updates = self.wanted.updates
        start = {name: 0.0 if entry.is_stored_half else float(self.wanted.initial[name].norm()) for name in updates}
        sizes, unit = start, entry.unit_roundoff if entry.is_stored_half else FLOAT32_ROUNDOFF
        return self._alone(lambda: compare_updates(moved, updates, sizes, unit))

    def training(self) -> tuple[float, float]:
        """Return the errors of losses and parameters after `STEPS` steps; meaningless but on rank 0."""
        process = self.process
        with nullcontext() if self.case.config.compile == "off" else eager_random():
            seeds = itertools.count(process.rank, process.world_size)
            step = self._build(self.case, lambda workload: seeded(workload, seeds))
            means = _mean_over_ranks([_loss_of(step, batch) for batch in batches(step, STEPS, STEPS)], process)
        trained = None if self.wanted is None else self.wanted.trained
        squares: dict[str, float] = {}
        for name, value in self._in_full(step):
            if trained is not None and name in trained.parameters:  # a tied one may come again, by another name
                squares[name] = float((value.double() - trained.parameters[name].double()).square().sum())
        if trained is None:
            return 0.0, 0.0
        off = max(abs(a - b) for a, b in zip(means, trained.losses, strict=True))
        return off, math.sqrt(sum(squares.get(name, math.inf) for name in trained.parameters)) / trained.moved

    def _build(self, case: ParallelCase, change: Callable[[Workload], Workload] = lambda same: same) -> TrainingStep:
        self._release()
        return case.build(self.process, change)

    def _alone(self, work: Callable[[], Result]) -> Result | None:
        """Compute on rank 0 alone; its error is kept until no rank is left waiting for it in a collective."""
        try:
            with _host_threads(self.process):
                return work()
        except Exception as error:
            self.error = error
            return None

    def _release(self) -> None:
        """Free memory that the last step held in circles, and its code; on a CPU that is little, and left to Python."""
        if self.process.device.type == "cuda" or self.case.config.compile != "off":
            release_memory()

    def _shown_by_sgd(self, workload: Workload) -> Workload:
        """The workload, each forward of this rank from one seed, its optimizer SGD on the same parameters."""

        def optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
            groups = [{"params": group["params"]} for group in workload.optimizer(parameters).param_groups]
            return torch.optim.SGD(groups, lr=0.0)

        return dataclasses.replace(seeded(workload, itertools.repeat(self.process.rank)), optimizer=optimizer)

    def _moved(self, step: TrainingStep, place: int | None) -> dict[str, Tensor]:
        """Return how far each parameter is from one process's in a place (None: from zero), on its device; nothing but
        on rank 0."""
        moved: dict[str, Tensor] = {}
        for name, value in self._in_full(step):
            if self.wanted is not None and name in (state := self.wanted.gradients.places[place or 0].state):
                before = torch.zeros_like(value) if place is None else state[name].to(value.device, value.dtype)
                moved[name] = (value.double() - before.double()).float()
        return moved

    def _in_full(self, step: TrainingStep) -> Iterable[tuple[str, Tensor]]:
        """Every parameter in full; afterwards it is known whether it was the same on all ranks."""
        sums = []
        for name, value in full_parameters(step.replica, step.module):
            sums.append(_checksum(value))
            yield name, value
        everywhere: list[Any] = [None] * self.process.world_size
        dist.all_gather_object(everywhere, torch.stack(sums).tolist(), group=self.process.group)
        self.ranks_agree &= all(each == everywhere[0] for each in everywhere)


@contextmanager
def _host_threads(process: Process) -> Iterator[None]:
    """Inside, the host computes with all its cores, where torchrun gave one to each rank: the others wait on GPUs."""
    before = torch.get_num_threads()
    if process.device.type == "cuda":
        torch.set_num_threads(len(os.sched_getaffinity(0)))
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _repeats(step: TrainingStep, passes: range) -> list[float]:
    """From now on, how far the gradients of each of these passes are from those of the first, relative, on this rank:
    the worst of each pass."""
    first: list[Tensor] = []
    off: list[float] = []
    numbers = itertools.count(1)

    def compare(*_: Any) -> None:
        if next(numbers) not in passes:
            return
        own = [dense(getattr(each, "_local_tensor", each)).float() for each in local_gradients(step.replica)]
        first.extend([] if off else [each.clone() for each in own])
        least = REPEATS * math.hypot(*map(norm, first)) or 1.0
        shares = [norm(one - other) / (norm(other) + least) for one, other in zip(own, first, strict=False)]
        off.append(max((larger(0.0, each) for each in shares), default=0.0) if len(own) == len(first) else math.inf)

    step.optimizer.register_step_pre_hook(compare)
    return off


def _loss_of(step: TrainingStep, batch: Any) -> Tensor:
    loss = step(batch)
    assert loss is not None, "a step has a loss"
    return loss.double()


def _mean_over_ranks(losses: Sequence[Tensor], process: Process) -> list[float]:
    mean = torch.stack(list(losses))
    dist.all_reduce(mean, group=process.group)
    return [float(each) for each in mean / process.world_size]


_BITS: Mapping[int, torch.dtype] = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _checksum(value: Tensor) -> Tensor:
    """Sum over a tensor's bits and where they are, modulo 2⁶⁴, on its device."""
    bits = value.contiguous().reshape(-1).view(_BITS[value.element_size()]).long()
    return (bits * torch.arange(1, 2 * bits.numel(), 2, device=bits.device)).sum()
