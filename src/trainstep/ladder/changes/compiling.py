"""torch.compile: of the blocks, of the whole model, and for any size."""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable
from typing import Any

from trainstep.base import advice
from trainstep.base.advice import Line
from trainstep.ladder.change import UNCALLED, Change, Settings, without_blocks
from trainstep.ladder.patch import Files, Place, Writer, before_optimizer, with_arguments
from trainstep.ladder.trial.trial import Trial

_ANSWERS = ("launches.bound", "launches.script", "kernels.unfused", "kernels.idle")


def compiled_blocks(trial: Trial) -> None:
    """The repeated blocks of every model that is called in training are compiled in place."""

    def change(module: Any) -> None:
        from trainstep.step.blocks import find_blocks

        for block in find_blocks(module):
            block.compile()

    trial.on_first_call.append(change)


def compiled_models(trial: Trial) -> None:
    """Every model that is called in training is compiled in place."""
    trial.on_first_call.append(lambda module: module.compile())


IN_GRAPHS = {"mode": "reduce-overhead"}
"""Without the option that leaves out graphs of code for any size: torch 2.11 divides all code into parts with it, each
with a graph of its own, and gained nothing by them (minGPT on an H200: 17.2 ms, and 6.8 without the option)."""


def models_in_graphs(trial: Trial) -> None:
    """Models that the script compiles, or all that are called in training where it compiles none, replay their
    kernels from CUDA graphs."""
    calls: list[bool] = []
    original = _compile_with(IN_GRAPHS, calls)

    def change(module: Any) -> None:
        if not calls:
            module._compiled_call_impl = original(module._call_impl, **IN_GRAPHS)  # as its `compile` does

    trial.on_first_call.append(change)


def any_sizes(trial: Trial) -> None:
    """Compile what the script compiles once for all sizes that change, and not for each."""
    _compile_with({"dynamic": True}, [])


def _compile_with(further: dict[str, Any], calls: list[bool]) -> Callable[..., Any]:
    """Give torch.compile further arguments and note each call of the script's; return torch's own function."""
    import torch

    original = torch.compile

    @functools.wraps(original)
    def compiled(*args: Any, **kwargs: Any) -> Any:
        calls.append(True)
        return original(*args, **{**kwargs, **further})

    torch.compile = compiled  # what nn.Module.compile calls, too
    return original


def _write_mode(files: Files, place: Place) -> bool:
    """Edit the script's own call of torch.compile; write one where there is none."""
    called = ["torch.compile", *(f"{name}.compile" for name in place.get("names", []))]
    named: list[ast.expr] = []  # also where there is no call, as in a decorator

    def change(text: str, tree: ast.Module) -> str | None:
        named.extend(n for n in ast.walk(tree) if isinstance(n, ast.Attribute) and ast.unparse(n) in called)
        calls = [n for n in ast.walk(tree) if isinstance(n, ast.Call) and n.func in named]
        return with_arguments(text, calls[0], IN_GRAPHS) if len(named) == len(calls) == 1 else None

    return files.edit(place["file"], change) or (not named and _WRITE_CALL.write(files, place))


def _compiles(settings: Settings) -> str:
    if not settings["models"]:
        return UNCALLED
    return "the script sets it itself" if any(model["is_compiled"] for model in settings["models"]) else ""


BLOCKS = Change(
    "compiled blocks",
    advice.COMPILED_BLOCKS,
    {"script": 1.17, "cuda": 1.17, "cpu": 1.05},
    answers=_ANSWERS,
    step={"compile": "blocks"},
    script=compiled_blocks,
    why_not=lambda settings: without_blocks(settings) or _compiles(settings),
)
MODEL = Change(
    "compiled model",
    advice.COMPILED_MODEL,
    {"script": 1.16, "cuda": 1.16},
    answers=_ANSWERS,
    step={"compile": "model"},
    script=compiled_models,
    why_not=_compiles,
    instead_of=("compiled blocks", "fused loss"),
    write=before_optimizer("{}.compile()"),
)
_WRITE_CALL = before_optimizer(advice.IN_GRAPHS.code.replace("model", "{}"))
MODEL_GRAPHS = Change(
    "compiled model with CUDA graphs",
    advice.IN_GRAPHS,
    {"script": 1.155},
    answers=_ANSWERS,
    script=models_in_graphs,
    why_not=lambda settings: "" if settings["models"] else UNCALLED,
    where=("cuda",),
    instead_of=("compiled model", "compiled blocks", "fused loss"),
    phase="launches",
    write=Writer(_WRITE_CALL.places, _write_mode),
)
GRAPH = Change(
    "CUDA graph",
    Line("torch.cuda.graph(…)", "around forward, loss, backward and update; replay() is then a step"),
    {"cuda": 1.15},
    answers=_ANSWERS,
    step={"graph": "step"},
)
ANY_SIZE = Change(
    "compiled for any size",
    Line("torch.compile(…, dynamic=True)", "where what is given to compiled code has another size in each step"),
    {"script": 1.15},
    script=any_sizes,
    why_not=lambda settings: "" if settings["recompiles"] else "nothing is compiled again after the first step",
)
