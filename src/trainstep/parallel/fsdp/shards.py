"""From a module to shards: which parameters are gathered together, how each is cut, and the cutting.

A *unit* is a module whose call needs its parameters gathered: each block (an element of a ModuleList), and outside the
blocks the largest modules that contain none. Containers that are never called themselves, and Sequentials, are looked
into. A parameter of several units (a tied weight) forms a group of its own with those that share its units.

A parameter with two or more dimensions is cut by rows, as `torch.chunk` cuts and as a DTensor's `Shard(0)` lies: each
rank has ceil(rows / world size) of them, the last ranks fewer or none. So a shard keeps its dimensions, its elements
are contiguous, and it is a valid checkpoint as it stands. Everything else is replicated.

Parameters are cut one module's at a time, so that no rank ever holds the whole model. Parameters and buffers become
rank 0's. Those on the meta device are first given memory and initialised, module by module, on every rank (so that all
ranks draw the same random numbers), and cut before the next module's are made.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from trainstep.base.errors import UsageError
from trainstep.parallel.collectives import broadcast_from_first
from trainstep.parallel.fsdp.placeholder import Handle, Placeholder
from trainstep.parallel.fsdp.rows import frozen
from trainstep.parallel.partial import METADATA, name_of
from trainstep.parallel.ranks import Ranks, placements
from trainstep.step.blocks import find_blocks, is_called

Initialize = Callable[[nn.Module], None]
"""Fills the parameters and buffers that a module has itself, not those of the modules inside it."""


def cut_rows(shape: torch.Size, rank: int, world_size: int) -> tuple[slice, torch.Size]:
    """The rank's rows of a tensor of `shape`, and the shape with as many rows as make all ranks' equal."""
    per_rank = -(-shape[0] // world_size)
    start, stop = (min(number * per_rank, shape[0]) for number in (rank, rank + 1))
    return slice(start, stop), torch.Size((per_rank * world_size, *shape[1:]))


@dataclass(eq=False)
class ShardedParameter:
    """A parameter's shard, which the optimizer sees, and its full form, which the module computes with."""

    names: list[str]  # in the module; several if it is tied
    slots: list[tuple[weakref.ref[nn.Module], str]]  # (module, attribute) for each name; the module leads here
    shard: nn.Parameter  # this rank's rows (or all of it), in the dtype it is trained in. `.grad` is the shard's
    shape: torch.Size  # of the full parameter
    padded_shape: torch.Size  # of the full parameter with as many rows as make the shards equal
    rows: slice | None  # the shard's in the full parameter, or None if it is replicated
    full: nn.Parameter | None = None  # the whole in the dtype it is computed with; its storage comes and goes
    handle: Handle | None = None  # the wrapper's `parameters()` have it
    placeholder: Placeholder | None = None  # in the module while no call that owns it is running
    hooks: Sequence[tuple[str, Callable[..., Any]]] = ()  # a user's, by the method that registers them
    divided: slice | None = None  # `rows` if other ranks have others
    keeps_dtype: bool = False  # whether it is computed with in the dtype it is trained in, whatever others are
    _accumulator: Any = None  # autograd's node of the whole

    def __post_init__(self) -> None:
        self.trainable = self.shard.requires_grad
        if self.trainable:
            self.shard.register_post_accumulate_grad_hook(functools.partial(_refuse_gradient, self.names[0]))

    @property
    def name(self) -> str:
        return self.names[0]

    def compute_dtype(self, dtype: torch.dtype | None) -> torch.dtype:
        """Dtype that it is gathered in, if floating-point parameters are computed with in `dtype` (None: as they
        are)."""
        if dtype is None or self.keeps_dtype or not self.shard.is_floating_point():
            return self.shard.dtype
        return dtype

    def as_saved(self, mesh: DeviceMesh) -> Tensor:
        """The shard as the part of a whole that it is, a DTensor, as is what is replicated. It shares memory."""
        stride, own = torch.empty(self.shape, device="meta").stride(), self.shard.detach()
        where = placements(mesh, cut=self.rows is not None)
        return DTensor.from_local(own, mesh, where, run_check=False, shape=self.shape, stride=stride)

    def load(self, value: Tensor, mesh: DeviceMesh | None) -> None:
        """Copy a value of the full parameter's shape into the shard: a plain tensor or, with the mesh, a DTensor."""
        if isinstance(value, DTensor) and mesh is not None and value.device_mesh == mesh:
            value = value.redistribute(mesh, placements(mesh, cut=self.rows is not None)).to_local()
        else:
            if isinstance(value, DTensor):
                value = value.full_tensor()
            value = value if self.rows is None else value[self.rows]
        self.shard.copy_(value)

    def install_full(self) -> None:
        """Let the module compute with the whole."""
        assert self.full is not None
        if self.shard.requires_grad != self.trainable:
            raise frozen(self.name, self.shard.requires_grad)
        self._install(self.full)

    def install_placeholder(self, address: int | None = None) -> None:
        """Let the module have what stands for the whole, which was gathered at the address; None: for the first time.

        Raises:
            UsageError: the whole was changed, or was given other memory.
        """
        assert self.full is not None, "before the first gather"
        assert self.placeholder is not None, "before the first gather"
        if self.full._version != 0 or (address is not None and self.full.data_ptr() != address):
            raise UsageError(
                f"{self.name} was changed in place while it was gathered, which is lost when it is freed; change the "
                "parameters of FullyShardedDataParallel, element by element, between steps"
            )
        self._install(self.placeholder)

    @property
    def is_accumulated(self) -> bool:
        """True if the backward that is running gives the whole a gradient."""
        if self._accumulator is None and self.trainable:
            assert self.full is not None, "before the first gather"
            self._accumulator = torch.autograd.graph.get_gradient_edge(self.full).node
        try:
            return self._accumulator is not None and torch._C._will_engine_execute_node(self._accumulator)
        except RuntimeError:  # of autograd.grad, where it is what is asked for
            return False

    def _install(self, parameter: Tensor) -> None:
        for reference, attribute in self.slots:
            if (module := reference()) is None:
                continue  # the user took it out of the model
            there: Tensor | None = module._parameters.get(attribute)
            if there is not self.placeholder and there is not self.full and there is not self.shard:
                raise UsageError(
                    f"{self.name} was replaced or removed after the module was sharded; change parameters in place, "
                    "through load_state_dict, or before FullyShardedDataParallel is built"
                )
            module._parameters[attribute] = parameter  # type: ignore[assignment]

    def attach_gradient(self, gradient: Tensor) -> None:
        """Give the shard its part of a mean gradient, or add it to what it has."""
        if self.shard.grad is None:
            self.shard.grad = gradient
        else:
            self.shard.grad.add_(gradient)

    def run_hooks(self) -> None:
        """Call the hooks that users registered for when the gradient is there."""
        for owner in (self.handle, self.placeholder):
            with torch._C.DisableTorchFunctionSubclass():
                hooks = list((owner._post_accumulate_grad_hooks or {}).values()) if owner is not None else []
            for hook in hooks:
                hook(owner)


