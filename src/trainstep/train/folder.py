"""The folder of a run: what may start in it, and where it goes on from. No other run, and no file of another's, is ever
touched there."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from trainstep.errors import UsageError
from trainstep.held_folder import LOCK
from trainstep.report.records import Scalar
from trainstep.train.checkpoints import Checkpoint, name_of, open_checkpoint, set_aside, steps_in, tidy
from trainstep.train.config import differences
from trainstep.train.metrics import read_metrics

RUN = "run.json"
"""What the run is: written once, at its start."""
_DRAFT = f".{RUN}"
CHECKPOINTS = "checkpoints"
METRICS = "metrics.jsonl"
RESULTS = "results.jsonl"
"""Written at the run's end, and so the sign of it."""


@dataclass(frozen=True)
class Start:
    """Where a run starts or goes on."""

    is_new: bool
    checkpoint: Checkpoint | None
    """None: from the first step."""
    is_finished: bool = False
    """Everything is there already."""
    aside: tuple[str, ...] = ()
    """Later checkpoints that were renamed."""


def open_folder(
    out: Path, identity: Mapping[str, Scalar], *, steps: int, resume_from: str | None, is_restart: bool = False
) -> Start:
    """Find out where the run in `out` is, or begin one there. For one process; it alone changes the folder.

    Args:
        out: the folder.
        identity: what the run's curve depends on.
        steps: updates in all.
        resume_from: a checkpoint's name to go back to; None for the newest.
        is_restart: whether torchrun gives the command a second time, because a worker died. If it went back to
            `resume_from` before, it does not again, and what was saved since is gone on from.

    Raises:
        UsageError: the folder holds another run or something else, cannot be written, or its newest checkpoint is
            damaged; or `resume_from` is no checkpoint of it.
    """
    checkpoints = out / CHECKPOINTS
    if not (out / RUN).exists() or not _has_trained(out):
        _begin(out, identity, resume_from)
        return Start(is_new=True, checkpoint=None)
    try:
        theirs = json.loads((out / RUN).read_text(encoding="utf-8"))["identity"]
    except (OSError, ValueError, KeyError) as error:
        raise UsageError(f"{out / RUN} cannot be read ({error}); choose another --out") from error
    _check_same(out, identity, theirs)
    tidy(checkpoints)
    by_name = {name_of(step): step for step in steps_in(checkpoints)}
    if is_restart and resume_from is not None and _went_back(checkpoints, resume_from):
        resume_from = None
    if resume_from is not None:
        chosen = by_name.get(Path(resume_from).name)
        if chosen is None:
            names = ", ".join(by_name) or "none"
            raise UsageError(f"--resume-from is {resume_from!r}; the checkpoints in {checkpoints} are: {names}")
    elif by_name:
        chosen = max(by_name.values())
    else:
        return Start(is_new=False, checkpoint=None)
    checkpoint = open_checkpoint(checkpoints, chosen)
    _check_same(checkpoint.path, identity, checkpoint.note.get("identity", {}))
    if chosen < max(by_name.values()):
        (out / RESULTS).unlink(missing_ok=True)  # before its checkpoint is, or what goes on would look finished
    aside = set_aside(checkpoints, chosen)
    finished = chosen == steps and (out / RESULTS).exists()
    return Start(is_new=False, checkpoint=checkpoint, is_finished=finished, aside=tuple(aside))


def _went_back(checkpoints: Path, resume_from: str) -> bool:
    """Whether the newest checkpoint was written after this command had gone back to the one it names."""
    newest = steps_in(checkpoints)[-1:]
    try:
        return any(open_checkpoint(checkpoints, step).note.get("resumed_from") == resume_from for step in newest)
    except UsageError:  # damaged: that is why an older one is named
        return False


def check_not_of_others(out: Path) -> None:
    """Raise `UsageError` where the folder holds no run but something else. It leaves the folder as it is."""
    if (out / RUN).exists() or not out.is_dir():
        return
    if others := sorted({path.name for path in out.iterdir()} - {LOCK, _DRAFT, CHECKPOINTS}):
        raise UsageError(
            f"{out} holds no run but other files ({', '.join(others[:3])}); choose a new folder with --out"
        )


def check_shared(out: Path) -> None:
    """Raise `UsageError` where this rank does not see the folder that rank 0 made."""
    if not (out / RUN).exists():
        raise UsageError(f"{out / RUN}, which rank 0 has, is not here; give an --out that all hosts share")


def _has_trained(out: Path) -> bool:
    """Whether a run got as far as its first update. One that did not, as its settings cannot be run, binds nobody."""
    return bool(steps_in(out / CHECKPOINTS) or read_metrics(out / METRICS))


def _begin(out: Path, identity: Mapping[str, Scalar], resume_from: str | None) -> None:
    if resume_from is not None:
        raise UsageError(f"--resume-from is {resume_from!r}, but {out} holds no run to go on with")
    try:
        (out / CHECKPOINTS).mkdir(parents=True, exist_ok=True)
        tidy(out / CHECKPOINTS)
        (out / _DRAFT).write_text(json.dumps({"identity": dict(identity)}, indent=1), encoding="utf-8")
        (out / _DRAFT).rename(out / RUN)
    except OSError as error:
        raise UsageError(f"cannot write to {out}: {error.strerror}; choose another folder with --out") from error


def _check_same(where: Path, mine: Mapping[str, Scalar], theirs: Mapping[str, Scalar]) -> None:
    if found := differences(mine, theirs):
        raise UsageError(
            f"{where} is of another run (its own → asked for): {'; '.join(found)}. Go on with its own settings, or "
            "start a new run with another --out"
        )
