"""The optimizer whose state and work are divided among the ranks; the schedule is in `trainstep.parallel.zero`."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainstep.base.errors import UsageError
from trainstep.parallel.collectives import MB, assign_buckets, clip_gradients_
from trainstep.parallel.ddp.scattered import NO_SCALING, ScatteredGradient
from trainstep.parallel.ddp.wrapper import DistributedDataParallel
from trainstep.parallel.gloo import Waitable
from trainstep.parallel.partial import is_elementwise
from trainstep.parallel.process import check_ranks_agree, resolve_group
from trainstep.parallel.side_stream import SideStream
from trainstep.parallel.transport.by_copies import choose_transport
from trainstep.parallel.zero.arrivals import Arrivals
from trainstep.parallel.zero.pieces import (
    GathersBeside,
    ParameterBucket,
    Piece,
    consolidate,
    cut,
    dump,
    hyper_parameters,
    restore,
)

EXCHANGE_MB, OVERLAPPED_MB = 256.0, 1000.0
"""Megabytes of parameters that are gathered at a time, at most: behind the update of the next ones, and beside the next
forward. There each call and each update costs the host, and hides nothing that fewer would not."""
OVERLAPPED_RUNS = 8
"""Beside the next forward, at least so many; what forward needs first must not wait for all of it."""


class ShardedOptimizer(torch.optim.Optimizer):
    """Any torch optimizer, its state and work divided among the ranks of a group.

    Used like the optimizer itself: parameter groups with their own hyper-parameters, learning-rate schedulers,
    `add_param_group`, closures. All ranks must step together. Gradients must have been averaged (by a
    `DistributedDataParallel`) before `step`.

    Args:
        params: parameters, or groups of them, as for any torch optimizer; the same on every rank.
        optimizer_cls: the optimizer's class. Elementwise ones (SGD, Adam, AdamW, … of torch.optim, and yours if it says
            `is_elementwise = True`) update slices; any other is given whole parameters. LBFGS is refused: it couples
            all parameters.
        process_group: the ranks; by default all, or those of `ddp`.
        ddp: the wrapper that makes the gradients. It then reduce-scatters them: after
            `finish_gradient_synchronization()` a sliced parameter's `grad` only says so, and raises if it is used;
            clipping is done by `clip_grad_norm_` of this optimizer.
        exchange_mb: megabytes (10^6 bytes) of parameters that are updated and gathered at a time; by default 256, and
            with `overlap_gather` an eighth of all, from 256 to 1,000.
        overlap_gather: let `step` return while parameters are still being gathered, beside the next forward. The module
            of `ddp`, and each of its blocks, waits for its own when it is called, `state_dict()` and
            `load_state_dict()` for all. Whatever else reads or writes parameters between `step` and the next forward
            (an average of weights, a norm of theirs) has to call `wait_for_parameters()` first: it would read what they
            were before. A forward must use a block's parameters by calling the block. The module can then not be
            pickled.
        **kwargs: passed to `optimizer_cls`.

    Raises:
        UsageError: torch.distributed is not initialised, the ranks have different parameters, the optimizer cannot be
            divided as asked, or `overlap_gather` is asked for without `ddp`, or of a module that is sharded.
    """

    def __init__(
        self,
        params: Iterable[Any],
        optimizer_cls: type[torch.optim.Optimizer],
        *,
        process_group: dist.ProcessGroup | None = None,
        ddp: DistributedDataParallel | None = None,
        exchange_mb: float | None = None,
        overlap_gather: bool = False,
        **kwargs: Any,
    ) -> None:
        self.process_group = _group_of(process_group, ddp)
        _check_class(optimizer_cls)
        groups = _as_groups(params)
        if exchange_mb is None:
            nbytes = sum(each.nbytes for group in groups for each in group["params"])
            exchange_mb = self.default_exchange_mb(nbytes, overlap_gather=overlap_gather)
        if not exchange_mb >= 0:
            raise UsageError(f"exchange_mb is {exchange_mb}; expected 0 (one parameter at a time) up to inf")
        self._optimizer_cls, self._options, self._exchange_mb, self._ddp = optimizer_cls, kwargs, exchange_mb, ddp
        self._loads = [0] * self.process_group.size()
        self._buckets: list[ParameterBucket] = []
        self._arrivals: Arrivals | None = None
        self._beside: GathersBeside | None = None
        if overlap_gather:
            if ddp is None:
                raise UsageError("overlap_gather=True needs ddp=, whose module waits for its parameters; give it")
            self._arrivals = Arrivals(ddp.module)
        try:  # its own checks, without its memory
            probe = optimizer_cls([_on_meta(group) for group in groups], **kwargs)
        except AttributeError as error:
            raise UsageError(
                f"{optimizer_cls.__name__} could not be made from parameter groups, of which ShardedOptimizer gives it "
                f"a list ({error}); give it a class that takes them, as torch's own do"
            ) from error
        self._divided = 0  # parameter groups that are divided already; none until the ranks are known to agree
        super().__init__(groups, probe.defaults)
        self._divide_new_groups()
        if ddp is not None and self._arrivals is not None:
            self._arrivals.install()
            ddp.check_arrived(self._arrivals.may_be_old)

    @staticmethod
    def default_exchange_mb(nbytes: int, *, overlap_gather: bool) -> float:
        """Megabytes that are updated and gathered at a time, of parameters of so many bytes."""
        return min(OVERLAPPED_MB, max(EXCHANGE_MB, nbytes / MB / OVERLAPPED_RUNS)) if overlap_gather else EXCHANGE_MB

    @property
    def state(self) -> defaultdict[Tensor, Any]:
        """Parameter → this rank's state of its part of it."""
        state: defaultdict[Tensor, Any] = defaultdict(dict)
        for piece, values in (each for bucket in self._buckets for each in bucket.states()):
            if values is not None:
                state[piece.parameter] = values
        return state

    @state.setter
    def state(self, _: Any) -> None:
        """Torch's constructor sets an empty one; ours is in the optimizers of the buckets."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters, the same on every rank."""
        super().add_param_group(param_group)
        if self._divided:
            self._divide_new_groups()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters on all ranks.

        Args:
            closure: evaluated once, before anything is updated; it must leave averaged gradients. Its result is
                returned.

        Raises:
            UsageError: a parameter was moved or unfrozen since it was added, or gradients have not been averaged yet.
        """
        self.wait_for_parameters()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if hasattr(self, "found_inf"):
            raise UsageError(NO_SCALING)
        self._check()
        underway: list[Waitable] = []
        beside = [pair for bucket in self._buckets for pair in bucket.groups_beside(self.param_groups)]
        for own, asked in beside:
            own.update(hyper_parameters(asked))
        for bucket in self._buckets:
            bucket.update(self.process_group)
            calls = bucket.exchange(self.process_group, self._beside)
            if self._arrivals is not None:
                self._arrivals.start([piece.parameter for piece in bucket.pieces], calls)
            else:
                underway += calls
        for own, asked in beside:
            asked.update(hyper_parameters(own))  # some optimizers count there
        for call in underway:
            call.wait()
        return loss

    def wait_for_parameters(self) -> None:
        """Let the current stream (on a CPU: the caller) wait until all have arrived; see `overlap_gather`."""
        if self._arrivals is not None:
            self._arrivals.wait()

    @property
    def uncounted_bytes(self) -> int:
        """Bytes that its buffers take on this rank beyond `torch.cuda.memory_allocated`."""
        return 0 if self._beside is None else self._beside.transport.uncounted_bytes

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset all gradients, also those that were reduce-scattered."""
        super().zero_grad(set_to_none)
        for parameter, mine in self._slices():
            if parameter.grad is None:
                mine.grad = None

    def local_gradients(self) -> list[Tensor]:
        """The gradients that this rank updates its part with: slices, and of undivided parameters its own ones."""
        if self._ddp is not None:
            self._ddp.drop_stale_slices()
        parts = [piece.mine for piece in self.pieces() if piece.mine is not None]
        return [part.grad for part in parts if part.grad is not None]

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale all gradients so that their norm, over all parameters and ranks, is at most `max_norm`.

        As `torch.nn.utils.clip_grad_norm_`, and also where gradients were reduce-scattered. Returns the norm before.
        """
        if self._ddp is None:
            parameters = [parameter for group in self.param_groups for parameter in group["params"]]
            return torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type)
        self._ddp.check_finished("clip_grad_norm_()")
        device = self.param_groups[0]["params"][0].device
        settings: dict[str, Any] = {"group": self.process_group, "device": device, "norm_type": norm_type}
        return clip_gradients_(self.local_gradients(), [], max_norm=max_norm, **settings)

    def state_dict(self) -> dict[str, Any]:
        """This rank's part, for torch.distributed.checkpoint: pass the optimizer itself to its `save` and `load`.

        Slices are one-dimensional DTensors, so that they can be loaded at any world size. What has no state yet is
        filled in with what `load` can write into, and marked.

        Raises:
            UsageError: torch's get_state_dict asks for it, which takes it for that of an undivided optimizer.
        """
        if sys._getframe(1).f_globals.get("__name__") == "torch.distributed.checkpoint.state_dict":
            raise UsageError(
                "torch's get_state_dict and set_state_dict do not know ShardedOptimizer; pass the optimizer itself to "
                "torch.distributed.checkpoint's save and load, or use full_state_dict()"
            )
        return dump(self._buckets, self.param_groups, self.process_group, self._twin)

    def full_state_dict(self) -> dict[str, Any]:
        """The state dict that the undivided optimizer would have, on CPU, on rank 0 of the group; empty on others.

        All ranks must call it.
        """
        return consolidate(self._buckets, self.param_groups, self.process_group)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the state over from `state_dict()`, or from a full one: ours, or that of the undivided optimizer.

        Every rank is given the same full one, whatever the world size it comes from.

        Raises:
            UsageError: its parameter groups are not those of this optimizer.
        """
        restore(self._buckets, self.param_groups, state_dict)

    def _divide_new_groups(self) -> None:
        first = self._divided
        members = [(index, each) for index, group in enumerate(self.param_groups) for each in group["params"]]
        numbered = [(number, index, each) for number, (index, each) in enumerate(members) if index >= first]
        named = [(f"number {number} of group {group}", parameter) for number, group, parameter in numbered]
        settings: dict[str, object] = {
            f"{key} of group {index}": value
            for index, group in enumerate(self.param_groups[first:], first)
            for key, value in hyper_parameters(group).items()
            if isinstance(value, (int, float, str, tuple))
        }
        settings["overlap_gather"] = self._arrivals is not None
        what = f"{type(self).__name__} of {self._optimizer_cls.__name__}"
        check_ranks_agree(what, named, self.process_group, settings=settings)
        self._divided = len(self.param_groups)
        trained = [item for item in numbered if item[2].requires_grad]
        sliced = is_elementwise(self._optimizer_cls)
        pieces = cut(trained, rank=self.process_group.rank(), loads=self._loads, sliced=sliced)
        if (arrivals := self._arrivals) is not None:
            pieces.sort(key=lambda piece: arrivals.first_use(piece.parameter))
        whats = [(piece.parameter, piece.owner is None) for piece in pieces]
        items = [(i, each.nbytes, (each.dtype, each.device, sliced)) for i, (each, sliced) in enumerate(whats)]
        buckets = assign_buckets(items, self._exchange_mb)
        if self._arrivals is not None:  # gathered as they are needed, not as they are full
            buckets.sort()
        for indices in buckets:
            self._buckets.append(self._bucket([pieces[i] for i in indices]))
        if self._arrivals is not None and self._beside is None and any(bucket.slices() for bucket in self._buckets):
            self._beside = self._gathers_beside()
        if self._ddp is not None:
            known = {id(parameter) for parameter in self._ddp.parameters()}
            if foreign := [piece.number for piece in self.pieces() if id(piece.parameter) not in known]:
                raise UsageError(f"parameter number {foreign[0]} is not one of ddp; leave out ddp=, or the parameter")
            self._ddp.scatter_gradients(self, dict(self._slices()))
            self._step_supports_amp_scaling = True  # so that a GradScaler tells `step` of itself, which refuses

    def _gathers_beside(self) -> GathersBeside:
        assert self._ddp is not None, "asked for with `overlap_gather`"
        most = max(bucket.slice_bytes for bucket in self._buckets)
        device = next(parameter.device for bucket in self._buckets for parameter, _ in bucket.slices())
        asked, group = self._ddp.asked_transport, self.process_group
        carrier = choose_transport(asked, group, device, slice_bytes=most, exchange_bytes=0, everyone=group)
        return GathersBeside(carrier, SideStream(device), device)

    def _bucket(self, pieces: list[Piece]) -> ParameterBucket:
        groups = sorted({piece.group for piece in pieces if piece.mine is not None})
        parts = [
            hyper_parameters(self.param_groups[group])
            | {"params": [piece.mine for piece in pieces if piece.group == group and piece.mine is not None]}
            for group in groups
        ]
        return ParameterBucket(pieces, self._optimizer_cls(parts, **self._options) if parts else None, groups)

    def _twin(self, bucket: ParameterBucket) -> ParameterBucket:
        """A bucket over copies of this rank's pieces, whose optimizer has made one step on zero gradients."""
        pieces = []
        for piece, _ in bucket.states():
            assert piece.mine is not None
            copy = nn.Parameter(torch.zeros_like(piece.mine))
            copy.grad = torch.zeros_like(copy)
            pieces.append(replace(piece, mine=copy))
        twin = self._bucket(pieces)
        assert twin.optimizer is not None, "there are pieces without state"
        twin.optimizer.step()
        return twin

    def _slices(self) -> list[tuple[nn.Parameter, nn.Parameter]]:
        return [pair for bucket in self._buckets for pair in bucket.slices()]

    def pieces(self) -> list[Piece]:
        return [piece for bucket in self._buckets for piece in bucket.pieces]

    def _check(self) -> None:
        rank, world_size = self.process_group.rank(), self.process_group.size()
        divided = set()
        for piece in self.pieces():
            divided.add(id(piece.parameter))
            if piece.owner is None and piece.mine is not None:
                if piece.mine.data_ptr() != piece.parameter.data_ptr() + rank * (piece.parameter.nbytes // world_size):
                    raise UsageError(
                        f"parameter number {piece.number} was moved or cast since this optimizer was made; make the "
                        "optimizer afterwards"
                    )
                gradient = piece.parameter.grad
                is_scattered = isinstance(gradient, ScatteredGradient) and gradient.local is None
                if self._ddp is not None and gradient is not None and not is_scattered:
                    raise UsageError("step() before gradients were averaged; call finish_gradient_synchronization()")
        for number, parameter in enumerate(parameter for group in self.param_groups for parameter in group["params"]):
            if id(parameter) not in divided and parameter.grad is not None:
                raise UsageError(
                    f"parameter number {number} was frozen when this optimizer was made, and now has a gradient; make "
                    "the optimizer after unfreezing it"
                )


def _group_of(process_group: dist.ProcessGroup | None, ddp: DistributedDataParallel | None) -> dist.ProcessGroup:
    if ddp is None:
        return resolve_group(process_group)
    if not isinstance(ddp, DistributedDataParallel):
        raise UsageError(f"ddp is a {type(ddp).__name__}; expected a trainstep.parallel.DistributedDataParallel")
    if process_group is not None and process_group is not ddp.process_group:
        raise UsageError("process_group is not the group of ddp; leave it out")
    return ddp.process_group


def _check_class(optimizer_cls: type[torch.optim.Optimizer]) -> None:
    if not (isinstance(optimizer_cls, type) and issubclass(optimizer_cls, torch.optim.Optimizer)):
        raise UsageError(f"optimizer_cls is {optimizer_cls!r}; expected a torch optimizer's class, such as AdamW")
    if issubclass(optimizer_cls, torch.optim.LBFGS):
        raise UsageError("LBFGS couples all parameters, so its work cannot be divided; use it undivided")


def _as_groups(params: Iterable[Any]) -> list[dict[str, Any]]:
    if isinstance(params, Tensor):
        raise UsageError("params is a tensor; expected parameters or groups of them")
    items = list(params)
    if not items:
        raise UsageError("params is empty; expected parameters, or groups of them")
    if not isinstance(items[0], dict):
        items = [{"params": items}]
    return [
        group | {"params": [group["params"]] if isinstance(group["params"], Tensor) else list(group["params"])}
        for group in items
    ]


def _on_meta(group: dict[str, Any]) -> dict[str, Any]:
    tensors = [item[1] if isinstance(item, tuple) else item for item in group["params"]]
    return group | {"params": [nn.Parameter(torch.empty_like(tensor, device="meta")) for tensor in tensors]}
