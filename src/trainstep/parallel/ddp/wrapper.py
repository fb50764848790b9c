"""The wrapper, and when what is sent; the schedule is in `trainstep.parallel.ddp`."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainstep.base.errors import UsageError
from trainstep.parallel.collectives import assign_buckets, broadcast_from_first, weak_hook
from trainstep.parallel.ddp.averages import averages_by_copies, carrier_of, default_bucket_mb
from trainstep.parallel.ddp.bucket import GradientBucket
from trainstep.parallel.ddp.scattered import ScatteredGradient
from trainstep.parallel.partial import Known, before_optimizer_steps
from trainstep.parallel.process import check_ranks_agree, resolve_group
from trainstep.parallel.side_stream import SideStream
from trainstep.parallel.slices import check_dense, is_lazy, laid_out_as, resolved
from trainstep.parallel.transport.by_collectives import TransportName
from trainstep.parallel.transport.by_copies import PeerCopies, Transport, check_name


def contents_of(module: nn.Module) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Parameters and modules that it has itself."""
    return tuple(map(id, module._parameters.values())), tuple(map(id, module._modules.values()))


def check_arguments(module: nn.Module, bucket_mb: float | None, wrapper: type[nn.Module]) -> None:
    """Raise `UsageError` for a module that has `wrapper` already, or that has nothing to average, or an option that is
    out of range."""
    if any(isinstance(part, wrapper) for part in module.modules()):
        raise UsageError("the module is, or contains, a DistributedDataParallel already; wrap the plain module once")
    if bucket_mb is not None and not bucket_mb >= 0:
        raise UsageError(f"bucket_mb is {bucket_mb}; expected 0 (one call per parameter) up to inf (one call)")
    if not any(parameter.requires_grad for parameter in module.parameters()):
        raise UsageError("the module has no parameter that requires a gradient; there is nothing to average")
    tensors = [*module.named_parameters(), *module.named_buffers()]
    if on_meta := [name for name, tensor in tensors if tensor.is_meta]:
        raise UsageError(f"{on_meta[0]} is on the meta device; move the module to a real device before wrapping it")


