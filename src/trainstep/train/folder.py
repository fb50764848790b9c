"""The folder of a run: what may start in it, and what is changed there when it does.

No other run, and no file of another's, is ever touched there. Where a run goes on from, `resume.py` chooses.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from trainstep.errors import UsageError
from trainstep.held_folder import LOCK
from trainstep.records import Scalar
from trainstep.train.checkpoints import Checkpoint, open_checkpoint, set_aside, steps_in, tidy
from trainstep.train.config import differences
from trainstep.train.metrics import METRICS, read_metrics
from trainstep.train.resume import Asked, Found, choose

RUN = "run.json"
"""What the run is: written once, at its start."""
_DRAFT = f".{RUN}"
CHECKPOINTS = "checkpoints"
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
    """Later checkpoints, by the names that they were given."""

    @property
    def step(self) -> int:
        """Updates that are made."""
        return 0 if self.checkpoint is None else self.checkpoint.step


def open_folder(out: Path, identity: Mapping[str, Scalar], asked: Asked) -> Start:
    """Find out where the run in `out` is, or begin one there. For one process; it alone changes the folder.

    Args:
        out: the folder.
        identity: what the run's curve depends on.
        asked: what the command says.

    Raises:
        UsageError: the folder holds another run, cannot be written, or the checkpoint to go on from is damaged or not
            there. Then nothing was changed.
    """
    found = _look(out)
    if found is not None:
        _check_same(out, identity, _identity_in(out))
    choice = choose(found, asked, out)
    if found is None:
        _begin(out, identity)
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
        raise UsageError(
            f"{out} holds no run but other files ({', '.join(others[:3])}); choose a new folder with --out"
        )


def check_shared(out: Path) -> None:
    """Raise `UsageError` where this rank does not see the folder that rank 0 made."""
    if not (out / RUN).exists():
        raise UsageError(f"{out / RUN}, which rank 0 has, is not here; give an --out that all hosts share")


def _look(out: Path) -> Found | None:
    """The run in a folder. One that never made an update, as its settings cannot be run, binds nobody and is none."""
    steps = steps_in(out / CHECKPOINTS)
    if not (out / RUN).exists() or not (steps or read_metrics(out / METRICS)):
        return None
    resumed_from = None
    if steps:
        with contextlib.suppress(UsageError):  # damaged: that may be why an older one is named
            resumed_from = open_checkpoint(out / CHECKPOINTS, steps[-1]).note.get("resumed_from")
    return Found(tuple(steps), resumed_from, has_results=(out / RESULTS).exists())


def _identity_in(out: Path) -> Mapping[str, Scalar]:
    try:
        identity: Mapping[str, Scalar] = json.loads((out / RUN).read_text(encoding="utf-8"))["identity"]
    except (OSError, ValueError, KeyError) as error:
        raise UsageError(f"{out / RUN} cannot be read ({error}); choose another --out") from error
    return identity


def _begin(out: Path, identity: Mapping[str, Scalar]) -> None:
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
