"""The module around a sharded one; the schedule of a step is in `trainstep.parallel.fsdp`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.modules.module import _IncompatibleKeys
from torch.utils import _pytree

from trainstep.base.errors import UsageError
from trainstep.parallel.collectives import all_gather_slices, clip_gradients_
from trainstep.parallel.fsdp.boundary import CallBoundary, Written
from trainstep.parallel.fsdp.checks import MAX_PREFETCH, Contents, StepCheck, check_arguments, device_for, is_kept
from trainstep.parallel.fsdp.extra_state import is_extra_state, set_extra_states
from trainstep.parallel.fsdp.group import GatherGroup
from trainstep.parallel.fsdp.placeholder import stand_for_all
from trainstep.parallel.fsdp.rows import moved_or_cast
from trainstep.parallel.fsdp.schedule import Schedule
from trainstep.parallel.fsdp.shards import (
    Chosen,
    Initialize,
    ShardedParameter,
    by_identity,
    plan_groups,
    shard_parameters,
)
from trainstep.parallel.partial import before_optimizer_steps
from trainstep.parallel.process import check_ranks_agree
from trainstep.parallel.ranks import ranks_of
from trainstep.parallel.transport.by_collectives import TransportName
from trainstep.parallel.transport.by_copies import choose_transport
from trainstep.parallel.units import in_backward, install


class _NotHereError(UsageError, AttributeError):
    """So that `hasattr` says no."""


class FullyShardedDataParallel(nn.Module):
    """Train `module` with its parameters, gradients and optimizer state spread over the ranks.

    Build the optimizer afterwards, from `parameters()`: handles of the shards. Every rank runs its own batch; then
    `finish_gradient_synchronization()` leaves in each one's `.grad` the mean over the ranks, and the optimizer steps.

    With a mesh of two dimensions, ("replicate", "shard"), there are several replicas of the model, each sharded over
    the ranks of its row (hybrid sharding). Gradients are then averaged within the row and, as shards, between the rows.

    Args:
        module: any module, on the CPU, on a GPU or on the meta device. Its parameters are replaced by shards.
        compute_dtype: what parameters are cast to before they are gathered, and floating-point inputs before forward;
            None: as they are. Gradients are added up over the ranks in the dtype of the shards.
        full_precision: modules of which all parameters are gathered as they are, whatever `compute_dtype` is: norms
            and routers that compute in float32. Such a module must itself cast what it is given, and what it returns.
        process_group: the ranks; None: all.
        mesh: the ranks, in place of `process_group`: of one dimension, or of two, ("replicate", "shard").
        groups: modules that are each gathered as a whole; by default the blocks, elements of ModuleLists. Those of a
            list are gathered together, which asks less of the host and takes more memory: of several blocks that are
            called in a row. What is outside of them is gathered in the largest modules that contain none.
        prefetch: how many groups ahead are gathered, 0 to 2; one more than that are in memory at a time.
        device: where to train; by default where the parameters are, or, from meta, the group's device.
        initialize: for modules on the meta device: fills the parameters and buffers of the one module it is called
            with, not those inside it. By default the module's `reset_parameters()`.
        transport: what carries parameters, and gradients in another dtype than the shards': `collectives` (NCCL,
            Gloo), or `peer-copies` between ranks of one host, which on GPUs leave all multiprocessors to computation.
            auto: peer-copies between GPUs of one host that can read each other's memory, else collectives. With
            replicas, collectives carry what goes between them.

    Attributes:
        module, device: as they were given or chosen.
        process_group: all ranks.
        transport: what carries parameters and gradients within a replica: collectives or peer-copies.
        transport_between: what carries gradients between replicas: collectives; None where there is one.
        uncounted_bytes: what the transport's buffers take on this rank beyond `torch.cuda.memory_allocated`.

    Raises:
        UsageError: torch.distributed is not initialised, the ranks disagree, the mesh has other dimensions, or an
            argument is not what it should be.
        UnsupportedError: the module has a part that keeps a list of its parameters beside them (LSTM, GRU, RNN).
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        compute_dtype: torch.dtype | None = None,
        full_precision: Iterable[nn.Module] = (),
        process_group: dist.ProcessGroup | None = None,
        mesh: DeviceMesh | None = None,
        groups: Chosen | None = None,
        prefetch: int = MAX_PREFETCH,
        device: torch.device | str | None = None,
        initialize: Initialize | None = None,
        transport: TransportName = "auto",
    ) -> None:
        super().__init__()
        kept = check_arguments(module, compute_dtype, full_precision, prefetch, transport)
        self._ranks = ranks = ranks_of(process_group, mesh)
        self.process_group = ranks.everyone
        self._compute_dtype = compute_dtype
        plan = plan_groups(module, groups)
        planned = [parameter for group in plan for parameter in group.parameters]
        named = [(name, entry.parameter) for entry in planned for name in entry.names]
        names = [[entry.names[0] for entry in group.parameters] for group in plan]
        keeping = [entry for entry in planned if is_kept(entry, kept)]
        settings: dict[str, object] = {"compute_dtype": compute_dtype, "prefetch": prefetch, "transport": transport}
        settings |= {"groups": names, "mesh": ranks.layout, "full_precision": [entry.names[0] for entry in keeping]}
        check_ranks_agree("FullyShardedDataParallel", named, self.process_group, settings=settings)
        self.device = device_for([entry.parameter for entry in planned], ranks, device)
        order = {name: position for position, (name, _) in enumerate(module.named_parameters())}
        sharded = shard_parameters(module, planned, ranks, self.device, initialize)
        for entry in keeping:
            sharded[entry].keeps_dtype = True
        self._sharded = sorted(sharded.values(), key=lambda parameter: order[parameter.name])
        module_names = {inner: name for name, inner in module.named_modules()}
        gather_groups = [
            GatherGroup(
                [sharded[entry] for entry in group.parameters],
                ranks,
                compute_dtype,
                self.device,
                " and ".join(module_names[unit] or "the model's own parameters" for unit in group.units),
            )
            for group in plan
        ]
        slices, exchanged = map(max, zip((0, 0), *(each.transfer_bytes for each in gather_groups), strict=True))
        carrier = choose_transport(
            transport, ranks.shard, self.device, slice_bytes=slices, exchange_bytes=exchanged, everyone=ranks.everyone
        )
        for each in gather_groups:
            each.connect(carrier)
        self.transport: TransportName = carrier.name
        self.transport_between: TransportName | None = None if ranks.replicate is None else "collectives"
        self.uncounted_bytes = carrier.uncounted_bytes
        self._schedule = Schedule(gather_groups, ranks, prefetch, self.device)
        stand_for_all(self._schedule, ranks.everyone)
        needed: dict[nn.Module, list[GatherGroup]] = {}
        for planned_group, group in zip(plan, gather_groups, strict=True):
            for unit in planned_group.units:
                needed.setdefault(unit, []).append(group)
        for unit, unit_groups in needed.items():
            install(unit, CallBoundary(self._schedule, unit_groups, unit, module_names[unit] or "the module"))
        self.module = module
        self._contents = Contents(module, self._sharded)
        self._step_check = StepCheck(self._sharded, ranks.shard)
        before_optimizer_steps(self, FullyShardedDataParallel._before_step)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward. Floating-point tensors among the arguments are cast to `compute_dtype`."""
        if not in_backward():
            self._contents.check()
        self._schedule.begin_pass()
        made_args, made_kwargs, written = args, kwargs, None
        if self._compute_dtype is not None:
            made_args, made_kwargs = _pytree.tree_map(self._cast, (args, kwargs))
            written = Written((*args, *kwargs.values()), (*made_args, *made_kwargs.values()))
        self._schedule.passes_running += 1
        try:
            return self.module(*made_args, **made_kwargs)
        finally:
            if written is not None:
                written.back()
            self._schedule.end_forward()

    def finish_gradient_synchronization(self) -> None:
        """After backward, before the optimizer's step: every shard's `.grad` is the mean over the ranks.

        It has the shard's dtype. A parameter that no rank used has none. On a GPU the current stream waits, not the
        host. Then hooks run that `register_post_accumulate_grad_hook` of the parameters was given.

        Raises:
            UsageError: no gradient came, gradients were thrown away behind the wrapper's back, or the ranks did not
                call the same modules in the same order.
        """
        self._schedule.finish()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget all gradients: the shards', and those that were added up under `no_sync` or left by a failed backward.

        (An optimizer's `zero_grad` knows the shards' only.)
        """
        self._schedule.discard()
        super().zero_grad(set_to_none)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward inside does not communicate gradients; they are added up until a backward outside sends them.

        That takes the memory of all gradients, unsharded, in the shards' dtype. Several backwards outside of `no_sync`
        before one `finish_gradient_synchronization()` also add up, in the shards: less memory, more communication.
        """
        before, self._schedule.synchronise, self._schedule.added_up = self._schedule.synchronise, False, True
        try:
            yield
        finally:
            self._schedule.synchronise = before

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale all gradients so that their norm over all ranks is at most `max_norm`; returns the norm before.

        Call it on every rank, after `finish_gradient_synchronization()`.
        """
        self._schedule.check_complete("clip_grad_norm_()")
        self._schedule.agreement.announce("clip")
        sharded = [p.shard.grad for p in self._sharded if p.rows is not None and p.shard.grad is not None]
        replicated = [p.shard.grad for p in self._sharded if p.rows is None and p.shard.grad is not None]
        group, replicas = self.process_group, self._ranks.replicas
        settings: dict[str, Any] = {"max_norm": max_norm, "norm_type": norm_type, "device": self.device}
        return clip_gradients_(sharded, replicated, group=group, replicas=replicas, **settings)

    @torch.no_grad()
    def gather_full_parameters(self, *, device: torch.device | str | None = None) -> dict[str, Tensor]:
        """Every parameter in full on every rank, by its name in `module`, in the dtype it is trained in.

        Args:
            device: where to put them, one after another; by default where the shards are.
        """
        self._schedule.agreement.announce("gather all")
        self._schedule.agreement.compare(wait=True)
        full: dict[str, Tensor] = {}
        for parameter in self._sharded:
            rows, shard = parameter.rows, parameter.shard
            if rows is None:
                values = shard.detach().clone()
            else:
                values = torch.empty(parameter.padded_shape, dtype=shard.dtype, device=shard.device)
                values[rows] = shard
                if self._ranks.shard.size() > 1:
                    all_gather_slices([values], self._ranks.shard).wait()
                if parameter.padded_shape != parameter.shape:
                    values = values[: parameter.shape[0]].clone()
            values = values.to(device if device is not None else values.device)
            full.update(dict.fromkeys(parameter.names, values))
        return full

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Handles of the shards, whatever is gathered, under `module.` and their names in the module.

        A handle has the whole's shape. Functions that treat each element alone run on this rank's rows, random numbers
        are drawn for the whole, and what mixes elements raises.
        """
        start = f"{prefix}.module." if prefix else "module."
        for parameter in self._sharded:
            assert parameter.handle is not None
            for name in parameter.names[:1] if remove_duplicate else parameter.names:
                yield start + name, cast(nn.Parameter, parameter.handle)

    def state_dict(  # type: ignore[override]
        self, *args: Any, destination: Any = None, prefix: str = "", **kwargs: Any
    ) -> dict[str, Any]:
        """Parameters and buffers by their names in `module`; parameters are DTensors that share the shards' memory.

        A module under torch's fully_shard loads it, and this one loads that one's. For torch.distributed.checkpoint;
        see `trainstep.parallel.save_checkpoint`. A plain model loads what it writes.

        Raises:
            UsageError: it was called by a module around the wrapper, whose names would not be those it loads.
        """
        if args or destination is not None or prefix:
            raise UsageError(
                f"state_dict() of a module that has FullyShardedDataParallel inside, as {prefix or 'a part'!r}; save "
                "the wrapper's own, and load it there, beside what the outer module has itself"
            )
        mesh = self._mesh()
        return {
            name: value.as_saved(mesh) if isinstance(value, ShardedParameter) else _detached(value)
            for name, value in self._by_name().items()
        }

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Take over what `state_dict()` of this or of the plain module returned: DTensors, or full tensors.

        All ranks call it, as DTensors cut another way, or on another mesh, have to be put together for it. Returns the
        names that were missing and those that are unknown, as torch's does.

        Raises:
            UsageError: `strict`, and names are missing or unknown; or a shape is wrong.
        """
        own, by_name, mesh = self.state_dict(), self._by_name(), self._mesh()
        missing, unknown = sorted(own.keys() - state_dict.keys()), sorted(state_dict.keys() - own.keys())
        if strict and (missing or unknown):
            lists = (", ".join(names) or "none" for names in (missing, unknown))
            raise UsageError("the state does not fit: missing are {}; unknown are {}".format(*lists))
        with torch.no_grad():
            for name in (each for each in own if each in state_dict):  # on every rank in one order
                value = state_dict[name]
                if not isinstance(value, Tensor) or is_extra_state(name):
                    continue
                if value.shape != own[name].shape:
                    raise UsageError(f"{name} has shape {tuple(value.shape)}; expected {tuple(own[name].shape)}")
                if isinstance(parameter := by_name[name], ShardedParameter):
                    parameter.load(value, mesh)
                else:
                    own[name].copy_(value)
        set_extra_states(self.module, {name: state_dict[name] for name in own if name in state_dict})
        return _IncompatibleKeys(missing, unknown)

    def __deepcopy__(self, memo: object) -> FullyShardedDataParallel:
        raise UsageError(
            "a sharded module cannot be copied; build another one and give its load_state_dict this one's state_dict()"
        )

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if "module" in self._modules and hasattr(self.module, name):
                raise _NotHereError(
                    f"FullyShardedDataParallel has no {name!r}; its module has: .module.{name}. (torch's "
                    "get_state_dict and set_state_dict do not know this wrapper: use save_checkpoint, load_checkpoint)"
                ) from None
            raise

    def sharded_parameters(self) -> list[ShardedParameter]:
        """All parameters, in the order of `parameters()`."""
        return self._sharded

    def saved_parameters(self) -> dict[str, ShardedParameter]:
        """All parameters, by the first name that `state_dict()` has each under."""
        first: dict[ShardedParameter, str] = {}
        for name, value in self._by_name().items():
            if isinstance(value, ShardedParameter):
                first.setdefault(value, name)
        return {name: parameter for parameter, name in first.items()}

    def _before_step(self, optimizer: torch.optim.Optimizer) -> None:
        if self._step_check.concerns(optimizer):
            self._schedule.check_complete(f"{type(optimizer).__name__}.step()")
            self._step_check.check(optimizer)

    def _by_name(self) -> dict[str, ShardedParameter | Any]:
        """Parameters that the module's state has, by the names it has there, which its hooks may have changed."""
        own = by_identity(self._sharded)
        named = {name: each for each in self._sharded for name in each.names}
        state = self.module.state_dict(keep_vars=True)
        return {name: own.get(id(value), named.get(name, value)) for name, value in state.items()}

    def _mesh(self) -> DeviceMesh:
        return self._ranks.mesh(self.device.type)

    def _cast(self, value: Any) -> Any:
        return value.to(self._compute_dtype) if isinstance(value, Tensor) and value.is_floating_point() else value

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> FullyShardedDataParallel:
        with torch.no_grad():
            for shard in (parameter.shard.detach() for parameter in self._sharded):
                if fn(shard) is not shard:
                    raise moved_or_cast()
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return self


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value
