"""Debugging that was left on, off."""

from __future__ import annotations

import ast
from typing import Any

from trainstep.base.advice import Line
from trainstep.ladder.change import Change
from trainstep.ladder.patch import Files, Place, Writer, place_of, replaced
from trainstep.ladder.trial.trial import Trial
from trainstep.observe.habits import REVERSIBLE, setting_values


def without_debugging(trial: Trial) -> None:
    """Anomaly detection, deterministic algorithms and checks of collectives stay off, whatever the script asks for."""
    import torch
    import torch.distributed

    owners: dict[str, Any] = dict.fromkeys(("set_anomaly_enabled", "use_deterministic_algorithms"), torch)
    if torch.distributed.is_available():
        owners |= dict.fromkeys(("set_debug_level", "set_debug_level_from_env"), torch.distributed)
        owners["set_debug_level"].set_debug_level(owners["set_debug_level"].DebugLevel.OFF)
    for name, owner in owners.items():
        setattr(owner, name, lambda *_, **__: None)


def _write(files: Files, place: Place) -> bool:
    """False in the place of True."""

    def change(text: str, tree: ast.Module) -> str | None:
        value = setting_values(tree, place["name"]).get(place["line"])
        return replaced(text, value, "False") if isinstance(value, ast.Constant) and value.value is True else None

    return files.edit(place["file"], change)


OFF = Change(
    "no debugging",
    Line("torch.autograd.set_detect_anomaly(False)", "and the like, where the script left debugging on"),
    {"script": 2.0},
    answers=tuple(f"script.{name}" for name in REVERSIBLE),
    script=without_debugging,
    why_not=lambda settings: "" if settings["debugging"] else "no setting for debugging is on",
    write=Writer(lambda settings, script: [{**place_of(each), **each} for each in settings["debugging"]], _write),
)
