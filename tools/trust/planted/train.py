"""What `train` holds its ranks to: they must be started alike and build the same model. Ranks that differ, and ranks
that only look so.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

from tests.train import runs
from tools.trust.planted.parallel import CONFIG, MODEL
from trainstep.base.errors import UsageError
from trainstep.base.schemes import SCHEMES
from trainstep.parallel.process import Process
from trainstep.parallel.replicas import build
from trainstep.step.workload import builtin_source

TRAINED = ("ddp", "sharded-optimizer", "fsdp")
"""The schemes of `train` that communicate."""


def _reordered(module: nn.Module) -> None:
    first = module.blocks[0].attention  # type: ignore[union-attr, index]
    first.query, first.key = first._modules.pop("query"), first._modules.pop("key")  # the same names, at the end


def _other_weights(module: nn.Module) -> None:
    for parameter in module.parameters():
        parameter.data.normal_()


BUILT: dict[str, Callable[[nn.Module], object]] = {
    "a parameter that rank 1 does not train": lambda module: next(module.parameters()).requires_grad_(False),
    "a layer in another dtype on rank 1": lambda module: module.head.bfloat16(),  # type: ignore[union-attr]
    "a bias that only rank 1 has": lambda module: setattr(module, "head", nn.Linear(MODEL.d_model, MODEL.vocab_size)),
    "parameters in another order on rank 1": _reordered,
    "a layer under another name on rank 1": lambda module: setattr(module, "top", module._modules.pop("head")),
    "a block less on rank 1": lambda module: module.blocks.__delitem__(1),  # type: ignore[union-attr]
    "a wider layer on rank 1": lambda module: setattr(module, "head", nn.Linear(MODEL.d_model, 300, bias=False)),
}
"""What it is → what rank 1 does to its model."""
STARTED: dict[str, dict[str, Any]] = {
    "learning rate × 10 on rank 1": {"step": {"learning_rate": 3e-2}},
    "another seed on rank 1": {"step": {"seed": 5}},
    "another precision on rank 1": {"step": {"precision": "bf16"}},
    "one step less on rank 1": {"steps": 1},
    "no weight decay on rank 1": {"weight_decay": 0.0},
    "no clipping of gradients on rank 1": {"clip_norm": math.inf},
    "passes of one sequence on rank 1": {"step": {"batch": 1}},
    "other text on rank 1": {"data": Path(__file__)},
}
"""What it is → the settings that rank 1 is started with."""
WRONG = (*BUILT, *STARTED)
BUILT_RIGHT: dict[str, Callable[[nn.Module], object]] = {
    "the same model": lambda module: None,
    "other weights on rank 1, which rank 0's replace": _other_weights,
}
STARTED_RIGHT: dict[str, dict[str, Any]] = {
    "started alike": {},
    "the same text by another path on rank 1": {"data": runs.TEXT.parent / ".." / "model" / runs.TEXT.name},
}
RIGHT = (*BUILT_RIGHT, *STARTED_RIGHT)


def refused(process: Process, what: str, scheme: str, folder: Path) -> bool:
    """Whether the ranks are refused before the first step. All ranks call it.

    Args:
        folder: where nothing is, for the run.
    """
    try:
        if what in BUILT | BUILT_RIGHT:
            workload = builtin_source("little", MODEL).build(CONFIG)
            if process.rank == 1:
                (BUILT | BUILT_RIGHT)[what](workload.module)
            build(SCHEMES[scheme], process, CONFIG, workload.module, workload.optimizer)
        else:
            _train(process, (STARTED | STARTED_RIGHT)[what] if process.rank == 1 else {}, scheme, folder)
    except UsageError:
        return True
    return False


def _train(process: Process, mine: dict[str, Any], scheme: str, folder: Path) -> None:
    """Two updates."""
    given = {"steps": 2, "scheme": scheme, "data": runs.TEXT} | mine
    data = given.pop("data")
    runs.on_rank(process, runs.config(**given), folder, data=data)