class DistributedDataParallel(nn.Module):
    """Averages the gradients of any module over the ranks of a group.

    Call it like the module; before `optimizer.step()`, and before clipping or unscaling gradients, call
    `finish_gradient_synchronization()`. It then holds that every `param.grad` is the mean of all ranks' gradients: with
    equal batches and a loss that is a mean over its batch, the gradient of one process on the whole batch. Parameters
    that need no gradient are left alone; a tied parameter is one parameter. Buffers are not synchronised after the
    start.

    Args:
        module: any module on one device; it is not changed.
        bucket_mb: megabytes (10^6 bytes) of gradients per call. 0 makes one call per parameter, infinity a single one.
            By default 25, or by copies a sixteenth of all if that is more.
        overlap: start a bucket during backward, as soon as it is full; otherwise all of them after backward.
        process_group: the ranks; by default all.
        transport: what carries gradients, see `TransportName`. Copies are staged in memory of their own: as much as a
            bucket and its largest gradient, 512 MiB at most, and once more divided by the ranks.
        allow_unused: parameters without a gradient on some rank count as zero there, and those without one on every
            rank keep none. Costs one more small collective and a wait of the host in each step.

    Raises:
        UsageError: torch.distributed is not initialised, the ranks have different parameters or settings, the module
            has no parameter to train or is wrapped already, or an option is out of range.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        bucket_mb: float | None = None,
        overlap: bool = True,
        process_group: dist.ProcessGroup | None = None,
        transport: TransportName = "auto",
        allow_unused: bool = False,
    ) -> None:
        super().__init__()
        self.process_group = group = resolve_group(process_group)
        check_arguments(module, bucket_mb, DistributedDataParallel)
        check_name(transport)
        tensors = [*module.named_parameters(), *module.named_buffers()]
        settings: dict[str, object] = {"bucket_mb": bucket_mb, "overlap": overlap}
        settings |= {"allow_unused": allow_unused, "transport": transport}
        check_ranks_agree(type(self).__name__, tensors, group, settings=settings)
        broadcast_from_first([tensor for _, tensor in tensors], group)
        self.bucket_mb, self.overlap, self.allow_unused = bucket_mb, overlap, allow_unused
        self.asked_transport: TransportName = transport
        trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        sizes = [parameter.nbytes for parameter in trained]
        self._carrier: Transport = carrier_of(sizes, bucket_mb, transport, group, trained[0].device)
        self._beside = SideStream(next(module.parameters()).device)  # for copies
        self._attach(module)

    def _attach(self, module: nn.Module) -> None:
        self.module = module
        named = [(name, parameter) for name, parameter in module.named_parameters() if parameter.requires_grad]
        self._names, self._trained = [name for name, _ in named], [parameter for _, parameter in named]
        self._slices: dict[int, nn.Parameter] = {}  # number → this rank's slice, where gradients are scattered
        self._scattered_for: WeakKeyDictionary[object, dict[int, nn.Parameter]] = WeakKeyDictionary()  # by optimizer
        self._stand_ins: dict[int, ScatteredGradient] = {}  # for the same ones, what their `grad` is then
        self._have_slices = False  # whether gradients were scattered since the last forward
        self._may_be_old: Callable[[nn.Parameter], bool] | None = None
        self._synchronizing = True
        self._order: list[int] | None = None  # as gradients came in the first step
        self._make_buckets(list(reversed(range(len(named)))))
        for number, parameter in enumerate(self._trained):
            parameter.register_post_accumulate_grad_hook(
                weak_hook(self, DistributedDataParallel._gradient_came, number)
            )
        self._contents = [(inner, *contents_of(inner)) for inner in module.modules()]
        self._flags = [(parameter, parameter.requires_grad) for parameter in module.parameters()]
        self._known = Known(dict(named))
        before_optimizer_steps(self, DistributedDataParallel._before_step)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own forward."""
        if self._buckets[0].is_started and torch.is_grad_enabled():
            raise UsageError(
                "forward() while gradients of the last backward are still being averaged; call "
                "finish_gradient_synchronization() after backward, or use no_sync() for all but the last backward of a "
                "step"
            )
        if self._have_slices:
            self._have_slices = False
            self.drop_stale_slices()
        return self.module(*args, **kwargs)

    def drop_stale_slices(self) -> None:
        """Forget this rank's slices of gradients that were set to None."""
        for number, own in self._slices.items():
            if self._trained[number].grad is None:
                own.grad = self._stand_ins[number].local = None

    def finish_gradient_synchronization(self) -> None:
        """Wait until every gradient is the mean over the ranks; starts the buckets that backward did not.

        On a GPU the current stream waits, not the host. Every rank must call it once per step.

        Raises:
            UsageError: parameters got no gradient (their names are given), or were added, removed, frozen or replaced
                since the module was wrapped; or gradients were changed while they were averaged.
        """
        try:
            self._check_unchanged()
            absent = [number for number in range(len(self._trained)) if number not in self._since.came]
            if absent and not self.allow_unused:
                raise UsageError(self._unused_message(absent))
            filled = [number for number in absent if self._trained[number].grad is None]
            for number in filled:
                self._trained[number].grad = torch.zeros_like(self._trained[number])
            while self._since.next < len(self._buckets):
                self._start_next()
            for bucket in self._buckets:
                if bucket.versions != self._versions(bucket):
                    raise UsageError(
                        f"the gradient of {self._names[bucket.numbers[0]]}, or of one that is averaged with it, was "
                        "changed between backward and finish_gradient_synchronization(), while it was being averaged; "
                        "change gradients afterwards"
                    )
                means = bucket.wait()
                if bucket.scattered:
                    self._have_slices = True
                    for number, mean in zip(bucket.numbers, means, strict=True):
                        self._keep_slice(number, mean)
            if self.allow_unused:
                self._drop_where_unused_everywhere(filled)
            self._rebuild_buckets()
        finally:
            self._reset()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside keep gradients to this rank; the next one outside averages what has added up."""
        before, self._synchronizing = self._synchronizing, False
        try:
            yield
        finally:
            self._synchronizing = before

    def scatter_gradients(self, optimizer: object, slices: Mapping[nn.Parameter, nn.Parameter]) -> None:
        """From now on give each rank only its slice of these parameters' mean gradients, at half the bytes.

        Several optimizers may have some, each of its own parameters; those of one that is gone are forgotten when the
        next one calls this.

        After `finish_gradient_synchronization()`, `slice.grad` is this rank's slice (see `collectives.slice_of`), to
        which later ones are added, and `param.grad` a `ScatteredGradient`: the rest of it would be no gradient of
        anything. For a `ShardedOptimizer`; `slices` has the parameter that stands for this rank's slice of each, the
        same ones on every rank.
        """
        assert not self._since.came, "called between backward and finish_gradient_synchronization()"
        self._check_unchanged()
        numbers = {id(parameter): number for number, parameter in enumerate(self._trained)}
        self._scattered_for[optimizer] = {numbers[id(parameter)]: own for parameter, own in slices.items()}
        self._slices = {number: own for each in self._scattered_for.values() for number, own in each.items()}
        self._stand_ins = {
            number: ScatteredGradient.of(self._trained[number], self._names[number], own)
            for number, own in self._slices.items()
        }
        self._make_buckets(self._order or list(reversed(range(len(self._trained)))))

    @property
    def transport(self) -> TransportName:
        """Transport of gradients: the one that was asked for, or that auto has chosen."""
        return self._carrier.name

    @property
    def uncounted_bytes(self) -> int:
        """Bytes of the transport's buffers on this rank beyond `torch.cuda.memory_allocated`."""
        return self._carrier.uncounted_bytes

    def check_arrived(self, may_be_old: Callable[[nn.Parameter], bool]) -> None:
        """From now on a gradient of a parameter that `may_be_old` is an error: forward used it before it was there."""
        self._may_be_old = may_be_old

    def check_finished(self, before: str) -> None:
        """Raise `UsageError` where gradients have come and not been averaged."""
        if self._since.unfinished:
            raise UsageError(
                f"{before} before gradients were averaged over the ranks; call finish_gradient_synchronization() of "
                "DistributedDataParallel first, after the last backward"
            )

    def __deepcopy__(self, memo: dict[int, Any]) -> DistributedDataParallel:
        """A wrapper of its own around a copy of the module, in the same group. No communication."""
        twin = type(self).__new__(type(self))
        nn.Module.__init__(twin)
        memo[id(self)] = twin
        settings = ("process_group", "bucket_mb", "overlap", "allow_unused", "asked_transport")
        for name in (*settings, "_carrier", "_beside"):  # copies of both take turns on one stream
            setattr(twin, name, getattr(self, name))
        twin._attach(copy.deepcopy(self.module, memo))
        return twin.train(self.training)

    def _make_buckets(self, order: list[int]) -> None:
        items = []
        for number, parameter in ((number, self._trained[number]) for number in order):
            items.append((number, parameter.nbytes, (parameter.dtype, parameter.device, number in self._slices)))
        by_default = default_bucket_mb(sum(size for _, size, _ in items), isinstance(self._carrier, PeerCopies))
        bucket_mb = by_default if self.bucket_mb is None else self.bucket_mb
        self._buckets = [self._bucket(tuple(numbers)) for numbers in assign_buckets(items, bucket_mb)]
        self._bucket_of = {number: bucket for bucket in self._buckets for number in bucket.numbers}
        self._reset()

    def _bucket(self, numbers: tuple[int, ...]) -> GradientBucket:
        scattered, copies = numbers[0] in self._slices, None
        parameters = [self._trained[number] for number in numbers]
        is_there = parameters[0].device == self._trained[0].device  # where the carrier is
        if isinstance(self._carrier, PeerCopies) and is_there:
            sizes = [parameter.numel() * (2 if parameter.is_complex() else 1) for parameter in parameters]
            copies = averages_by_copies(self._carrier, sizes, self._beside, scattered=scattered)
        return GradientBucket(numbers, scattered, self.process_group, copies)

    def _reset(self) -> None:
        self._since = _Since()
        for bucket in self._buckets:
            bucket.reset()

    def _gradient_came(self, number: int) -> None:
        since = self._since
        since.came[number] = None
        if self._may_be_old is not None and self._may_be_old(self._trained[number]):
            raise UsageError(
                f"{self._names[number]} was used in forward before it had arrived (overlap_gather=True): its block was "
                "not called; call it, or leave out overlap_gather"
            )
        if not self._synchronizing:
            return
        since.unfinished = True
        bucket = self._bucket_of[number]
        bucket.waiting.discard(number)
        if not self.overlap:
            return
        if bucket.is_started:
            raise UsageError(
                f"the gradient of {self._names[number]} was added to after it had been sent: there were two backward "
                "passes in one step, or re-entrant checkpointing around a tied parameter. Use no_sync() for all "
                "backward passes but the last, checkpointing with use_reentrant=False, or overlap=False"
            )
        while since.next < len(self._buckets) and not self._buckets[since.next].waiting:
            self._start_next()

    def _start_next(self) -> None:
        bucket = self._buckets[self._since.next]
        gradients = [self._gradient(number) for number in bucket.numbers]
        bucket.versions = self._versions(bucket)
        bucket.start(gradients)
        self._since.next += 1

    def _gradient(self, number: int) -> Tensor:
        gradient = self._trained[number].grad
        if gradient is None:
            when = "between backward and finish_gradient_synchronization()"
            raise UsageError(f"the gradient of {self._names[number]} is gone: it was set to None {when}")
        if type(gradient) is ScatteredGradient:
            self._since.added.add(number)
            return gradient.take_local()
        check_dense(gradient, self._names[number])
        if is_lazy(gradient):  # its memory is sent, and casts and copies between GPUs know no other value
            gradient = self._trained[number].grad = resolved(gradient)
        if number in self._slices:
            gradient = laid_out_as(self._trained[number], gradient)
        return gradient.data  # what the collective writes is no change of the gradient by its user

    def _versions(self, bucket: GradientBucket) -> list[int]:
        """Counts of changes by whoever has the gradients."""
        gradients = [self._trained[number].grad for number in bucket.numbers]
        return [-1 if gradient is None else gradient._version for gradient in gradients]

    def _keep_slice(self, number: int, mean: Tensor) -> None:
        own = self._slices[number]
        if number in self._since.added and own.grad is not None:
            own.grad.add_(mean)
        else:
            own.grad = mean
        self._stand_ins[number].local = None  # what was discarded with a gradient that was set to None
        self._trained[number].grad = self._stand_ins[number]

    def _before_step(self, optimizer: torch.optim.Optimizer) -> None:
        if self._since.unfinished and self._known.first_in(optimizer) is not None:
            self.check_finished(f"{type(optimizer).__name__}.step()")

    def _drop_where_unused_everywhere(self, filled: list[int]) -> None:
        """Drop the gradients that were filled in with zeros on every rank."""
        used = torch.ones(len(self._trained), dtype=torch.uint8)
        used[filled] = 0
        used = used.to(self._trained[0].device)
        dist.all_reduce(used, op=dist.ReduceOp.MAX, group=self.process_group)
        for number in (used == 0).nonzero().flatten().tolist():
            self._trained[number].grad = None
            if number in self._slices:
                self._slices[number].grad = None

    def _rebuild_buckets(self) -> None:
        """After the first step: fill buckets in the order in which rank 0's gradients came."""
        if not self.overlap or self._order is not None:
            return
        order: list[Any] = [list(dict.fromkeys([*self._since.came, *range(len(self._trained))]))]
        dist.broadcast_object_list(order, group=self.process_group, group_src=0)
        self._order = order[0]
        self._make_buckets(order[0])

    def _check_unchanged(self) -> None:
        same = all(contents_of(inner) == (parameters, inside) for inner, parameters, inside in self._contents)
        if same and all(parameter.requires_grad == flag for parameter, flag in self._flags):
            return  # without going through the whole tree by name in every step
        now = {id(parameter): name for name, parameter in self.module.named_parameters() if parameter.requires_grad}
        then = {id(parameter): name for name, parameter in zip(self._names, self._trained, strict=True)}
        if list(now) == list(then):
            return
        new, gone = ([a[each] for each in a if each not in b] for a, b in ((now, then), (then, now)))
        parts = ((new, "added, replaced or unfrozen"), (gone, "removed, replaced or frozen"))
        changes = "; ".join(f"{', '.join(names)} {what}" for names, what in parts if names) or "their order"
        what = f"the module's parameters changed since it was wrapped ({changes})"
        raise UsageError(f"{what}; wrap it again after such a change")

    def _unused_message(self, absent: list[int]) -> str:
        if len(absent) == len(self._trained):
            return "no gradient came since the last step; call backward() before finish_gradient_synchronization()"
        shown = ", ".join(self._names[number] for number in absent[:8]) + (", …" if len(absent) > 8 else "")
        return (
            f"{len(absent)} parameter{'s' if len(absent) > 1 else ''} got no gradient on rank "
            f"{self.process_group.rank()}: {shown}. Let the loss depend on them, freeze them (requires_grad=False) "
            "before wrapping, or pass allow_unused=True (--allow-unused)"
        )


@dataclass(eq=False)
class _Since:
    """Since gradients were last complete. Apart from the wrapper, as setting an attribute of a module takes longer."""

    came: dict[int, None] = field(default_factory=dict)  # in order; also those that came inside no_sync
    unfinished: bool = False  # whether any came outside
    added: set[int] = field(default_factory=set)  # scattered gradients that are added to slices that are there
    next: int = 0  # the bucket to start
