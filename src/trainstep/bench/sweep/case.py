"""One case of a sweep: a command with its flags, who it is, and the folder that holds what came of it.

A case is finished when its folder has `rows.jsonl`, which appears whole or not at all. The sweep's results are these
files one after the other, so nothing else has to be kept to resume.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from trainstep.errors import UsageError
from trainstep.kinds import (
    AttentionRow,
    CheckpointingRow,
    CollectiveRow,
    MemoryTimelineRow,
    ParallelRow,
    PeakRow,
    PlanRow,
    ProfileRow,
    RungRow,
    StepRow,
    SweepRow,
)
from trainstep.records import Row, Scalar, Status, of_kind, read_records, write_whole

ROW_KINDS: Mapping[str, tuple[type[Row], ...]] = {
    "analyze": (RungRow,),
    "bench attention": (AttentionRow,),
    "bench collectives": (CollectiveRow,),
    "bench ladder": (RungRow,),
    "bench parallel": (ParallelRow,),
    "bench step": (StepRow,),
    "memory": (PeakRow, CheckpointingRow, MemoryTimelineRow),
    "plan": (PlanRow,),
    "profile": (ProfileRow,),
}
"""Commands that can be swept → the kind of record that becomes a row: the first of these that the case wrote."""

PROCESSES = "processes"
"""The one setting that is no flag: how many processes torchrun starts."""

_LONGEST_NAME = 80


@dataclass(frozen=True)
class Case:
    """One cell of the grid."""

    command: str
    """A key of `ROW_KINDS`."""
    settings: Mapping[str, Scalar]
    """Flag without dashes → value, and `processes`; in the file's order."""

    @property
    def processes(self) -> int | None:
        """Processes that torchrun starts; None for one process without it."""
        count = self.settings.get(PROCESSES)
        return count if isinstance(count, int) else None

    @property
    def words(self) -> list[str]:
        """The command line after `trainstep`, without `--out`."""
        return [*self.command.split(), *flags(self.settings)]

    @property
    def identity(self) -> str:
        """Twelve hexadecimal digits of the command's words, whatever their order in the file.

        Not of the version: a commit does not void what was measured, and rows carry theirs.
        """
        told = [self.command, sorted((name, _canonical(value)) for name, value in self.settings.items())]
        return hashlib.sha256(json.dumps(told).encode()).hexdigest()[:12]

    def columns(self) -> dict[str, Scalar]:
        """The columns that identify the case's rows."""
        return {"command": self.command, **self.settings}

    def folder(self, cases: Path, axes: Sequence[str]) -> Path:
        """The case's own folder, named after its place on the axes and its identity."""
        named = " ".join(f"{name}={self.settings[name]}" for name in axes)
        readable = re.sub(r"[^\w.=+-]+", "_", named)[:_LONGEST_NAME]
        return cases / f"{readable}-{self.identity}"


def flags(settings: Mapping[str, Scalar]) -> list[str]:
    """Settings as flags: a true one alone, a false one not at all, underscores as dashes."""
    words: list[str] = []
    for name, value in settings.items():
        if name == PROCESSES or value is False:
            continue
        words.append(f"--{name.replace('_', '-')}")
        if value is not True:
            words.append(str(value))
    return words


def _canonical(value: Scalar) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


@dataclass(frozen=True)
class Place:
    """A case and the folder of what came of it."""

    case: Case
    folder: Path

    @property
    def _kept(self) -> Path:
        return self.folder / "rows.jsonl"

    def finished(self) -> list[SweepRow] | None:
        """The rows of a case that has ended, well or not; None while it has not."""
        try:
            return of_kind(read_records(self._kept), SweepRow)
        except UsageError:
            if self._kept.exists():
                raise
            return None

    def keep(self, rows: Sequence[Row]) -> None:
        """Write the rows; with this the case is finished."""
        assert rows, "a finished case has a row"
        write_whole(self._kept, rows)

    def clear(self) -> None:
        """Forget an earlier run, so that nothing of it can pass for this one's."""
        for name in ("rows.jsonl", "results.jsonl"):
            (self.folder / name).unlink(missing_ok=True)

    def is_finished(self, retried: Sequence[Status] = ()) -> bool:
        """Whether the case has ended before, and not with a status that is to be tried again."""
        rows = self.finished()
        return rows is not None and not any(row.status in retried for row in rows)
