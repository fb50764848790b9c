"""Schemes of data parallel training that are wrong on purpose, and right ones that look unusual, for two ranks.

A wrong scheme is one of ours or torch's with something done to it where a rank builds it: to what its optimizer is
handed, to the optimizer, or to the functions that communicate. One process computes what is right.

Batch normalisation without synchronised statistics is another model than on the whole batch: what is held against it is
one process that takes the ranks' shares one after another, and so normalises each share by itself, too.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.optim import ZeroRedundancyOptimizer  # noqa: F401 – cases.toml has it

from tests.bench.parallel import by_scheme
from tools.trust.planted import table
from tools.trust.planted.buffers import CONVOLUTIONS, norms  # noqa: F401 – cases.toml has the first
from tools.trust.planted.right import RIGHT as RIGHT_STEPS
from trainstep.base.config import ModelConfig, StepConfig
from trainstep.base.schemes import SCHEMES, Scheme
from trainstep.bench import parallel
from trainstep.bench.parallel import ParallelCase
from trainstep.check import dropout, reference
from trainstep.check.one_process import Expected, expected
from trainstep.check.ranks import agreement, compare_with_one_process
from trainstep.check.verdict import Verdict
from trainstep.measure import outcome
from trainstep.measure.outcome import Failure
from trainstep.parallel.collectives import all_reduce_sum, reduce_scatter_sum  # noqa: F401 – cases.toml has it
from trainstep.parallel.ddp import bucket as sent
from trainstep.parallel.process import Process
from trainstep.parallel.replicas import local_gradients, local_weights
from trainstep.parallel.slices import flat, slice_of
from trainstep.parallel.zero import pieces  # noqa: F401 – cases.toml has it
from trainstep.step.model import text
from trainstep.step.training_step import MakeOptimizer, Replica
from trainstep.step.workload import WorkloadSource, builtin_source

MODEL = ModelConfig(vocab_size=256, d_model=32, d_ff=64, num_layers=2, num_heads=2, max_context=16)
SOURCE = builtin_source("little", MODEL)
CONFIG = StepConfig(context=16, batch=2, device="cpu")
PRECISIONS = ("fp32", "bf16")
SMALL_BUCKETS = dataclasses.replace(SCHEMES["bucketed-25"], name="bucketed-0.01", bucket_mb=0.01)


@dataclass(frozen=True)
class Planted:
    """One wrong."""

    scheme: Scheme
    built: Callable[[Replica, Process], object] = lambda replica, process: None
    """What it does to what a rank has built, or another replica in its place."""
    optimizer: Callable[[torch.optim.Optimizer], object] = lambda made: None
    """What it does to the workload's optimizer under the scheme."""
    inside: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
    """What is replaced while the scheme runs."""
    source: WorkloadSource = SOURCE

    @contextlib.contextmanager
    def planted(self) -> Iterator[None]:
        """While entered, schemes are built wrong."""
        right = parallel.build

        def build(
            scheme: Scheme, process: Process, config: StepConfig, module: Any, make: MakeOptimizer, **options: Any
        ) -> Replica:
            def make_wrong(parameters: Any) -> torch.optim.Optimizer:
                made = make(parameters)
                self.optimizer(made)
                return made

            replica = right(scheme, process, config, module, make_wrong, **options)
            changed = self.built(replica, process)
            return changed if isinstance(changed, Replica) else replica

        with mock.patch.object(parallel, "build", build), self.inside():
            yield


def handed(
    change: Callable[[list[Tensor]], object],
    rank: int | None = None,
    first: int = 1,
    last: float = math.inf,
    wanted: Callable[[int], bool] = lambda step: True,
) -> Callable[..., None]:
    """The gradients that the optimizer is handed, changed in place: on one rank or all, from one step to another, where
    they are wanted by their number."""

    def apply(replica: Replica, process: Process) -> None:
        steps = itertools.count(1)

        def before(*_: Any) -> None:
            step = next(steps)
            if first <= step <= last and wanted(step) and rank in (None, process.rank):
                change([getattr(each, "_local_tensor", each) for each in local_gradients(replica)])

        replica.optimizer.register_step_pre_hook(before)

    return apply


