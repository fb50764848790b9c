"""Which dtype everything really had: each module's parameters, inputs, outputs and gradients, the result and the loss.

Autocast decides per operation, so what ran in which dtype is not in the configuration; it is read here off the tensors
as they pass. An activation's gradient needs no column of its own: autograd gives it the activation's dtype.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

_SHORT_NAMES = {torch.float64: "fp64", torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}


def short_name(dtype: torch.dtype) -> str:
    """`fp32`, `bf16`, `int64` …"""
    return _SHORT_NAMES.get(dtype, str(dtype).removeprefix("torch."))


@dataclass(frozen=True)
class ModuleDtypes:
    """One module's dtypes, each a tuple of the different ones in the order seen; empty where it has or got none."""

    name: str  # dotted, as in `named_modules`; empty for the root
    kind: str  # its class
    parameters: tuple[str, ...]  # of the parameters it holds itself, not its children's
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    gradients: tuple[str, ...]  # of the same parameters, after backward


@dataclass(frozen=True)
class StepDtypes:
    """What a forward and backward pass showed."""

    modules: tuple[ModuleDtypes, ...]  # every module that was called or holds parameters, in order of definition
    result: tuple[str, ...]  # what forward returned: the logits, usually
    loss: tuple[str, ...]


class DtypeWatch:
    """Watches a module's calls, and the functions around it that make the result and the loss.

    Use: wrap the functions with `result_of` and `loss_of`, run forward and backward inside `with watch:` leaving the
    gradients in place, then read `watch.found()`. Compiled modules run without their hooks' view of what is inside, so
    watch eager code.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._inputs: dict[str, dict[str, None]] = {}
        self._outputs: dict[str, dict[str, None]] = {}
        self._result: dict[str, None] = {}
        self._loss: dict[str, None] = {}
        self._handles: list[torch.utils.hooks.RemovableHandle] = []

    def result_of(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """`forward`, with the dtypes of what it returns noted."""
        return _noting(forward, self._result)

    def loss_of(self, loss: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """`loss`, with its dtype noted."""
        return _noting(loss, self._loss)

    def __enter__(self) -> DtypeWatch:
        for name, module in self._module.named_modules():
            self._handles.append(module.register_forward_hook(self._hook(name), with_kwargs=True))
        return self

    def __exit__(self, *error: object) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _hook(self, name: str) -> Callable[..., None]:
        inputs, outputs = self._inputs.setdefault(name, {}), self._outputs.setdefault(name, {})

        def note(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            inputs.update(_dtypes((args, kwargs)))
            outputs.update(_dtypes(output))

        return note

    def found(self) -> StepDtypes:
        """All that was seen, with the gradients that the parameters hold now."""
        modules = []
        for name, module in self._module.named_modules():
            own = list(module.parameters(recurse=False))
            inputs, outputs = tuple(self._inputs.get(name, ())), tuple(self._outputs.get(name, ()))
            if own or inputs or outputs:
                gradients = tuple(_dtypes([parameter.grad for parameter in own]))
                kind = type(module).__name__
                modules.append(ModuleDtypes(name, kind, tuple(_dtypes(own)), inputs, outputs, gradients))
        return StepDtypes(tuple(modules), tuple(self._result), tuple(self._loss))


def _noting(function: Callable[..., Any], seen: dict[str, None]) -> Callable[..., Any]:
    def noted(*args: Any) -> Any:
        value = function(*args)
        seen.update(_dtypes(value))
        return value

    return noted


def _dtypes(value: Any) -> dict[str, None]:
    """The different dtypes of the tensors anywhere in `value`, in order; also in the fields of a result object."""
    found: dict[str, None] = {}
    for leaf in tree_leaves(value):
        if isinstance(leaf, Tensor):
            found[short_name(leaf.dtype)] = None
        elif hasattr(leaf, "__dict__") and not isinstance(leaf, (nn.Module, type)) and not callable(leaf):
            found |= {short_name(each.dtype): None for each in vars(leaf).values() if isinstance(each, Tensor)}
    return found


@dataclass(frozen=True)
class Accumulation:
    """One way to add 0.01 a thousand times."""

    accumulator: str  # dtype of the running sum
    addend: str  # dtype of 0.01, and what it is cast to before it is added
    total: float
    why: str  # one sentence


def accumulate(steps: int = 1000, addend: float = 0.01) -> list[Accumulation]:
    """Add `addend` `steps` times in four mixtures of float32 and float16, on the CPU."""

    def total(accumulator: torch.dtype, stored: torch.dtype, added: torch.dtype) -> float:
        running = torch.zeros((), dtype=accumulator)
        term = torch.tensor(addend, dtype=stored).to(added)
        for _ in range(steps):
            running += term
        return running.item()

    full, half = torch.float32, torch.float16
    exact = "float32 rounds each sum to 24 bits: a thousand roundings add up to 1e-5 of it."
    coarse = (
        "From 8 on, float16's neighbours are 2^-7 = 0.0078 apart, so adding 0.01 adds 0.0078: the rounding is "
        "the running sum's, and no longer small beside what is added."
    )
    one = "The sum is in float32, so only the addend's one rounding remains: float16's 0.01 is 0.010002136."
    cast = "Casting up brings no digits back: 0.010002136 in float32 is the same number, added the same way."
    return [
        Accumulation("fp32", "fp32", total(full, full, full), exact),
        Accumulation("fp16", "fp16", total(half, half, half), coarse),
        Accumulation("fp32", "fp16", total(full, half, half), one),
        Accumulation("fp32", "fp16 → fp32", total(full, half, full), cast),
    ]
