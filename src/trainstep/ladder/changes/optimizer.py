"""The optimizer's update in one kernel."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from trainstep.base import advice
from trainstep.ladder.change import Change, Settings, give
from trainstep.ladder.patch import arguments, place_of
from trainstep.ladder.trial.trial import Trial


def fused_optimizers(trial: Trial) -> None:
    """Optimizers that are asked neither for `fused` nor for `foreach`, `capturable` or `differentiable`."""
    from trainstep.ladder.trial.settings import FUSED as KINDS

    other = ("fused", "foreach", "capturable", "differentiable")
    for kind in KINDS:
        give(kind, lambda given: {"fused": True} if all(given.get(name) in (None, False) for name in other) else {})


def _is_set(optimizer: Mapping[str, Any]) -> bool:
    return bool(optimizer["fused"] or optimizer["foreach"])


def _without_fused_form(settings: Settings) -> str:
    own = [each for each in settings["optimizers"] if _is_set(each)]
    known = [each for each in settings["optimizers"] if "file" in each]
    if own and len(own) == len(settings["optimizers"]):
        names = " and ".join(f"{name}=True" for name in ("fused", "foreach") if any(each[name] for each in own))
        return f"the script sets it itself: {names}"
    return "" if known else "its optimizers have no fused form in torch"


def _places(settings: Settings, script: Path) -> Iterable[Mapping[str, Any]]:
    return [place_of(each) for each in settings["optimizers"] if not _is_set(each)]


FUSED = Change(
    "fused optimizer",
    advice.FUSED_OPTIMIZER,
    {"script": 1.14, "cuda": 1.2, "cpu": 1.15},
    answers=("kernels.optimizer-unfused", "memory.optimizer"),
    step={"optimizer": "adamw-fused"},
    step_if=lambda source, base: base.optimizer != "sgd",
    script=fused_optimizers,
    phase="optimizer",
    why_not=_without_fused_form,
    write=arguments({"fused": True}, lambda place: place["class"], _places),
)
