"""Which parameters are gathered together, and whose call needs them.

A *unit* is a module whose call needs its parameters gathered: each block (an element of a ModuleList), and outside the
blocks the largest modules that contain none. Containers that are never called themselves, and Sequentials, are looked
into. A parameter of several units (a tied weight) forms a group of its own with those that share its units.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from torch import nn

from trainstep.blocks import find_blocks, is_called
from trainstep.errors import UsageError


@dataclass(eq=False)
class PlannedParameter:
    """One parameter and the places it is used from."""

    parameter: nn.Parameter
    names: list[str] = field(default_factory=list)
    """All its names; more than one if it is tied."""
    slots: list[tuple[nn.Module, str]] = field(default_factory=list)
    """(module, attribute) for each name."""
    units: list[nn.Module] = field(default_factory=list)


@dataclass(eq=False)
class PlannedGroup:
    """Parameters that are gathered together, for the calls of `units`."""

    units: list[nn.Module]
    parameters: list[PlannedParameter]


def plan_groups(root: nn.Module, chosen: Iterable[nn.Module] | None = None) -> list[PlannedGroup]:
    """The groups of a module's parameters, in order of definition.

    Args:
        root: the module to shard.
        chosen: modules that each form a unit; by default the blocks.

    Raises:
        UsageError: a chosen module is not inside `root`, or has no `forward` that would be called.
    """
    unit_of = _units(root, _checked(root, chosen))
    planned: dict[int, PlannedParameter] = {}
    for prefix, module in root.named_modules():
        for attribute, parameter in module._parameters.items():
            if parameter is None:
                continue
            found = planned.setdefault(id(parameter), PlannedParameter(parameter))
            found.names.append(f"{prefix}.{attribute}" if prefix else attribute)
            found.slots.append((module, attribute))
            if unit_of[module] not in found.units:
                found.units.append(unit_of[module])
    groups: dict[tuple[int, ...], PlannedGroup] = {}
    for parameter in planned.values():
        key = tuple(sorted(id(unit) for unit in parameter.units))
        groups.setdefault(key, PlannedGroup(parameter.units, [])).parameters.append(parameter)
    return list(groups.values())


def _checked(root: nn.Module, chosen: Iterable[nn.Module] | None) -> set[nn.Module]:
    if chosen is None:
        return set(find_blocks(root))
    inside = {module: name for name, module in root.named_modules()}
    chosen = list(chosen)
    for module in chosen:
        if module not in inside:
            raise UsageError(
                f"groups has a {type(module).__name__} that is not part of the module; "
                "give modules found by module.modules()"
            )
        if not is_called(module):
            raise UsageError(
                f"groups has {inside[module] or 'the module itself'}, a {type(module).__name__}, which is never "
                "called; give the modules inside it"
            )
    return set(chosen)


def _units(root: nn.Module, chosen: set[nn.Module]) -> dict[nn.Module, nn.Module]:
    """Every module's unit."""
    around_chosen = {module for module in root.modules() if any(inner in chosen for inner in module.modules())}
    units: dict[nn.Module, nn.Module] = {}

    def visit(module: nn.Module, unit: nn.Module, whole: bool) -> None:
        if module in units:
            return  # a module used in several places keeps the unit of the first
        if module in chosen:
            unit, whole = module, True
        elif not whole:
            if is_called(module):
                unit = module
            whole = not (
                module is root or module in around_chosen or isinstance(module, nn.Sequential) or not is_called(module)
            )
        units[module] = unit
        for child in module.children():
            visit(child, unit, whole)

    visit(root, root, False)
    return units