def times(factor: float, which: slice = slice(None)) -> Callable[[list[Tensor]], None]:
    """Some of the gradients times a factor."""

    def change(gradients: list[Tensor]) -> None:
        for each in gradients[which]:
            each.mul_(factor)

    return change


def in_16_bits(gradients: list[Tensor]) -> None:
    """Rounded to bfloat16."""
    for each in gradients:
        each.copy_(each.bfloat16())


def options(**given: Any) -> Callable[[torch.optim.Optimizer], None]:
    """Other options in every group that has them."""

    def change(made: torch.optim.Optimizer) -> None:
        for group in made.param_groups:
            group.update({name: value for name, value in given.items() if name in group})

    return change


def faster(factor: float) -> Callable[[torch.optim.Optimizer], None]:
    """The learning rate times a factor."""

    def change(made: torch.optim.Optimizer) -> None:
        for group in made.param_groups:
            group["lr"] *= factor

    return change


def from_step(first: int, change: Callable[[torch.optim.Optimizer], object]) -> Callable[..., None]:
    """An optimizer changed before its n-th step."""

    def apply(replica: Replica, process: Process) -> None:
        steps = itertools.count(1)
        replica.optimizer.register_step_pre_hook(lambda made, *_: change(made) if next(steps) == first else None)

    return apply


def idle_on_second_rank(replica: Replica, process: Process) -> None:
    """Updates nothing on rank 1."""
    if process.rank == 1:
        replica.optimizer.step = lambda *_: None  # type: ignore[method-assign, assignment]


def one_update_old(replica: Replica, process: Process) -> None:
    """Forward and backward take the weights from before the last update."""
    parameters = list(replica.module.parameters())
    old: list[Tensor] = []

    def exchange() -> None:
        for parameter, other in zip(parameters, old, strict=bool(old)):
            parameter.data, other.data = other.data, parameter.data

    def before_update(*_: Any) -> None:
        exchange()
        old[:] = [parameter.detach().clone() for parameter in parameters]

    replica.module.register_forward_pre_hook(lambda *_: exchange())
    replica.optimizer.register_step_pre_hook(before_update)


def in_place_of(place: Any, name: str, other: Any) -> Callable[[], contextlib.AbstractContextManager[Any]]:
    """A function or method replaced."""
    return functools.partial(mock.patch.object, place, name, other)


Clip = Callable[[float], Tensor]


def clipping(change: Callable[[Clip, Replica, Process], Clip]) -> Callable[..., Replica]:
    """Clips otherwise."""

    def apply(replica: Replica, process: Process) -> Replica:
        whole = functools.partial(torch.nn.utils.clip_grad_norm_, list(replica.module.parameters()))
        return dataclasses.replace(replica, clip_gradients=change(replica.clip_gradients or whole, replica, process))

    return apply


def by_own_norm(clip: Clip, replica: Replica, process: Process) -> Clip:
    """By the norm of this rank's shards alone."""

    def own(max_norm: float) -> Tensor:
        gradients = local_gradients(replica)
        total = torch.nn.utils.get_total_norm(gradients)
        for each in gradients:
            each.mul_(min(1.0, max_norm / (float(total) + 1e-6)))
        return total

    return own


def without_clipping(rank: int | None = None) -> Callable[[Clip, Replica, Process], Clip]:
    """Returns the norm and clips nothing, on one rank or all."""

    def change(clip: Clip, replica: Replica, process: Process) -> Clip:
        return (lambda max_norm: clip(math.inf)) if rank in (None, process.rank) else clip

    return change


