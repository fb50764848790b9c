"""torch.compile: of the blocks, of the whole model, and for any size."""

from __future__ import annotations

import functools
from typing import Any

from trainstep.base import advice
from trainstep.base.advice import Line
from trainstep.ladder.change import UNCALLED, Change, Settings, without_blocks
from trainstep.ladder.patch import before_optimizer
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


def any_sizes(trial: Trial) -> None:
    """Compile what the script compiles once for all sizes that change, and not for each."""
    import torch

    original = torch.compile

    @functools.wraps(original)
    def compiled(*args: Any, **kwargs: Any) -> Any:
        return original(*args, **{**kwargs, "dynamic": True})

    torch.compile = compiled  # what nn.Module.compile calls, too


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
ANY_SIZE = Change(
    "compiled for any size",
    Line("torch.compile(…, dynamic=True)", "where what is given to compiled code has another size in each step"),
    {"script": 1.15},
    script=any_sizes,
    why_not=lambda settings: "" if settings["recompiles"] else "nothing is compiled again after the first step",
)
