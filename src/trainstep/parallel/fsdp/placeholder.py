"""Stand-ins for a sharded parameter: handles outside of the module, placeholders inside.

The wrapper's `parameters()` are handles. A placeholder is in the module while no call that owns the parameter is
running. Code outside of those calls may read it all the same: a position embedding added as a slice, a head tied by
`F.linear(x, embedding.weight)`, a penalty on weights. Within a forward of the wrapper, reading it gathers its group,
which then stays until gradients have been synchronised. Outside, ranks need not read alike: there it is a handle.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils import _pytree

from trainstep.base.errors import UsageError
from trainstep.parallel.collectives import broadcast_from_first
from trainstep.parallel.fsdp.rows import RankGradient, RankRows, Sharing, beside, frozen, moved_or_cast
from trainstep.parallel.partial import changes, name_of

if TYPE_CHECKING:
    from trainstep.parallel.fsdp.schedule import Schedule
    from trainstep.parallel.fsdp.shards import ShardedParameter


class Handle(RankRows):
    """Has the parameter's full shape and the shard's dtype; this rank's rows are the shard.

    Optimizers update the shard itself. Hooks that are registered by `register_post_accumulate_grad_hook` are called
    by `finish_gradient_synchronization()`, when `grad` is the mean over the ranks.

    It leads to nothing that has it, so that a wrapper's memory is free as soon as the wrapper goes: Python's collector
    does not see through a tensor that a call to other ranks still holds.

    Attributes:
        parameter_name: of what it stands for.
        trainable: whether the parameter is.
    """

    _is_param = True  # so that isinstance says nn.Parameter
    parameter_name: str
    trainable: bool
    _gradient: RankGradient | None

    @classmethod
    def for_shard(cls, parameter: ShardedParameter, sharing: Sharing, like: nn.Parameter) -> Any:
        """`like`: has its dtype, and whether it requires a gradient."""
        settings: dict[str, Any] = {"dtype": like.dtype, "requires_grad": like.requires_grad}
        made = cls.of(parameter.shard, parameter.shape, parameter.divided, sharing, **settings)
        made.__dict__ |= vars(parameter.shard) | vars(made)  # marks that users set on parameters
        made.parameter_name, made.trainable = parameter.name, parameter.trainable
        made.updated, made._gradient = parameter.shard, None
        made._label = f"{parameter.name}, which is sharded"
        return made

    @property
    def grad(self) -> Tensor | None:
        if self.sharing.is_waiting():
            self._refuse_gradient()
        gradient = self.plain.grad
        if gradient is None:
            self._gradient = None
        elif self._gradient is None or self._gradient.plain is not gradient:
            self._gradient = RankGradient.of(gradient, self.shape, self.rows, self.sharing)
        return self._gradient

    @grad.setter
    def grad(self, gradient: Tensor | None) -> None:
        if self.sharing.is_waiting():
            self._refuse_gradient()
        self._gradient = None
        self.plain.grad = None if gradient is None else beside(self, gradient, "grad")

    def _refuse_gradient(self) -> NoReturn:
        raise UsageError(
            f"grad of {self.parameter_name} before finish_gradient_synchronization(): gradients came and are not "
            "averaged yet. Call it first, after backward. To throw gradients away, as for a step that is skipped, call "
            "zero_grad() of FullyShardedDataParallel"
        )

    @classmethod
    def use(cls, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        what = name_of(func)
        first = next(each for each in _pytree.tree_leaves((args, kwargs)) if isinstance(each, Handle))
        if what in ("requires_grad_", "requires_grad"):
            asked = args[1] if len(args) > 1 else kwargs.get("requires_grad", True)
            if asked != first.trainable:
                raise frozen(first.parameter_name, asked)
            return first
        if what == "register_post_accumulate_grad_hook":
            first.sharing.hooked.add(first.parameter_name)
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if what == "register_hook":
            raise UsageError(
                f"{first.parameter_name} is sharded, and its gradient does not pass here in backward, so the hook "
                "would never be called. Register it on the module's parameter before FullyShardedDataParallel takes "
                "it, or use register_post_accumulate_grad_hook"
            )
        return super().use(func, args, kwargs)


class Placeholder(Handle):
    """Has the dtype that the parameter is computed with.

    Attributes:
        may_read: whether it may be read now: all ranks do.
        read: gathers the parameter and returns it in full.
    """

    may_read: Callable[[], bool]
    read: Callable[[], nn.Parameter]
    _instead = f"Read it in the module's forward. {RankRows._instead}"

    @classmethod
    def use(cls, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        what = name_of(func)
        first = next(each for each in _pytree.tree_leaves((args, kwargs)) if isinstance(each, Placeholder))
        if what in ("__deepcopy__", "__reduce_ex__"):
            raise UsageError(
                f"{first.parameter_name} is sharded, and its module cannot be copied or pickled; use state_dict() or "
                "gather_full_parameters() of FullyShardedDataParallel"
            )
        if not first.may_read() or what in ("requires_grad_", "requires_grad"):
            result = super().use(func, args, kwargs)
            if what in _CASTS and result is not first:  # as Module.to() does
                raise moved_or_cast()
            return result
        if what == "data" or changes(what):
            raise UsageError(
                f"{what} of {first._label}: what is changed outside of its module's forward would be lost. Change the "
                "parameters of FullyShardedDataParallel between steps, or load_state_dict"
            )
        args, kwargs = _pytree.tree_map_only(Placeholder, lambda each: each.read(), (args, kwargs))
        return func(*args, **kwargs)


def stand_for_all(schedule: Schedule, process_group: dist.ProcessGroup) -> None:
    """Make handles of all parameters, and placeholders, which go into the module.

    Args:
        schedule: of the parameters.
        process_group: all ranks.
    """
    agreement, alive = schedule.agreement, weakref.ref(schedule)

    def from_first(values: Sequence[Tensor]) -> None:
        agreement.announce("fill")
        broadcast_from_first(values, process_group)

    def may_read() -> bool:
        return (schedule := alive()) is not None and schedule.may_read

    def is_waiting() -> bool:
        return (schedule := alive()) is not None and not schedule.is_complete

    sharing = Sharing(process_group, from_first, is_waiting, schedule.hooked)
    for number, (_, parameter) in enumerate(schedule.members):
        assert parameter.full is not None
        parameter.handle = Handle.for_shard(parameter, sharing, parameter.shard)
        parameter.placeholder = Placeholder.for_shard(parameter, sharing, parameter.full)
        parameter.placeholder.may_read = may_read
        parameter.placeholder.read = _reader(alive, number)
        parameter.install_placeholder()


def _reader(alive: weakref.ref[Schedule], number: int) -> Callable[[], nn.Parameter]:
    """Function that gathers a parameter for a read outside of its module's calls."""

    def read() -> nn.Parameter:
        schedule = alive()
        assert schedule is not None, "it may be read"
        group, parameter = schedule.members[number]
        schedule.hold(group)
        assert parameter.full is not None
        return parameter.full

    return read


_CASTS = frozenset(["to", "type", "cuda", "cpu", "float", "double", "half", "bfloat16", "empty_like"])