def clipped_before(replica: Replica, process: Process) -> Replica:
    """Clips this rank's gradients, before they are averaged."""
    finish, parameters = replica.finish_gradient_synchronization, list(replica.module.parameters())
    assert finish is not None, "of a scheme that waits"
    norms: list[Tensor] = []

    def clip_first() -> None:
        norms[:] = [torch.nn.utils.get_total_norm([each.grad for each in parameters if each.grad is not None])]
        finish()

    def clip(max_norm: float) -> Tensor:
        for each in parameters:
            if each.grad is not None:
                each.grad.mul_(min(1.0, max_norm / (float(norms[0]) + 1e-6)))
        return norms[0]

    return dataclasses.replace(replica, finish_gradient_synchronization=clip_first, clip_gradients=clip)


def no_sync(
    leave: Callable[[list[torch.nn.Parameter]], object] = lambda parameters: None,
    rank: int | None = None,
    first: int = 1,
) -> Callable[..., Replica]:
    """Something done to parameters after each pass without synchronisation, from the n-th one on."""

    def apply(replica: Replica, process: Process) -> Replica:
        numbers = itertools.count(1)

        @contextlib.contextmanager
        def changed() -> Iterator[None]:
            with replica.no_sync():
                yield
            if next(numbers) >= first and rank in (None, process.rank):
                leave(local_weights(replica))

        return dataclasses.replace(replica, no_sync=changed)

    return apply


def forget(parameters: list[torch.nn.Parameter]) -> None:
    """What has added up."""
    for each in parameters:
        each.grad = None


def scale(factor: float, which: slice = slice(None)) -> Callable[[list[torch.nn.Parameter]], None]:
    """What has added up, times a factor."""

    def change(parameters: list[torch.nn.Parameter]) -> None:
        for each in parameters[which]:
            if each.grad is not None:
                each.grad.mul_(factor)

    return change


def statistics(change: Callable[[Any], object], rank: int | None = None) -> Callable[..., None]:
    """Something done to the batch normalisations of one rank or all after each of their forward passes."""

    def apply(replica: Replica, process: Process) -> None:
        for each in norms(replica.module):
            if rank in (None, process.rank):
                change(each)

    return apply


def still(norm: Any) -> None:
    """Its running statistics never move."""
    norm.momentum = 0.0


def still_later(norm: Any) -> None:
    """They stand still from the second pass on."""
    norm.register_forward_hook(lambda *_: still(norm))


class _Done:
    def wait(self) -> None:
        """Nothing is under way."""


def without_buckets(
    wanted: Callable[[int], bool], use: int = 1
) -> Callable[[], contextlib.AbstractContextManager[Any]]:
    """Buckets that are not averaged, by the number of their first parameter, from their n-th use."""
    start = sent.GradientBucket.start

    def skip(self: Any, gradients: list[Tensor]) -> None:
        self.uses = getattr(self, "uses", 0) + 1
        if wanted(self.numbers[0]) and self.uses >= use:
            self._means = gradients
            self._work = _Done()
        else:
            start(self, gradients)

    return in_place_of(sent.GradientBucket, "start", skip)


def slices_one_off() -> contextlib.AbstractContextManager[Any]:
    """Slices of gradients that begin one element late, or early on the last rank."""
    wait = sent.GradientBucket.wait

    def one_off(self: Any) -> list[Tensor]:
        means, group = wait(self), self._group
        by = 1 if group.rank() + 1 < group.size() else -1
        return [each.as_strided(each.size(), each.stride(), each.storage_offset() + by) for each in means]

    return in_place_of(sent.GradientBucket, "wait", one_off)()


def _gather_one_off(tensors: Sequence[Tensor], group: dist.ProcessGroup, slices: list[Tensor]) -> Any:
    """Every slice comes back one element late."""
    for tensor in tensors:
        own = slice_of(tensor, group.rank(), group.size()).clone()
        whole = [torch.empty_like(own) for _ in range(group.size())]
        dist.all_gather(whole, own, group=group)
        flat(tensor).copy_(torch.cat(whole).roll(1))
    return _Done()


def _all_reduce_first_alone(tensors: Sequence[Tensor], group: dist.ProcessGroup) -> dist.Work:
    """The mean without rank 1's gradients."""
    if group.rank() == 1:
        for tensor in tensors:
            tensor.zero_()
    return all_reduce_sum(tensors, group)


