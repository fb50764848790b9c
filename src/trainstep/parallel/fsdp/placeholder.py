"""What stands in a module for a parameter while no call that owns it is running.

Code outside of those calls may read it all the same: a position embedding added as a slice, a head tied by
`F.linear(x, embedding.weight)`, a penalty on weights. Within a forward of the wrapper, reading it gathers its group,
which then stays until gradients have been synchronised. Outside, ranks need not read alike, so it is an error.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree

from trainstep.base.errors import UsageError
from trainstep.parallel.partial import RankValues, StandIn, changes, name_of

if TYPE_CHECKING:
    from trainstep.parallel.fsdp.shards import ShardedParameter


class Placeholder(StandIn):
    """Has the full parameter's shape, and the dtype it is computed with. Its `grad` is that of the shard, and so is its
    `data` outside of the wrapper's forward.

    Attributes:
        parameter: what it stands for.
        may_read: whether it may be read now: all ranks do.
        read: gathers the parameter and returns it in full, or raises.
    """

    _is_param = True  # so that isinstance says nn.Parameter
    parameter: ShardedParameter
    may_read: Callable[[], bool]
    read: Callable[[], nn.Parameter]

    @classmethod
    def of(
        cls, parameter: ShardedParameter, may_read: Callable[[], bool], read: Callable[[], nn.Parameter]
    ) -> Placeholder:
        assert parameter.full is not None
        made: Placeholder = cls.like(parameter.full)
        made.__dict__.update(vars(parameter.shard))  # marks that users set on parameters
        made.parameter, made.may_read, made.read = parameter, may_read, read
        return made

    @property
    def grad(self) -> Tensor | None:
        return self.parameter.shard.grad

    @grad.setter
    def grad(self, gradient: Tensor | None) -> None:
        self.parameter.shard.grad = gradient

    @classmethod
    def use(cls, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        what = name_of(func)
        first = next(each for each in _pytree.tree_leaves((args, kwargs)) if isinstance(each, Placeholder))
        parameter = first.parameter
        if what in ("requires_grad_", "requires_grad"):
            asked = args[1] if len(args) > 1 else kwargs.get("requires_grad", True)
            if asked != parameter.trainable:
                raise UsageError(parameter.frozen_message(asked))
            return first
        if what in _CASTS and not first.may_read():  # as Module.to() and the like do
            cast = func(parameter.shard.detach(), *args[1:], **kwargs)
            if (cast.dtype, cast.device) != (parameter.shard.dtype, parameter.shard.device):
                instead = "give FullyShardedDataParallel device= or compute_dtype= instead"
                raise UsageError(f"a sharded module was moved or cast; {instead}")
            return first
        if what in ("__deepcopy__", "__reduce_ex__"):
            raise UsageError(
                f"{parameter.name} is sharded, and its module cannot be copied or pickled; use state_dict() or "
                "gather_full_parameters() of FullyShardedDataParallel"
            )
        if what == "copy_" and first is args[0] and not torch.is_grad_enabled() and parameter.fits(args[1]):
            parameter.load(args[1], None)  # as Module.load_state_dict does
            return first
        if what == "data" and func.__name__ == "__get__" and not first.may_read():
            return RankValues.mark(parameter.shard.data)
        if what == "data" or changes(what):
            raise UsageError(
                f"{what} of {parameter.name}, which is sharded: what is changed outside of its module's forward would "
                "be lost. Change the parameters of FullyShardedDataParallel element by element, or load_state_dict"
            )
        args, kwargs = _pytree.tree_map_only(Placeholder, lambda each: each.read(), (args, kwargs))
        return func(*args, **kwargs)


_CASTS = frozenset(["to", "cuda", "cpu", "float", "double", "half", "bfloat16"])
