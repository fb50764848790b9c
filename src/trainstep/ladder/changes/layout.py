"""Weights of convolutions with their channels last."""

from __future__ import annotations

from trainstep.base.advice import Line
from trainstep.ladder.change import UNCALLED, Change, Settings
from trainstep.ladder.patch import before_optimizer
from trainstep.ladder.trial.trial import Trial


def channels_last(trial: Trial) -> None:
    """Weights of two-dimensional convolutions have their channels last; results follow."""
    import torch

    trial.on_first_call.append(lambda module: module.to(memory_format=torch.channels_last))


def _without_convolutions(settings: Settings) -> str:
    if not settings["models"]:
        return UNCALLED
    convolving = [model for model in settings["models"] if model["convolutions"]]
    if not convolving:
        return "its models have no convolutions in two dimensions"
    return "the script sets it itself" if all(model["is_channels_last"] for model in convolving) else ""


CHANNELS_LAST = Change(
    "channels last",
    Line("model.to(memory_format=torch.channels_last)", "after the model is on its device"),
    {"script": 1.18},
    script=channels_last,
    why_not=_without_convolutions,
    write=before_optimizer("{}.to(memory_format=torch.channels_last)"),
)
