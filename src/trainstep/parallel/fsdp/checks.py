"""Checks when the wrapper is built, and before an optimizer steps."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainstep.base.errors import UnsupportedError, UsageError
from trainstep.parallel.fsdp.shards import PlannedParameter, ShardedParameter, by_identity
from trainstep.parallel.partial import Known, is_elementwise
from trainstep.parallel.ranks import Ranks
from trainstep.parallel.transport.by_copies import check_name
from trainstep.parallel.units import Unit

MAX_PREFETCH = 2
_REPLICATED = "DistributedDataParallel"


class StepCheck:
    """Checks of optimizers that have any of one wrapper's parameters."""

    def __init__(self, sharded: Sequence[ShardedParameter], process_group: dist.ProcessGroup) -> None:
        self._sharded, self._process_group = sharded, process_group
        self._shards = Known({each.name: each.shard for each in sharded})

    def concerns(self, optimizer: torch.optim.Optimizer) -> bool:
        """True if the optimizer has any of the shards."""
        return self._shards.first_in(optimizer) is not None

    def check(self, optimizer: torch.optim.Optimizer) -> None:
        """Check that it may be given shards.

        Raises:
            UsageError: it is not known to be elementwise, or has the state of whole parameters.
        """
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


class Contents:
    """Modules and parameters of a sharded module; later ones are neither sharded nor synchronised.

    Args:
        sharded: all its parameters.
    """

    def __init__(self, module: nn.Module, sharded: Sequence[ShardedParameter]) -> None:
        self._module, self._sharded = module, sharded
        self._note()

    def check(self) -> None:
        """See that there are no other parameters than there were, nor another number of modules in one. A module may
        have taken the place of another if it has no parameters of its own, as one that is wrapped around it.

        Raises:
            UsageError: there are.
        """
        for module, count in self._counts:
            if len(module._parameters) != count:
                raise self._changed(module)
        for module, children in self._children:
            now = list(module._modules.values())
            if now != children:
                if len(now) != len(children) or self._others():
                    raise self._changed(module)
                self._note()
                return

    def _note(self) -> None:
        modules = list(self._module.modules())
        self._counts = [(each, len(each._parameters)) for each in modules]
        self._children = [(each, list(each._modules.values())) for each in modules]

    def _others(self) -> list[str]:
        """Names of parameters that are not sharded."""
        own = by_identity(self._sharded)
        return [name for name, each in self._module.named_parameters() if id(each) not in own]

    def _changed(self, module: nn.Module) -> UsageError:
        extra = self._others()
        what = f"parameter {extra[0]} was added" if extra else f"a {type(module).__name__} was changed"
        return UsageError(
            f"{what} after FullyShardedDataParallel was built, so it is not sharded and its gradient not "
            "synchronised; complete the module first"
        )


def is_kept(entry: PlannedParameter, kept: set[nn.Module]) -> bool:
    """True if a parameter belongs to modules that are kept in full precision.

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
    first_at: dict[object, tuple[str, bool]] = {}
    for name, parameter in module.named_parameters():
        if parameter.is_complex():
            raise UnsupportedError(f"{name} is complex ({parameter.dtype}), which cannot be sharded; use {_REPLICATED}")
        other, is_trained = first_at.setdefault(_place(parameter), (name, parameter.requires_grad))
        if other != name and (is_trained or parameter.requires_grad):
            raise UnsupportedError(
                f"{name} shares the memory of {other} and is another parameter, which sharding would part; assign one "
                "parameter to both modules, or let one compute with the other's (F.linear(x, embedding.weight))"
            )
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


def device_for(parameters: list[nn.Parameter], ranks: Ranks, asked: torch.device | str | None) -> torch.device:
    """Device to train on: as asked, else where the parameters are or, from meta, the group's device.

    Raises:
        UsageError: the mesh is of other devices.
    """
    found: list[torch.device | str] = [parameter.device for parameter in parameters if not parameter.is_meta]
    if ranks.given is not None:
        found.append(ranks.given.device_type)
    found.append("cuda" if "cuda:nccl" in dist.get_backend_config(ranks.everyone) else "cpu")
    device = torch.device(found[0] if asked is None else asked)
    if ranks.given is not None and device.type != ranks.given.device_type:
        raise UsageError(
            f"mesh is of {ranks.given.device_type} devices, and the module would train on {device}; make the mesh for "
            f"{device.type}, or move the module (or give device=)"
        )
    if device == torch.device("cuda"):  # without an index
        device = torch.device("cuda", torch.cuda.current_device())
    return device


def _place(parameter: nn.Parameter) -> object:
    """The same for parameters that have the same elements in memory, as a matrix and its transpose."""
    if parameter.numel() == 0 or type(parameter.data) is not Tensor or parameter.layout != torch.strided:
        return id(parameter)
    return parameter.untyped_storage()._cdata, parameter.storage_offset(), parameter.numel(), parameter.dtype


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
