"""Numbers that are read from the GPU when they are needed, and not where they are made."""

from __future__ import annotations

from trainstep.base.advice import Line
from trainstep.ladder.change import Change, Settings
from trainstep.ladder.trial.trial import Trial

_NO_READS = "no line of the script calls item() of a tensor on a GPU"


def late_reads(trial: Trial) -> None:
    """`item()` of a tensor on a GPU gives a number that is read when it is needed, and `print` waits for none."""
    from trainstep.ladder.places.late_reads import LateReads

    LateReads(trial.places.setdefault(LATE.name, {}).__setitem__).install()


def _reads_nothing(settings: Settings) -> str:
    if not settings["on_gpu"]:
        return "on a CPU nothing waits where a tensor is read"
    return "" if settings["reads"] else _NO_READS


LATE = Change(
    "late reads",
    Line("total += loss.detach()", "in place of loss.item(); .item() and print of it once every so many steps"),
    {"script": 1.08},
    script=late_reads,
    why_not=_reads_nothing,
    nothing=_NO_READS,
)
