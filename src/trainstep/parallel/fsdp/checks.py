"""What is checked when the wrapper is built, and before an optimizer steps."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainstep.errors import UnsupportedError, UsageError
from trainstep.parallel.fsdp.placeholder import Placeholder
from trainstep.parallel.fsdp.shards import PlannedParameter, ShardedParameter
from trainstep.parallel.partial import Known, RankGradient, is_elementwise
from trainstep.parallel.transport.choice import check_name
from trainstep.parallel.units import Unit

MAX_PREFETCH = 2
_REPLICATED = "DistributedDataParallel"


class StepCheck:
    """Of optimizers that have any of one wrapper's parameters.

    Args:
        sharded: the wrapper's.
        retired: the parameters that shards took the place of, by name.
        gradient_class: that gradients of shards have.
    """

    def __init__(
        self,
        sharded: Sequence[ShardedParameter],
        retired: Mapping[str, nn.Parameter],
        process_group: dist.ProcessGroup,
        gradient_class: type[RankGradient],
    ) -> None:
        self._sharded, self._process_group, self._gradient_class = sharded, process_group, gradient_class
        self._retired, self._shards = Known(retired), Known({each.name: each.shard for each in sharded})
        self._seen: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = weakref.WeakKeyDictionary()

    def concerns(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether the optimizer has any of the shards. One made from the module's own parameters() is given them.

        Raises:
            UsageError: it has parameters as they were before sharding.
        """
        if self._seen.get(optimizer) != len(optimizer.param_groups):
            _put_shards_for_placeholders(optimizer)
            self._seen[optimizer] = len(optimizer.param_groups)
        if (retired := self._retired.first_in(optimizer)) is not None:
            raise UsageError(
                f"the optimizer has {retired} as it was before sharding; build the optimizer after "
                "FullyShardedDataParallel, from its parameters()"
            )
        return self._shards.first_in(optimizer) is not None

    def make_ready(self, optimizer: torch.optim.Optimizer) -> None:
        """Check that it may be given shards, and give it gradients as plain tensors.

        Raises:
            UsageError: it is not known to be elementwise, or has the state of whole parameters; or shards have hooks.
        """
        if hooked := next((each.name for each in self._sharded if _is_hooked(each)), None):
            raise UsageError(
                f"{hooked} was given a hook after it had been sharded, which is never called; register hooks on the "
                "module's parameters before FullyShardedDataParallel takes them"
            )
        if self._process_group.size() > 1 and not is_elementwise(optimizer):
            raise UsageError(
                f"{type(optimizer).__name__} is not known to treat each element alone, and a rank has only its rows of "
                "the parameters. Use an elementwise optimizer of torch.optim (such as AdamW), or "
                f"{_REPLICATED} and ShardedOptimizer, which gives whole parameters to ranks. If it is your "
                "own and elementwise, say so: is_elementwise = True in its class"
            )
        cut = next((each for each in self._sharded if each.shard.shape != each.shape), None)  # it tells for all
        state = {} if cut is None or cut.shard not in optimizer.state else optimizer.state[cut.shard]
        for key, value in state.items():
            if cut is not None and isinstance(value, Tensor) and value.dim() > 0 and value.shape == cut.shape:
                raise UsageError(
                    f"the optimizer's {key} of {cut.name} has shape {tuple(value.shape)}, that of the whole parameter; "
                    f"this rank's shard has {tuple(cut.shard.shape)}. State is loaded by load_checkpoint of "
                    "trainstep.parallel"
                )
        for parameter in self._sharded:
            if type(gradient := parameter.shard.grad) is self._gradient_class:
                parameter.shard.grad = gradient.plain


def _is_hooked(parameter: ShardedParameter) -> bool:
    """Whether its shard has a hook that is not ours."""
    after = parameter.shard._post_accumulate_grad_hooks or ()
    return bool(parameter.shard._backward_hooks) or len(after) > parameter.trainable


