"""The folder of a run: what may start in it, and where it goes on from. Nothing there is ever overwritten."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from trainstep.errors import UsageError
from trainstep.train.checkpoints import Checkpoint, open_checkpoint, set_aside, steps_in, tidy
from trainstep.train.config import Scalar, differences

RUN = "run.json"
"""What the run is: written once, at its start."""
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


def open_folder(out: Path, identity: Mapping[str, Scalar], *, steps: int, resume_from: str | None) -> Start:
    """Find out where the run in `out` is, or begin one there. For one process; it alone changes the folder.

    Raises:
        UsageError: the folder holds another run or something else, cannot be written, or its newest checkpoint is
            damaged; or `resume_from` is no checkpoint of it.
    """
    checkpoints = out / "checkpoints"
    if not (out / RUN).exists():
        _begin(out, identity, resume_from)
        return Start(is_new=True, checkpoint=None)
    try:
        theirs = json.loads((out / RUN).read_text(encoding="utf-8"))["identity"]
    except (OSError, ValueError, KeyError) as error:
        raise UsageError(f"{out / RUN} cannot be read ({error}); choose another --out") from error
    _check_same(out, identity, theirs)
    tidy(checkpoints)
    found = steps_in(checkpoints)
    aside: list[str] = []
    checkpoint: Checkpoint | None
    if resume_from is not None:
        chosen = Path(resume_from).name
        if chosen not in [f"step-{step:08d}" for step in found]:
            names = ", ".join(f"step-{step:08d}" for step in found) or "none"
            raise UsageError(f"--resume-from is {resume_from!r}; the checkpoints in {checkpoints} are: {names}")
        checkpoint = open_checkpoint(checkpoints, int(chosen.removeprefix("step-")))
        aside = set_aside(checkpoints, checkpoint.step)
        if aside:
            (out / RESULTS).unlink(missing_ok=True)
    else:
        checkpoint = open_checkpoint(checkpoints, found[-1]) if found else None
    if checkpoint is None:
        return Start(is_new=False, checkpoint=None)
    _check_same(checkpoint.path, identity, checkpoint.note.get("identity", {}))
    finished = checkpoint.step == steps and (out / RESULTS).exists()
    return Start(is_new=False, checkpoint=checkpoint, is_finished=finished, aside=tuple(aside))


@contextmanager
def locked(out: Path) -> Iterator[None]:
    """Keep other processes of this host out of the folder.

    Raises:
        UsageError: another process trains here, or the folder cannot be made.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(out, os.O_RDONLY)
    except OSError as error:
        raise UsageError(f"cannot make the folder {out}: {error.strerror}; choose another with --out") from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        raise UsageError(f"another process is training in {out}; wait for it, or choose another --out") from error
    try:
        yield
    finally:
        os.close(descriptor)


def check_shared(out: Path) -> None:
    """Raise `UsageError` where this rank does not see the folder that rank 0 made."""
    if not (out / RUN).exists():
        raise UsageError(f"{out / RUN}, which rank 0 has, is not here; give an --out that all hosts share")


def _begin(out: Path, identity: Mapping[str, Scalar], resume_from: str | None) -> None:
    if resume_from is not None:
        raise UsageError(f"--resume-from is {resume_from!r}, but {out} holds no run to go on with")
    if out.exists() and any(out.iterdir()):
        names = ", ".join(sorted(path.name for path in out.iterdir())[:3])
        raise UsageError(f"{out} holds no run but other files ({names}); choose a new folder with --out")
    try:
        (out / "checkpoints").mkdir(parents=True)
        temporary = out / f".{RUN}"
        temporary.write_text(json.dumps({"identity": dict(identity)}, indent=1), encoding="utf-8")
        temporary.rename(out / RUN)
    except OSError as error:
        raise UsageError(f"cannot write to {out}: {error.strerror}; choose another folder with --out") from error


def _check_same(where: Path, mine: Mapping[str, Scalar], theirs: Mapping[str, Scalar]) -> None:
    if found := differences(mine, theirs):
        raise UsageError(
            f"{where} is of another run (its own → asked for): {'; '.join(found)}. Go on with its own settings, or "
            "start a new run with another --out"
        )