def by_identity(sharded: Iterable[ShardedParameter]) -> dict[int, ShardedParameter]:
    """Parameters by the `id` of each tensor that may stand for them in a module or an optimizer."""
    return {id(tensor): each for each in sharded for tensor in (each.handle, each.placeholder, each.full, each.shard)}


@dataclass(eq=False)
class PlannedParameter:
    """A parameter, and where it is used."""

    parameter: nn.Parameter
    names: list[str] = field(default_factory=list)  # more than one if it is tied
    slots: list[tuple[nn.Module, str]] = field(default_factory=list)  # (module, attribute) for each name
    units: list[nn.Module] = field(default_factory=list)


@dataclass(eq=False)
class PlannedGroup:
    """Parameters that are gathered together, for the calls of `units`."""

    units: list[nn.Module]
    parameters: list[PlannedParameter]


Chosen = Iterable[nn.Module | Sequence[nn.Module]]
"""Modules that are each gathered as a whole; those of a list are gathered together."""


def plan_groups(root: nn.Module, chosen: Chosen | None = None) -> list[PlannedGroup]:
    """The groups of a module's parameters, in order of definition. Units are the modules `chosen`, else the blocks.

    Raises:
        UsageError: a chosen module is not inside `root`, is chosen twice, or has no `forward` that would be called.
    """
    together = _checked(root, chosen)
    unit_of = _units(root, set(together))
    planned: dict[int, PlannedParameter] = {}
    for prefix, module in root.named_modules():
        for attribute, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            found = planned.setdefault(id(parameter), PlannedParameter(parameter))
            found.names.append(f"{prefix}.{attribute}" if prefix else attribute)
            found.slots.append((module, attribute))
            if unit_of[module] not in found.units:
                found.units.append(unit_of[module])
    groups: dict[tuple[int, ...], PlannedGroup] = {}
    for parameter in planned.values():
        key = tuple(sorted({id(together.get(unit, unit)) for unit in parameter.units}))
        group = groups.setdefault(key, PlannedGroup([], []))
        group.parameters.append(parameter)
        group.units += [unit for unit in parameter.units if unit not in group.units]
    return list(groups.values())