def _put_shards_for_placeholders(optimizer: torch.optim.Optimizer) -> None:
    """An optimizer that was made from the module's own parameters() gets what the wrapper's would have given it."""
    for group in optimizer.param_groups:
        for index, each in enumerate(group["params"]):
            if isinstance(each, Placeholder):
                group["params"][index] = each.parameter.shard
                if each in optimizer.state:
                    optimizer.state[each.parameter.shard] = optimizer.state.pop(each)


def is_kept(entry: PlannedParameter, kept: set[nn.Module]) -> bool:
    """Whether a parameter belongs to modules that are kept in full precision.

    Raises:
        UsageError: it is tied, and belongs to others as well.
    """
    inside = [owner in kept for owner, _ in entry.slots]
    if any(inside) and not all(inside):
        raise UsageError(
            f"{' and '.join(entry.names)} are one parameter, and full_precision has only some of its modules; it "
            "can be gathered in one dtype: give all of them, or none"
        )
    return all(inside)


def check_arguments(
    module: object,
    compute_dtype: torch.dtype | None,
    full_precision: Iterable[nn.Module],
    prefetch: int,
    transport: str,
) -> set[nn.Module]:
    """Raise `UsageError` or `UnsupportedError` where the wrapper cannot be built as asked.

    Returns the modules of `full_precision`, and those inside of them.
    """
    if not isinstance(module, nn.Module):
        raise UsageError(f"module is a {type(module).__name__}; expected an nn.Module")
    if compute_dtype is not None and not compute_dtype.is_floating_point:
        raise UsageError(f"compute_dtype is {compute_dtype}; expected a floating-point dtype, such as torch.bfloat16")
    kept = _modules_in(full_precision, module)
    if kept and compute_dtype is None:
        raise UsageError("full_precision says what compute_dtype is not for, and compute_dtype is None; give both")
    if prefetch not in range(MAX_PREFETCH + 1):
        raise UsageError(f"prefetch is {prefetch!r}; expected 0 to {MAX_PREFETCH} groups")
    check_name(transport)
    if any(isinstance(inner, Unit) for inner in module.modules()):
        raise UsageError("the module is sharded already; build FullyShardedDataParallel once, around the whole model")
    if lazy := [name for name, parameter in module.named_parameters() if nn.parameter.is_lazy(parameter)]:
        raise UsageError(f"{lazy[0]} has no shape yet; run a lazy module once before sharding it")
    for name, parameter in module.named_parameters():
        if parameter.is_complex():
            raise UnsupportedError(f"{name} is complex ({parameter.dtype}), which cannot be sharded; use {_REPLICATED}")
        if parameter.numel() == 0:
            shape = tuple(parameter.shape)
            raise UnsupportedError(f"{name} has no elements (shape {shape}), so it cannot be sharded; leave it out")
    for name, inner in module.named_modules():
        if isinstance(inner, nn.RNNBase):
            raise UnsupportedError(
                f"{name or 'the module'} is an nn.{type(inner).__name__}, which keeps a list of its parameters beside "
                f"them and cannot be sharded; use {_REPLICATED}"
            )
        if isinstance(inner, (nn.Embedding, nn.EmbeddingBag)) and inner.sparse:
            what = f"{name or 'the module'} makes sparse gradients"
            raise UnsupportedError(f"{what}, which cannot be sharded; use sparse=False, or {_REPLICATED}")
    return kept


def _modules_in(full_precision: object, module: nn.Module) -> set[nn.Module]:
    """Modules that the caller named, and all inside of them."""
    expected = "expected modules that are parts of the wrapped one, in a list"
    if not isinstance(full_precision, Iterable):
        raise UsageError(f"full_precision is a {type(full_precision).__name__}; {expected}")
    named, inside = list(full_precision), set(module.modules())
    for each in named:
        if not isinstance(each, nn.Module) or each not in inside:
            foreign = " of another module" if isinstance(each, nn.Module) else ""
            raise UsageError(f"full_precision has a {type(each).__name__}{foreign}; {expected}")
    return {inner for each in named for inner in each.modules()}
