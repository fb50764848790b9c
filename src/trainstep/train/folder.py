"""The folder of a run: what may start in it, where a run goes on from, and what is changed there when it does.

No other run, and no file of another's, is ever touched there. `choose` decides from what was found and asked, without
looking at a file.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from trainstep.errors import UsageError
from trainstep.guards import LOCK
from trainstep.records import Scalar
from trainstep.train.checkpoints import Checkpoint, name_of, open_checkpoint, set_aside, steps_in, tidy
from trainstep.train.config import RunConfig, differences
from trainstep.train.metrics import METRICS, read_metrics

RUN = "run.json"  # what the run is: written once, at its start
_DRAFT = f".{RUN}"
CHECKPOINTS = "checkpoints"
RESULTS = "results.jsonl"  # written at the run's end, and so the sign of it


@dataclass(frozen=True)
class Asked:
    """What the command says."""

    steps: int  # updates in all
    resume_from: str | None = None  # a checkpoint's name to go back to; None for the newest
    is_restart: bool = False
    """Whether torchrun gives the command a second time, because a worker died. If it went back to `resume_from` before,
    it does not again, and what was saved since is gone on from."""


@dataclass(frozen=True)
class Found:
    """What a folder holds of a run that has made an update."""

    steps: tuple[int, ...] = ()  # the updates that its checkpoints were taken after, oldest first
    resumed_from: str | None = None
    """What the command that wrote the newest checkpoint had been told to go back to; None where that one is damaged."""
    has_results: bool = False  # whether the run came to its end


@dataclass(frozen=True)
class Choice:
    """Where to go on."""

    step: int | None  # the update that the checkpoint to load was taken after; None: begin with the first update
    later: tuple[int, ...] = ()  # those of newer checkpoints, which are in the way
    is_finished: bool = False  # everything is there already: nothing to do


def choose(found: Found | None, asked: Asked, out: Path) -> Choice:
    """The newest checkpoint, or the one that was named; `found` is None where there is no run yet.

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
    step = found.steps[-1] if found.steps else None
    if asked.resume_from is not None and not went_back:
        names = {name_of(each): each for each in found.steps}
        if (step := names.get(Path(asked.resume_from).name)) is None:
            there = f"the checkpoints in {out} are: {', '.join(names) or 'none'}"
            raise UsageError(f"--resume-from is {asked.resume_from!r}; {there}")
    if step is None:
        return Choice(None)
    later = tuple(each for each in found.steps if each > step)
    return Choice(step, later, is_finished=step == asked.steps and found.has_results and not later)


@dataclass(frozen=True)
class Start:
    """Where a run starts or goes on."""

    is_new: bool
    checkpoint: Checkpoint | None  # None: from the first step
    is_finished: bool = False
    aside: tuple[str, ...] = ()  # later checkpoints, by the names that they were given

    @property
    def step(self) -> int:
        return 0 if self.checkpoint is None else self.checkpoint.step

    def describe(self, config: RunConfig, world_size: int, out: Path) -> str:
        """A run's first lines for the terminal: what is trained how, and from where."""
        if self.is_finished:
            return f"the run in {out} is finished: all {config.train.steps} updates are made; nothing to do"
        passes, batch, context = config.passes(world_size), config.step.batch, config.step.context
        how = f"{_counted(world_size, 'rank')} × {passes} pass{'es' if passes > 1 else ''} × batch {batch}"
        told = (
            f"{config.name}: {config.model.num_parameters:,} parameters, {config.train.steps} updates of "
            f"{config.train.global_batch} × {context} tokens ({how}), {config.scheme(world_size).name}, "
            f"{config.step.precision} → {out}"
        )
        if self.checkpoint is not None:
            writers = _counted(self.checkpoint.note.get("world_size"), "rank")
            told += f"\nresumed from {self.checkpoint.path.name}, written by {writers}"
        elif not self.is_new:
            told += "\nthe run was begun before, but has no checkpoint yet: from the first update again"
        if self.aside:
            told += f"\nset aside: {', '.join(self.aside)}"
        return told


def open_folder(out: Path, identity: Mapping[str, Scalar], asked: Asked) -> Start:
    """Find out where the run in `out` is, or begin one there. For one process; it alone changes the folder.

    `identity` is what the run's curve depends on.

    Raises:
        UsageError: the folder holds another run, cannot be written, or the checkpoint to go on from is damaged or not
            there. Then nothing was changed.
    """
    found = _look(out)
    if found is not None:
        try:
            theirs = json.loads((out / RUN).read_text(encoding="utf-8"))["identity"]
        except (OSError, ValueError, KeyError) as error:
            raise UsageError(f"{out / RUN} cannot be read ({error}); choose another --out") from error
        _check_same(out, identity, theirs)
    choice = choose(found, asked, out)
    if found is None:
        try:
            (out / CHECKPOINTS).mkdir(parents=True, exist_ok=True)
            tidy(out / CHECKPOINTS)
            (out / _DRAFT).write_text(json.dumps({"identity": dict(identity)}, indent=1), encoding="utf-8")
            (out / _DRAFT).rename(out / RUN)
        except OSError as error:
            raise UsageError(f"cannot write to {out}: {error.strerror}; choose another folder with --out") from error
        return Start(is_new=True, checkpoint=None)
    checkpoint = None
    if choice.step is not None:
        checkpoint = open_checkpoint(out / CHECKPOINTS, choice.step)
        _check_same(checkpoint.path, identity, checkpoint.note.get("identity", {}))
    tidy(out / CHECKPOINTS)
    if choice.later:
        (out / RESULTS).unlink(missing_ok=True)  # before its checkpoint is, or what goes on would look finished
    aside = set_aside(out / CHECKPOINTS, choice.later)
    return Start(is_new=False, checkpoint=checkpoint, is_finished=choice.is_finished, aside=tuple(aside))


def check_not_of_others(out: Path) -> None:
    """Raise `UsageError` where the folder holds no run but something else. It leaves the folder as it is."""
    if (out / RUN).exists() or not out.is_dir():
        return
    if others := sorted({path.name for path in out.iterdir()} - {LOCK, _DRAFT, CHECKPOINTS}):
        files = ", ".join(others[:3])
        raise UsageError(f"{out} holds no run but other files ({files}); choose a new folder with --out")


def check_shared(out: Path) -> None:
    """Raise `UsageError` where this rank does not see the folder that rank 0 made."""
    if not (out / RUN).exists():
        raise UsageError(f"{out / RUN}, which rank 0 has, is not here; give an --out that all hosts share")


def _look(out: Path) -> Found | None:
    """The run in a folder. One that never made an update, as its settings cannot be run, counts as none."""
    steps = steps_in(out / CHECKPOINTS)
    if not (out / RUN).exists() or not (steps or read_metrics(out / METRICS)):
        return None
    resumed_from = None
    if steps:
        with contextlib.suppress(UsageError):  # damaged: that may be why an older one is named
            resumed_from = open_checkpoint(out / CHECKPOINTS, steps[-1]).note.get("resumed_from")
    return Found(tuple(steps), resumed_from, has_results=(out / RESULTS).exists())


def _check_same(where: Path, mine: Mapping[str, Scalar], theirs: Mapping[str, Scalar]) -> None:
    if found := differences(mine, theirs):
        raise UsageError(
            f"{where} is of another run (its own → asked for): {'; '.join(found)}. Go on with its own settings, or "
            "start a new run with another --out"
        )


def _counted(count: int | None, what: str) -> str:
    return f"{count} {what}{'s' if count != 1 else ''}"
