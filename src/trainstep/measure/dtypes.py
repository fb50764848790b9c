"""Dtypes that everything really had: each module's parameters, inputs, outputs and gradients, the result and the loss.

Autocast decides per operation, so what ran in which dtype is not in the configuration; it is read here off the tensors
as they pass. An activation's gradient needs no column of its own: autograd gives it the activation's dtype.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from trainstep.rows import DtypeRow
from trainstep.step.blocks import without_numbers

_SHORT_NAMES = {torch.float64: "fp64", torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}


def short_name(dtype: torch.dtype) -> str:
    """`fp32`, `bf16`, `int64` …"""
    return _SHORT_NAMES.get(dtype, str(dtype).removeprefix("torch."))


@dataclass(frozen=True)
class ModuleDtypes:
    """A module's dtypes, each a tuple of the different ones in the order seen; empty where it has or got none."""

    name: str  # dotted, as in `named_modules`; empty for the root
    kind: str  # its class
    parameters: tuple[str, ...]  # of the parameters it holds itself, not its children's
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    gradients: tuple[str, ...]  # of the same parameters, after backward
    cuda_outputs: tuple[str, ...] = ()  # by autocast's rules for CUDA, of a step that ran elsewhere


@dataclass(frozen=True)
class StepDtypes:
    modules: tuple[ModuleDtypes, ...]  # every module that was called or holds parameters, in order of definition
    result: tuple[str, ...]  # what forward returned: the logits, usually
    loss: tuple[str, ...]
    cuda_result: tuple[str, ...] = ()
    cuda_loss: tuple[str, ...] = ()
    not_computed: str | None = None  # why what CUDA would return is not known

    def with_cuda(self, other: StepDtypes) -> StepDtypes:
        """These, with what the other has as outputs for those on CUDA."""
        outputs = {each.name: each.outputs for each in other.modules}
        modules = tuple(replace(each, cuda_outputs=outputs.get(each.name, ())) for each in self.modules)
        return replace(self, modules=modules, cuda_result=other.result, cuda_loss=other.loss)


class DtypeWatch:
    """Watches a module's calls, and the functions around it that make the result and the loss.

    Wrap the functions with `result_of` and `loss_of`, run forward and backward of eager code inside `with watch:`
    leaving the gradients in place, then read `watch.found()`. Entered again it begins anew.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._seen: defaultdict[tuple[str, str], dict[str, None]] = defaultdict(dict)  # (of what, module) → dtypes
        self._hooks = ExitStack()

    def result_of(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """`forward`, with the dtypes of what it returns noted."""
        return self._noting(forward, "result")

    def loss_of(self, loss: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """`loss`, with its dtype noted."""
        return self._noting(loss, "loss")

    def _noting(self, function: Callable[..., Any], what: str) -> Callable[..., Any]:
        def noted(*args: Any) -> Any:
            value = function(*args)
            self._seen[what, ""].update(_dtypes(value))
            return value

        return noted

    def __enter__(self) -> DtypeWatch:
        self._seen.clear()
        for name, module in self._module.named_modules():
            handle = module.register_forward_hook(partial(self._note, name), with_kwargs=True)
            self._hooks.callback(handle.remove)
        return self

    def __exit__(self, *error: object) -> None:
        self._hooks.close()

    def _note(self, name: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        self._seen["inputs", name].update(_dtypes((args, kwargs)))
        self._seen["outputs", name].update(_dtypes(output))

    def found(self) -> StepDtypes:
        """All that was seen, with the gradients that the parameters hold now."""
        modules = []
        for name, module in self._module.named_modules():
            own = list(module.parameters(recurse=False))
            inputs, outputs = tuple(self._seen["inputs", name]), tuple(self._seen["outputs", name])
            if own or inputs or outputs:
                gradients = tuple(_dtypes([parameter.grad for parameter in own]))
                kind = type(module).__name__
                modules.append(ModuleDtypes(name, kind, tuple(_dtypes(own)), inputs, outputs, gradients))
        return StepDtypes(tuple(modules), tuple(self._seen["result", ""]), tuple(self._seen["loss", ""]))


def _dtypes(value: Any) -> dict[str, None]:
    """The different dtypes of the tensors anywhere in `value`, in order; also in the fields of a result object."""
    found: dict[str, None] = {}
    for leaf in tree_leaves(value):
        if isinstance(leaf, Tensor):
            found[short_name(leaf.dtype)] = None
        elif hasattr(leaf, "__dict__") and not isinstance(leaf, (nn.Module, type)) and not callable(leaf):
            found |= {short_name(each.dtype): None for each in vars(leaf).values() if isinstance(each, Tensor)}
    return found


def module_rows(modules: Sequence[ModuleDtypes], own: Mapping[str, Any]) -> Iterator[DtypeRow]:
    """A row for every module, or group of alike modules, each with `own` columns."""
    for module, count in alike(modules):
        yield DtypeRow(
            **own,
            module=module.name or "(root)",
            class_name=module.kind,
            modules=count,
            parameters=module.parameters or None,
            inputs=module.inputs or None,
            outputs=module.outputs or None,
            gradients=module.gradients or None,
            cuda_outputs=module.cuda_outputs or None,
        )


def alike(modules: Sequence[ModuleDtypes]) -> list[tuple[ModuleDtypes, int]]:
    """Modules whose names differ in numbers only and whose dtypes are the same, as one, with their count.

    `blocks.0.norm` and `blocks.1.norm` become `blocks.*.norm`, ×2; a single module keeps its name.
    """
    groups: dict[ModuleDtypes, list[ModuleDtypes]] = {}
    for module in modules:
        groups.setdefault(replace(module, name=without_numbers(module.name)), []).append(module)
    return [(group if len(members) > 1 else members[0], len(members)) for group, members in groups.items()]