def shard_parameters(
    root: nn.Module,
    planned: Sequence[PlannedParameter],
    ranks: Ranks,
    device: torch.device,
    initialize: Initialize | None,
) -> dict[PlannedParameter, ShardedParameter]:
    """Put shards in the place of all parameters, and rank 0's buffers in the place of all buffers.

    The parameters that are replaced lose their memory.

    Raises:
        UsageError: a module has parameters on the meta device, and nothing can initialise it.
    """
    plan_of = {slot: entry for entry in planned for slot in entry.slots}
    sharded: dict[PlannedParameter, ShardedParameter] = {}
    for name, module in root.named_modules():
        own = {key: plan_of[module, key] for key, there in module._parameters.items() if there is not None}
        if any(t is not None and t.is_meta for t in (*module._parameters.values(), *module._buffers.values())):
            _materialise(name, module, own, device, initialize)
        buffers = {name: buffer.to(device) for name, buffer in module._buffers.items() if buffer is not None}
        module._buffers.update(buffers)
        broadcast_from_first(list(buffers.values()), ranks.everyone)
        for attribute, entry in own.items():
            if entry not in sharded:
                full = module._parameters[attribute]
                assert full is not None
                sharded[entry] = _shard(entry, full, ranks, device)
            for owner, name_there in entry.slots:
                owner._parameters[name_there] = sharded[entry].shard
    return sharded


def _checked(root: nn.Module, chosen: Chosen | None) -> dict[nn.Module, nn.Module]:
    """Each chosen module, and the first of those that it is gathered with."""
    if chosen is None:
        return {block: block for block in find_blocks(root)}
    inside = {module: name for name, module in root.named_modules()}
    together: dict[nn.Module, nn.Module] = {}
    alone: set[nn.Module] = set()  # which may come again: a block that a list has at two places
    for entry in chosen:
        is_slice = isinstance(entry, nn.ModuleList) and entry not in inside
        modules = list(cast(nn.ModuleList, entry)) if is_slice or isinstance(entry, (list, tuple)) else [entry]
        for module in modules:
            one = f"a {type(module).__name__}"
            if not isinstance(module, nn.Module) or module not in inside:
                known = "modules found by module.modules(), or lists of them"
                raise UsageError(f"groups has {one} that is not part of the module; give {known}")
            name = inside[module] or "the module itself"
            if not is_called(module):
                raise UsageError(f"groups has {name}, {one}, which is never called; give the modules inside it")
            if module in together and not (modules == [module] and module in alone):
                raise UsageError(f"groups has {name}, {one}, twice; give it once, alone or in one list")
            if any(inner is not module and inner in modules for inner in module.modules()):
                raise UsageError(f"groups has {name} in one list with a module inside it; leave that one out")
            together[module] = cast(nn.Module, modules[0])
        if len(modules) == 1:
            alone.add(cast(nn.Module, modules[0]))
    return together


