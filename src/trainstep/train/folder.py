"""The folder of a run: what may start in it, where a run goes on from, and what is changed there when it does.

No other run, and no file of another's, is ever touched there.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from trainstep.base.errors import UsageError
from trainstep.base.guards import LOCK
from trainstep.rows.records import Scalar
from trainstep.train.checkpoints import Checkpoint, name_of, open_checkpoint, set_aside, steps_in, tidy
from trainstep.train.config import RunConfig, counted, differences
from trainstep.train.history import METRICS, read_metrics

RUN = "run.json"  # what the run is: written once, at its start
_DRAFT = f".{RUN}"
CHECKPOINTS = "checkpoints"
RESULTS = "results.jsonl"  # written at the run's end, and so the sign of it


@dataclass(frozen=True)
class Start:
    is_new: bool
    checkpoint: Checkpoint | None  # None: from the first step
    is_finished: bool = False
    aside: tuple[str, ...] = ()  # later checkpoints, by the names that they were given

    @property
    def step(self) -> int:
        return 0 if self.checkpoint is None else self.checkpoint.step

    def tokens(self, config: RunConfig) -> int | None:
        """Tokens that the run was trained on so far; None where a workload's batches do not tell."""
        if config.model is not None:
            return self.step * config.tokens_per_update
        return 0 if self.checkpoint is None else self.checkpoint.note["tokens"]

    def describe(self, config: RunConfig, world_size: int, hosts: int, out: Path, parameters: str) -> str:
        """A run's first lines for the terminal: what is trained how, and from where. `parameters` says how many."""
        if self.is_finished:
            return f"the run in {out} is finished: all {config.train.steps} updates are made; nothing to do"
        told = (
            f"{config.name}: {parameters}, {config.train.steps} updates of {config.describe_update(world_size)}, "
            f"{config.scheme(world_size, hosts).label}, {config.step.precision} → {out}"
        )
        if self.checkpoint is not None:
            writers = counted(self.checkpoint.note.get("world_size"), "rank")
            told += f"\nresumed from {self.checkpoint.path.name}, written by {writers}"
            if not self.checkpoint.is_summed:
                told += "; it has no checksums, as it is of an earlier version, so damage to it goes unnoticed"
        elif not self.is_new:
            told += "\nthe run was begun before, but has no checkpoint yet: from the first update again"
        if self.aside:
            told += f"\nset aside: {', '.join(self.aside)}"
        return told


def open_folder(
    out: Path, identity: Mapping[str, Scalar], *, updates: int, resume_from: str | None = None, is_restart: bool = False
) -> Start:
    """Find out where the run in `out` is, or begin one there. For one process; it alone changes the folder.

    A run that never made an update, as its settings cannot be run, counts as none.

    Args:
        identity: what the run's curve depends on.
        updates: that are made in all.
        resume_from: a checkpoint's name to go back to; None for the newest.
        is_restart: whether torchrun gives the command a second time, because a worker died. If it went back to
            `resume_from` before, it does not again, and what was saved since is gone on from.

    Raises:
        UsageError: the folder holds another run, cannot be written, or the checkpoint to go on from is damaged or not
            there. Then nothing was changed.
    """
    steps, rows = steps_in(out / CHECKPOINTS), read_metrics(out / METRICS)
    if not (out / RUN).exists() or not (steps or rows):
        if resume_from is not None:
            raise UsageError(
                f"--resume-from is {resume_from!r}, but {out} holds no run to go on with; leave it out to begin one, "
                "or give the --out of the run that is meant"
            )
        _begin(out, identity)
        return Start(is_new=True, checkpoint=None)
    try:
        theirs = json.loads((out / RUN).read_text(encoding="utf-8"))["identity"]
    except (OSError, ValueError, KeyError) as error:
        raise UsageError(f"{out / RUN} cannot be read ({error}); choose another --out") from error
    _check_same(out, identity, theirs)
    checkpoint, later = None, []
    if (step := _choose(out, steps, resume_from, is_restart)) is not None:
        checkpoint = open_checkpoint(out / CHECKPOINTS, step)
        _check_same(checkpoint.path, identity, checkpoint.note.get("identity", {}))
        later = [each for each in steps if each > step]
    is_finished = step == updates and (out / RESULTS).exists() and not later
    tidy(out / CHECKPOINTS)
    if later:
        (out / RESULTS).unlink(missing_ok=True)  # before its checkpoint is, or what goes on would look finished
    aside = set_aside(out / CHECKPOINTS, later)
    return Start(is_new=False, checkpoint=checkpoint, is_finished=is_finished, aside=tuple(aside))


def check_not_of_others(out: Path) -> None:
    """Raise `UsageError` where the folder holds no run but something else. It leaves the folder as it is."""
    if (out / RUN).exists() or not out.is_dir():
        return
    if others := sorted({path.name for path in out.iterdir()} - {LOCK, _DRAFT, CHECKPOINTS}):
        what = f"no run but other files ({', '.join(others[:3])})"
        raise UsageError(f"{out} holds {what}; choose a new folder with --out")


def check_shared(out: Path) -> None:
    """Raise `UsageError` where this rank does not see the folder that rank 0 made."""
    if not (out / RUN).exists():
        raise UsageError(f"{out / RUN}, which rank 0 has, is not here; give an --out that all hosts share")


def _begin(out: Path, identity: Mapping[str, Scalar]) -> None:
    try:
        (out / CHECKPOINTS).mkdir(parents=True, exist_ok=True)
        tidy(out / CHECKPOINTS)
        (out / _DRAFT).write_text(json.dumps({"identity": dict(identity)}, indent=1), encoding="utf-8")
        (out / _DRAFT).rename(out / RUN)
    except OSError as error:
        raise UsageError(f"cannot write to {out}: {error.strerror}; choose another folder with --out") from error


def _choose(out: Path, steps: Sequence[int], resume_from: str | None, is_restart: bool) -> int | None:
    """The step of the checkpoint to load, the newest or the one that was named; None where there is none."""
    newest = steps[-1] if steps else None
    if resume_from is None:
        return newest
    if is_restart and newest is not None:
        with contextlib.suppress(UsageError):  # damaged: that may be why an older one is named
            if open_checkpoint(out / CHECKPOINTS, newest).note.get("resumed_from") == resume_from:
                return newest
    names = {name_of(each): each for each in steps}
    if (named := names.get(Path(resume_from).name)) is None:
        there = ", ".join(names) or "none"
        raise UsageError(f"--resume-from is {resume_from!r}; the checkpoints in {out} are: {there}")
    return named


def _check_same(where: Path, mine: Mapping[str, Scalar], theirs: Mapping[str, Scalar]) -> None:
    if found := differences(mine, theirs):
        raise UsageError(
            f"{where} is of another run (its own → asked for): {'; '.join(found)}. Go on with its own settings, or "
            "start a new run with another --out"
        )