def _twice(tensors: Sequence[Tensor], group: dist.ProcessGroup) -> dist.Work:
    """A mean, and then a sum of the means."""
    all_reduce_sum(tensors, group).wait()
    for tensor in tensors:
        tensor.div_(group.size())
    return all_reduce_sum(tensors, group)


_FLAT, _DDP, _FSDP, _ZERO = SCHEMES["flat"], SCHEMES["torch-ddp"], SCHEMES["fsdp"], SCHEMES["sharded-optimizer"]
_FSDP2, _TORCH_ZERO, _NAIVE = SCHEMES["torch-fsdp2"], SCHEMES["torch-zero"], SCHEMES["naive"]
WRONG: dict[str, Planted] = table(globals(), "WRONG")
"""What it is → the scheme, and what is wrong with it."""


Right = tuple[WorkloadSource, StepConfig, Scheme, Callable[[], contextlib.AbstractContextManager[Any]]]


def _right(name: str, scheme: Scheme) -> Right:
    source, config, change = RIGHT_STEPS[name]
    return source, dataclasses.replace(config, **change), scheme, contextlib.nullcontext


def _own(
    scheme: Scheme, inside: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext, **change: Any
) -> Right:
    return SOURCE, dataclasses.replace(CONFIG, **change), scheme, inside


def _mean_twice(tensors: Sequence[Tensor], group: dist.ProcessGroup) -> dist.Work:
    """A mean, and the mean of the means, which is the same."""
    for _ in range(2):
        work = all_reduce_sum(tensors, group)
        work.wait()
        for tensor in tensors:
            tensor.div_(group.size())
    return work


BF16 = {"precision": "bf16"}
RIGHT: dict[str, Right] = table(globals(), "RIGHT")
"""What it is → workload, configuration, scheme, and what is replaced while it runs."""


@contextlib.contextmanager
def quick() -> Iterator[None]:
    """Garbage is not collected between cases, and text is read once, which is half of the time of small ones."""
    with (
        mock.patch.object(outcome, "release_memory"),
        mock.patch.object(dropout, "release_memory"),
        mock.patch.object(text, "_read_text", _read_once),
    ):
        yield


_read_once = functools.cache(text._read_text)


def judge_wrong(
    process: Process, precision: str, names: Sequence[str], more_draws: int = reference.MORE_DRAWS
) -> dict[str, Verdict | None]:
    """How far wrong schemes are off, on rank 0; all beside one computation in one process, kept for the next call. All
    ranks call it.

    `more_draws` of random roundings are made where something is over its budget; few make a test quick.
    """
    config = dataclasses.replace(CONFIG, precision=precision)  # type: ignore[arg-type]
    found = {}
    for name in names:
        source = WRONG[name].source
        wanted = _wanted(source, config, process.world_size, more_draws) if process.rank == 0 else None
        with quick(), mock.patch.object(reference, "MORE_DRAWS", more_draws), WRONG[name].planted():
            found[name] = agreement(ParallelCase(source, config, WRONG[name].scheme), wanted, process)
    return found


@functools.cache
def _wanted(source: WorkloadSource, config: StepConfig, world_size: int, more_draws: int) -> Expected:
    """What one process computes, with what its roundings were found to do, which takes `more_draws` once."""
    return expected(source, ParallelCase(source, config, _FLAT).whole(world_size), world_size)


def judge_right(process: Process, names: Sequence[str]) -> dict[str, Verdict | Failure | None]:
    """How far right schemes are off, on rank 0. All ranks call it."""
    found = {}
    for name in names:
        source, config, scheme, inside = RIGHT[name]
        with quick(), inside():
            found[name] = by_scheme(compare_with_one_process([ParallelCase(source, config, scheme)], process))[scheme]
    return found


def largest_share(found: Verdict) -> float:
    """What uses most of what it is allowed, as a share of it."""
    shares = [part.share for part in found.parts.values()]
    shares += [
        each.worst / each.worst_allowed if each.worst_allowed else math.inf
        for each in (found.gradients, found.float32)
        if each is not None and each.worst
    ]
    return max(shares)
