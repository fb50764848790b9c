"""`trainstep run --deep`: the script once more, in a copy of its folder, for a few steps under instruments."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainstep.base.errors import UsageError
from trainstep.base.files import remove
from trainstep.commands.output import console_for_output

if TYPE_CHECKING:
    from trainstep.observe.command import Command
    from trainstep.observe.copying import Copies
    from trainstep.observe.log import RankLog
    from trainstep.observe.supervise import Rank
    from trainstep.rows.records import Row

WAITED_S = 60.0
"""Seconds for which the first rank waits for the others, whose scripts may end later."""
BEGINS = "trainstep: --deep starts the script once more, for {steps} steps, in {place}; its output is in {output}"


class DeepRun:
    """Made before the run that is timed, so that its copy has what that one begins with.

    Args:
        out: the report's folder. The output of the deep run is in `deep/` there.
        plan: of the session.
        is_in_place: whether it runs in the working folder itself.
    """

    def __init__(self, command: Command, rank: Rank, out: Path, plan: Mapping[str, Any], *, is_in_place: bool) -> None:
        from trainstep.ladder.ranks import check_one_host
        from trainstep.observe.copying import Copies

        check_one_host(os.environ, "--deep")
        self.command, self.rank, self.folder, self.plan = command, rank, out / "deep", plan
        self.notes: list[str] = []
        """Reasons why something of it is missing."""
        self._place = Path.cwd()
        self._copies: Copies | None = None
        if rank.rank == 0:
            with self._noting():
                remove(self.folder)
                self.folder.mkdir(parents=True)
                if not is_in_place:
                    self._place = self.folder.resolve() / "copy" / Path.cwd().name
                    self._copies = Copies(self.folder, self.folder / "large")
                    self._copies.make_small(self._place)
        self._start = time.monotonic()

    @contextmanager
    def _noting(self) -> Iterator[None]:
        """Make a failure here a line of the report, beside which all else stands."""
        try:
            yield
        except KeyboardInterrupt:
            self.notes.append("the deep run was interrupted")
        except (UsageError, OSError) as error:
            self.notes.append(f"deep run: {error}")
        except Exception as error:
            self.notes.append(f"results of the deep run cannot be read: {type(error).__name__}")

    def follow(self) -> None:
        """Take part in it, as a rank that is not the first."""
        from trainstep.ladder.ranks import follow

        follow(self.command, self.rank, self.folder)

    def close(self) -> None:
        """Remove the copy."""
        if self._copies is not None:
            self._copies.close()
            shutil.rmtree(self.folder / "copy", ignore_errors=True)

    def rows(self, logs: Sequence[RankLog], rows: Sequence[Row], code: int) -> list[Row]:
        """The rows of the run that was timed, and the deep run's beside them.

        Args:
            logs: of the run that was timed.
            code: its exit code.
        """
        from trainstep.observe.log import log_path, read_logs
        from trainstep.observe.rows import deep_records, kernel_records
        from trainstep.rows import ProfileRow

        found: list[Row] = []
        took_s = time.monotonic() - self._start
        with self._noting():
            if code:
                raise UsageError("left out, as the script failed")
            self._run(logs[0], took_s)
        if not log_path(self.folder, 0).exists():
            return list(self._noted(rows))
        deep = read_logs(self.folder, self.rank.launch, self.rank.world_size)
        with self._noting():
            rows, found = deep_records(deep, rows)
        with self._noting():
            kernels = kernel_records(deep[0], rows, self.folder)
            for row in kernels:
                found.append(replace(row, trace=f"deep/{row.trace}") if isinstance(row, ProfileRow) else row)
        return [*self._noted(rows), *found]

    def _noted(self, rows: Sequence[Row]) -> Iterator[Row]:
        """The rows: the scripts' say that a deep run was asked for, and the first of them what is missing."""
        from trainstep.rows import ScriptRow

        notes = list(self.notes)
        for row in rows:
            if isinstance(row, ScriptRow):
                row = replace(row, deep=True, notes=(*notes, *(row.notes or ())) or None)
                notes.clear()
            yield row

    def _run(self, log: RankLog, took_s: float) -> None:
        from trainstep.ladder.ranks import Leader, Order
        from trainstep.ladder.single import LEAST_S, SLOWEST
        from trainstep.observe.copying import is_unchanged
        from trainstep.observe.instruments import steps_needed

        steps = min(steps_needed(self.plan["profiled_steps"], self.plan["profile_after"]), len(log.steps))
        leader = Leader(self.command, self.rank, self.folder)
        with leader.others():
            if missing := leader.missing(WAITED_S):
                raise UsageError(f"rank {missing[0]} had not ended {WAITED_S:.0f} s after the first one")
            if self.notes or not steps:
                return
            output, target = Path(self.folder, "output.txt"), self.command.target
            place = "this folder" if self._copies is None else "a copy of this folder"
            console_for_output(to_stderr=True).print(BEGINS.format(steps=steps, place=place, output=output))
            if self._copies is not None:
                self._copies.add_large(self._place, is_unchanged)  # those that a whole run has left alone are only read
                target = self._copies.target(self.command, self._place)
            later_s = sum(sum(step.host) for step in log.steps[steps:]) / 1e3
            limit_s = max(LEAST_S, SLOWEST * (took_s - later_s))
            order = Order(
                1, str(self.folder), str(self._place), target, steps, None, limit_s, is_judged=False, plan=self.plan
            )
            try:
                code, failed = leader.carry_out(order)
            except TimeoutError as error:
                raise UsageError(f"{error}; its output is in {output}") from error
            if failed is not None:
                raise UsageError(f"rank {failed.rank} of it ended with exit code {failed.code}")
            if code:
                how = f"signal {-code}" if code < 0 else f"exit code {code}"
                raise UsageError(f"it ended with {how}; its output is in {output}")
