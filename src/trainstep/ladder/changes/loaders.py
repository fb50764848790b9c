"""Batches: pinned memory and workers."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from trainstep.base import advice
from trainstep.base.advice import Line, workers_of
from trainstep.base.cores import cores
from trainstep.ladder.change import Change, Settings, give
from trainstep.ladder.patch import arguments
from trainstep.ladder.trial.trial import Trial
from trainstep.observe.steps import DATA

_NO_LOADER = "the script makes no DataLoader"


def pinned_memory(trial: Trial) -> None:
    """Loaders hand out batches in pinned memory, and copies from there do not wait."""
    import torch
    from torch.utils.data import DataLoader

    give(DataLoader, lambda given: {} if given.get("pin_memory") else {"pin_memory": True})
    for name in ("to", "cuda"):
        original = getattr(torch.Tensor, name)

        def moved(tensor: Any, *args: Any, _original: Any = original, **kwargs: Any) -> Any:
            if not tensor.is_cuda and tensor.is_pinned() and not any(isinstance(each, bool) for each in args):
                kwargs.setdefault("non_blocking", True)
            return _original(tensor, *args, **kwargs)

        setattr(torch.Tensor, name, functools.wraps(original)(moved))


def _pins(settings: Settings) -> str:
    if not settings["loaders"]:
        return _NO_LOADER
    are_pinned = all(loader["pin_memory"] for loader in settings["loaders"])
    return "the script sets it itself: pin_memory=True" if are_pinned else ""


PINNED = Change(
    "pinned memory",
    Line("DataLoader(…, pin_memory=True)", "and batches by .to(device, non_blocking=True)"),
    {"script": 1.12},
    script=pinned_memory,
    why_not=_pins,
    where=("cuda",),
    write=arguments(
        {"pin_memory": True},
        lambda place: "DataLoader",
        lambda settings, script: [each for each in settings["loaders"] if not each["pin_memory"]],
    ),
)


def workers_here() -> int:
    """Number of workers that a loader is given."""
    return workers_of(cores())


def _with_few_workers(settings: Settings) -> list[Mapping[str, Any]]:
    """The loaders that are given more; an IterableDataset that does not divide itself would be repeated by each."""
    return [each for each in settings["loaders"] if each["num_workers"] < workers_here() and not each["is_iterable"]]


def workers(trial: Trial) -> None:
    """Loaders with fewer workers than there may be have as many.

    They stay after an epoch only where the script has it so: those that are started anew see what the script has done
    to the data set since, such as `set_epoch`.
    """
    from torch.utils.data import DataLoader, IterableDataset

    def more(given: dict[str, Any]) -> dict[str, Any]:
        if (given.get("num_workers") or 0) >= workers_here() or isinstance(given.get("dataset"), IterableDataset):
            return {}
        return {"num_workers": workers_here()}

    give(DataLoader, more)


def _has_workers(settings: Settings) -> str:
    if not settings["loaders"]:
        return _NO_LOADER
    if all(loader["num_workers"] >= workers_here() for loader in settings["loaders"]):
        return "the script sets it itself: its loaders have workers"
    return "" if _with_few_workers(settings) else "workers would repeat an IterableDataset that does not divide itself"


LOADER_WORKERS = Change(
    "loader workers",
    advice.loader_workers(workers_here()),
    {"script": 1.1},
    phase=DATA,
    answers=("data.bound", "ranks.late_data"),
    script=workers,
    why_not=_has_workers,
    write=arguments(
        {"num_workers": workers_here()},
        lambda place: "DataLoader",
        lambda settings, script: _with_few_workers(settings),
    ),
)
