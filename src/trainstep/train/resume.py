"""Where a run goes on from, chosen from what its folder holds and what was asked. Looks at no file itself."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from trainstep.errors import UsageError
from trainstep.train.checkpoints import name_of


@dataclass(frozen=True)
class Found:
    """What a folder holds of a run that has made an update."""

    steps: tuple[int, ...] = ()
    """The updates that its checkpoints were taken after, oldest first."""
    resumed_from: str | None = None
    """What the command that wrote the newest checkpoint had been told to go back to; None where that one is damaged."""
    has_results: bool = False
    """Whether the run came to its end."""


@dataclass(frozen=True)
class Asked:
    """What the command says."""

    steps: int
    """Updates in all."""
    resume_from: str | None = None
    """A checkpoint's name to go back to; None for the newest."""
    is_restart: bool = False
    """Whether torchrun gives the command a second time, because a worker died. If it went back to `resume_from` before,
    it does not again, and what was saved since is gone on from."""


@dataclass(frozen=True)
class Choice:
    """Where to go on."""

    step: int | None
    """The update that the checkpoint to load was taken after; None: begin with the first update."""
    later: tuple[int, ...] = ()
    """Those of newer checkpoints, which are in the way."""
    is_finished: bool = False
    """Everything is there already."""


def choose(found: Found | None, asked: Asked, out: Path) -> Choice:
    """The newest checkpoint, or the one that was named.

    Args:
        found: the run; None where there is none yet.
        asked: what the command says.
        out: the folder, for messages.

    Raises:
        UsageError: a checkpoint was named that is not there.
    """
    if found is None:
        if asked.resume_from is not None:
            raise UsageError(
                f"--resume-from is {asked.resume_from!r}, but {out} holds no run to go on with; leave it out to begin "
                "one, or give the --out of the run that is meant"
            )
        return Choice(None)
    went_back = asked.is_restart and found.resumed_from == asked.resume_from
    if asked.resume_from is not None and not went_back:
        names = {name_of(step): step for step in found.steps}
        if Path(asked.resume_from).name not in names:
            there = f"the checkpoints in {out} are: {', '.join(names) or 'none'}"
            raise UsageError(f"--resume-from is {asked.resume_from!r}; {there}")
        step = names[Path(asked.resume_from).name]
    elif found.steps:
        step = found.steps[-1]
    else:
        return Choice(None)
    later = tuple(each for each in found.steps if each > step)
    return Choice(step, later, is_finished=step == asked.steps and found.has_results and not later)