def _units(root: nn.Module, chosen: set[nn.Module]) -> dict[nn.Module, nn.Module]:
    around_chosen = {module for module in root.modules() if any(inner in chosen for inner in module.modules())}
    units: dict[nn.Module, nn.Module] = {}
    to_visit = [(root, root, False)]  # a module, the unit around it, and whether that takes all inside
    while to_visit:
        module, unit, whole = to_visit.pop()
        if module in units:
            continue  # a module used in several places keeps the unit of the first
        if module in chosen:
            unit, whole = module, True
        elif not whole and is_called(module):
            unit = module
            whole = not (module is root or module in around_chosen or isinstance(module, nn.Sequential))
        units[module] = unit
        to_visit += [(child, unit, whole) for child in reversed(list(module.children()))]
    return units


def _refuse_gradient(name: str, shard: Tensor) -> None:
    """Backward has come to a shard itself."""
    raise UsageError(
        f"{name} from FullyShardedDataParallel's parameters() was used in the loss: it is this rank's part, so the "
        "loss is another one on every rank. Compute with weights in a forward of the module, where they are whole"
    )


def _materialise(
    name: str, module: nn.Module, own: dict[str, PlannedParameter], device: torch.device, initialize: Initialize | None
) -> None:
    """Give a module's own parameters and buffers memory and values.

    A tied parameter has its values from the module that has it first; what this one would give it is thrown away.
    """
    for attribute, entry in own.items():
        memory = torch.empty_like(entry.parameter, device=device)
        module._parameters[attribute] = nn.Parameter(memory, requires_grad=entry.parameter.requires_grad)
    buffers = [(key, buffer) for key, buffer in module._buffers.items() if buffer is not None]
    module._buffers.update((key, torch.empty_like(buffer, device=device)) for key, buffer in buffers)
    with torch.no_grad():
        if initialize is not None:
            initialize(module)
        elif callable(reset := getattr(module, "reset_parameters", None)):
            reset()
        else:
            raise UsageError(
                f"{name or 'the module'} ({type(module).__name__}) is on the meta device and has no "
                "reset_parameters(); give initialize=, a function that fills the parameters and buffers of the one "
                "module it is called with"
            )


class Retired(nn.Parameter):
    """A parameter as it was before sharding, whose place a shard has taken. Nothing trains it any more."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        raise UsageError(
            f"{name_of(func)} of a parameter as it was before sharding; build the optimizer after "
            "FullyShardedDataParallel, from its parameters(), and use those elsewhere, too"
        )


def _retire(parameter: nn.Parameter) -> None:
    if not parameter.is_meta:
        parameter.data = parameter.data.new_empty(0)
    if type(parameter) is nn.Parameter:
        parameter.__class__ = Retired


def _shard(entry: PlannedParameter, full: nn.Parameter, ranks: Ranks, device: torch.device) -> ShardedParameter:
    values, shape, padded_shape, rows = full.detach().to(device), full.shape, full.shape, None
    broadcast_from_first([values], ranks.everyone)
    if values.dim() >= 2 and values.numel() > 0:
        rows, padded_shape = cut_rows(shape, ranks.shard.rank(), ranks.shard.size())
        values = values[rows]
    shard = nn.Parameter(values.clone(memory_format=torch.contiguous_format), requires_grad=full.requires_grad)
    shard.__dict__.update(vars(entry.parameter))  # marks that users set on parameters
    hooks = [("register_hook", hook) for hook in (entry.parameter._backward_hooks or {}).values()]
    accumulated = entry.parameter._post_accumulate_grad_hooks or {}
    hooks += [("register_post_accumulate_grad_hook", hook) for hook in accumulated.values()]
    _retire(entry.parameter)
    divided = rows if ranks.shard.size() > 1 else None
    slots = [(weakref.ref(module), attribute) for module, attribute in entry.slots]
    return ShardedParameter(entry.names, slots, shard, shape, padded_shape, rows, hooks=hooks, divided=divided)
