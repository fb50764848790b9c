"""Settings that a script makes itself of the things that the ladder changes, and the lines where it does."""

from __future__ import annotations

import functools
import inspect
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.utils.checkpoint
from torch import nn
from torch.optim.optimizer import Optimizer
from torch.utils.data import DataLoader, IterableDataset

from trainstep.observe.hooks import parameters_of
from trainstep.observe.lines import place_of_call
from trainstep.observe.modules import is_compiled
from trainstep.step.blocks import find_blocks

FUSED = (torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD, torch.optim.Adagrad)
"""Optimizers of torch that have a fused form on CPUs and GPUs alike."""
ATTENTION, DROPPING = "ScaledDotProduct", ", dropping"
"""In the name of every node of scaled_dot_product_attention's backward; what is added where it drops some."""


class Settings:
    """Collects them while the script runs, until its first update."""

    def __init__(self) -> None:
        self._autocast: list[str] = []
        self._loaders: list[dict[str, Any]] = []
        self._optimizers: dict[int, dict[str, Any]] = {}
        self._models: list[dict[str, Any]] = []
        self._roots: list[nn.Module] = []
        self._operators: set[str] = set()
        self._is_opaque = False
        self._undo: list[Callable[[], None]] = []

    def install(self) -> None:
        """Watch what the script makes; constructors are changed before this, so that it sees the script's own words."""
        self._watch(DataLoader, "__init__", self._loader_is_made)
        for kind in FUSED:
            self._watch(kind, "__init__", self._optimizer_is_made)
        self._watch(torch.autocast, "__enter__", self._autocast_begins)

    def remove(self) -> None:
        """Watch no longer."""
        while self._undo:
            self._undo.pop()()

    def see_model(self, module: nn.Module) -> None:
        """A model is about to be called for the first time, before anything about it is changed."""
        place = place_of_call(sys._getframe(1))
        self._roots.append(module)
        weights = [parameter for parameter in module.parameters() if parameter.requires_grad]
        self._models.append(
            {
                "class": type(module).__name__,
                "file": os.path.realpath(place.file) if place.file else "",
                "line": place.line,
                "device": weights[0].device.type,
                "dtypes": sorted({str(weight.dtype).removeprefix("torch.") for weight in weights}),
                "is_compiled": any(map(is_compiled, module.modules())),
                "is_whole_compiled": any(map(is_compiled, (module, getattr(module, "module", None)))),
                "floats": None,
                "blocks": len(find_blocks(module)),
            }
        )

    def see_results(self, module: nn.Module, results: Any) -> None:
        """Note which of its results are floating-point tensors. A hook of the module's would be compiled with it."""
        self._models[self._roots.index(module)]["floats"] = _floats(results)

    def see_loss(self, tensors: Any) -> None:
        """See the loss that a backward pass begins at, whose graph has the operators of the forward pass."""
        roots = tensors if isinstance(tensors, (tuple, list)) else (tensors,)
        nodes = [each.grad_fn for each in roots if isinstance(each, torch.Tensor)]
        seen = set[Any]()
        while nodes:
            node = nodes.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            self._is_opaque |= "CppNode" in node.name()  # somebody's own
            self._is_opaque |= isinstance(
                node, torch.autograd.function.BackwardCFunction
            )  # somebody's own in Python, or compiled
            drops = bool(getattr(node, "_saved_dropout_p", 0.0)) and ATTENTION in node.name()
            self._operators.add(f"{node.name()}{DROPPING if drops else ''}")
            nodes += [each for each, _ in node.next_functions]

    def found(self, optimizers: list[Optimizer]) -> dict[str, Any]:
        """All of it, as the script's log has it.

        Args:
            optimizers: those that are about to step, or have stepped.
        """
        made = [{"class": type(each).__name__, **self._optimizers.get(id(each), {})} for each in optimizers]
        for each, entry in zip(optimizers, made, strict=True):
            entry |= {name: bool(each.defaults.get(name)) for name in ("fused", "foreach")}
            entry["names"] = self._names(entry.pop("names", {}))
        return {
            "matmul": torch.get_float32_matmul_precision(),
            "autocast": sorted(set(self._autocast)),
            "loaders": self._loaders,
            "optimizers": made,
            "models": self._models,
            "operators": None if self._is_opaque or not self._operators else sorted(self._operators),
            "on_gpu": any(each.is_cuda for each in parameters_of(optimizers)),
            "picks_by_time": torch.backends.cudnn.benchmark,  # its kernels, so that runs beside it change its bits
        }

    def _watch(self, owner: Any, name: str, tell: Callable[..., object]) -> None:
        original = getattr(owner, name)

        @functools.wraps(original)
        def watched(self: Any, *args: Any, **kwargs: Any) -> Any:
            tell(self, *args, **kwargs)
            return original(self, *args, **kwargs)

        setattr(owner, name, watched)
        self._undo.append(lambda: setattr(owner, name, original))

    def _loader_is_made(self, loader: Any, *args: Any, **kwargs: Any) -> None:
        given = arguments_of(DataLoader, args, kwargs)
        place = place_of_call(sys._getframe(2))
        entry = {
            "file": os.path.realpath(place.file) if place.file else "",
            "line": place.line,
            "num_workers": given.get("num_workers", 0) or 0,
            "pin_memory": bool(given.get("pin_memory")),
            "is_iterable": isinstance(given.get("dataset"), IterableDataset),
        }
        if entry not in self._loaders:
            self._loaders.append(entry)

    def _optimizer_is_made(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        frame: Any = sys._getframe(2)
        place = place_of_call(frame)
        while frame is not None and frame.f_code.co_filename != place.file:
            frame = frame.f_back
        known = {**frame.f_globals, **frame.f_locals} if frame is not None else {}
        names = {name: id(value) for name, value in known.items() if isinstance(value, nn.Module)}
        kind = type(optimizer).__name__
        file = os.path.realpath(place.file) if place.file else ""
        self._optimizers[id(optimizer)] = {"class": kind, "file": file, "line": place.line, "names": names}

    def _autocast_begins(self, context: Any) -> None:
        if context._enabled:
            self._autocast.append(str(context.fast_dtype).removeprefix("torch."))

    def _names(self, names: Mapping[str, int]) -> list[str]:
        """Names under which the line that makes the optimizer knows models that are called, one of each."""
        roots = {id(root) for root in self._roots}
        return list({number: name for name, number in names.items() if number in roots}.values())


def arguments_of(kind: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments that a constructor is given, by name; none where they do not fit, which it will say itself."""
    try:
        given = inspect.signature(kind).bind(*args, **kwargs).arguments
    except TypeError:
        return {}
    return {**given, **given.get("kwargs", {})}


def _floats(results: Any) -> list[bool] | None:
    """Say of a model's result, or of each in a tuple or list, whether it is a floating-point tensor; None for
    others."""
    several = results if type(results) in (tuple, list) else (results,)
    if not any(isinstance(each, torch.Tensor) for each in several):
        return None
    return [isinstance(each, torch.Tensor) and each.is_floating_point() for each in several]
