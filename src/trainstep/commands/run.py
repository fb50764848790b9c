"""`trainstep run`: any training script, unmodified: where its steps' time goes."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shlex
import signal
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tyro.conf import FlagCreatePairsOff, Suppress

from trainstep.base.cores import busy, cores
from trainstep.base.errors import UsageError, say
from trainstep.base.guards import StopSignals
from trainstep.commands.options import Common, words_of
from trainstep.commands.output import console_for_output, show_report

if TYPE_CHECKING:
    from trainstep.commands.deep import DeepRun
    from trainstep.ladder.change import Place
    from trainstep.observe.command import Command
    from trainstep.observe.supervise import Rank
    from trainstep.report.answer import Launch
    from trainstep.rows.records import Row

LADDER_STEPS = 30
"""Updates of each of a ladder's runs, where no number is given."""
LEAST_STEPS = 3
"""Updates of a ladder's run at least: the first two of each optimizer are not timed."""


@dataclass(frozen=True, kw_only=True)
class Run(Common):
    """Run a training script as it is, and show where its steps' time goes: trainstep run [options] python train.py …

    The script follows the options: python train.py …, train.py …, or -m module …; under torchrun it is
    torchrun … -m trainstep run train.py …. Its output, arguments and exit code are its own; what was measured goes to
    --out and to stderr.
    """

    steps: int | None = None
    """Stop the script after this many steps; by default it runs to its end."""
    deep: FlagCreatePairsOff[bool] = False
    """Afterwards run the script once more, a few steps in a copy of its folder: kernels, memory by owner, dtypes."""
    profiled_steps: int = 2
    """With --deep: steps whose kernels the profiler records; 0 for none."""
    profile_after: int = 8
    """With --deep: steps before those that are profiled."""
    memory: FlagCreatePairsOff[bool] = True
    """With --deep: leave out the allocations of one step and the dtypes of its modules."""
    out: Path = Path("results/run")
    """Folder for results.jsonl, tables/, report.html, the ranks' logs and, in deep/, the deep run's files. The
    default has a new folder for each launch."""
    ladder: FlagCreatePairsOff[bool] = False
    """Run the script once per change, made from outside: each is checked, and timed if training is the same."""
    changes: str | None = None
    """Changes that the ladder tries, by name and divided by commas, as in "fused optimizer,loader workers"; by default
    all. Those that are named are tried even where memory speaks against them."""
    at_once: FlagCreatePairsOff[bool] = False
    """With --ladder: try all changes together first, in a fraction of the runs; one by one only if that is rejected."""
    budget: str | None = None
    """With --ladder: time for all runs, such as 90s, 3m or 1h, by default 5m. Changes are tried by their expected gain
    while it lasts, time is kept to prove the patch, and the other changes are listed."""
    patch: Path | None = None
    """With --ladder: write what was accepted as a diff of the script, if that diff, run and measured again, holds."""
    in_place: FlagCreatePairsOff[bool] = False
    """With --ladder or --deep: run in the working folder itself; by default each run has a copy of it."""
    one_at_a_time: FlagCreatePairsOff[bool] = False
    """With --ladder: no runs beside one another; by default those that are only compared are, where memory and cores
    allow it. For scripts that share a port, a lock, or a file outside of their folder."""
    verbatim: FlagCreatePairsOff[bool] = False
    """Report texts of exceptions and whole commands; by default their types and programs: the rest may
    hold secrets."""
    script: Suppress[tuple[str, ...]] = ()

    def run(self) -> int:
        from trainstep.observe.command import command_of
        from trainstep.observe.supervise import Rank

        for name in ("steps", "profiled_steps", "profile_after"):
            least, value = int(name == "steps") * (LEAST_STEPS if self.ladder else 1), getattr(self, name)
            if value is not None and value < least:
                raise UsageError(f"{name.replace('_', '-')} is {value}; expected {least} or more")
        command, rank = command_of(self.script, words_of(self, ["script"])), Rank.of(os.environ)
        if self.ladder:
            once = ("deep", "profiled_steps", "profile_after", "memory", "verbatim")
            self.refuse("{flag} is for a run that is measured once; leave it out, or --ladder", *once)
        else:
            self._check_once()
        with self.in_folder(command.name.removesuffix(".py"), launch=rank.shared_launch, rank=rank.rank) as own:
            return own._climb(command, rank) if self.ladder else own._run(command, rank)

    def _check_once(self) -> None:
        self.refuse(
            "{flag} belongs to a ladder: add --ladder", "changes", "at_once", "budget", "patch", "one_at_a_time"
        )
        if not self.deep:
            self.refuse("{flag} belongs to a deep run: add --deep", "profiled_steps", "profile_after", "memory")
            self.refuse("{flag} belongs to a ladder or a deep run: add --ladder or --deep", "in_place")
        if not self.profiled_steps:
            none = "{flag} is of the steps that are profiled, and --profiled-steps is 0; leave one of them out"
            self.refuse(none, "profile_after")

    def _run(self, command: Command, rank: Rank) -> int:
        """Run it once and report; the script's exit code, whatever fails in the report."""
        from trainstep.observe.supervise import run_script

        deep = self._deep(command, rank) if self.deep else None
        code = run_script(command, rank, self.out, {"steps": self.steps, "is_sampled": True}, is_verbatim=self.verbatim)
        if rank.rank == 0:
            try:
                with StopSignals(raises=True):
                    self._report(command, rank, code, deep)
            except KeyboardInterrupt:
                say("trainstep: the report was interrupted; the script had ended before", to_stderr=True)
            except Exception as error:  # the exit code is the script's, whatever fails here
                say(f"trainstep: the report failed: {type(error).__name__}: {error}", to_stderr=True)
            if deep is not None:
                deep.close()
        elif deep is not None and not code:
            deep.follow()
        if code < 0:  # as the script was, so that a shell and torchrun see the same
            signal.signal(-code, signal.SIG_DFL) if -code not in (signal.SIGKILL, signal.SIGSTOP) else None
            os.kill(os.getpid(), -code)
        return code

    def _deep(self, command: Command, rank: Rank) -> DeepRun:
        from trainstep.commands.deep import DeepRun

        plan = {"is_deep": True, "profiled_steps": self.profiled_steps, "profile_after": self.profile_after}
        plan["has_memory"] = self.memory
        return DeepRun(command, rank, self.out, plan, is_in_place=self.in_place)

    def _climb(self, command: Command, rank: Rank) -> int:
        """The ladder instead of one run."""
        from trainstep.commands.climb import BUDGET, climb_script
        from trainstep.ladder.ranks import Leader, check_one_host, follow

        check_one_host(os.environ)
        if rank.rank > 0:
            return follow(command, rank, self.out)
        leader = Leader(command, rank, self.out)
        with leader.others():
            return climb_script(
                leader,
                self.out,
                steps=self.steps or LADDER_STEPS,
                names=self.changes,
                at_once=self.at_once,
                patch=self.patch,
                is_in_place=self.in_place,
                is_alone=self.one_at_a_time,
                budget=self.budget or BUDGET,
            )

    def _keep(self, rows: Sequence[Row]) -> None:
        from trainstep.rows.records import RecordWriter

        with contextlib.closing(RecordWriter(self.out / "results.jsonl")) as writer:
            for row in rows:
                writer.write(row)

    def _report(self, command: Command, rank: Rank, code: int, deep: DeepRun | None) -> None:
        """Read the logs, write rows and show what they say. A part that fails is a line, and the others stand."""
        from trainstep.observe.log import RankLog, read_logs
        from trainstep.observe.rows import script_records
        from trainstep.rows import LineRow, PeakRow, RecompilationRow, ScriptRow, WaitRow

        console = console_for_output(to_stderr=True)
        logs: list[RankLog] = []
        rows: list[Row] = []

        @contextlib.contextmanager
        def part(what: str) -> Iterator[None]:
            try:
                yield
            except Exception as error:
                text = str(error).partition("\n")[0]
                kind = "" if isinstance(error, UsageError) else f"{type(error).__name__}: "
                say(f"trainstep: {what} failed: {kind}{text}", to_stderr=True)

        with part("reading the steps"):
            logs = read_logs(self.out, rank.launch, rank.world_size)
            rows = script_records(logs, command.name, code)
        if deep is not None and rows:
            with part("the deep run"):
                self._keep(rows)
                rows = deep.rows(logs, rows, code)
                (self.out / "results.jsonl").unlink(missing_ok=True)  # not the previous results
        console.print()
        with part("writing results.jsonl"):
            self._keep(rows)
        with part("the report"):
            kinds = (ScriptRow, LineRow, WaitRow, RecompilationRow, PeakRow)
            show_report(rows, self.out, console, self._launch(command, rank, rows), kinds=kinds)

    def _launch(self, command: Command, rank: Rank, rows: Sequence[Row]) -> Launch:
        """Title, the ladder's command and the changes that it tries, for the answer."""
        from trainstep.ladder.change import all_changes
        from trainstep.report.answer import Launch, Try
        from trainstep.rows import ScriptRow
        from trainstep.rows.records import of_kind

        place: Place = "cuda" if any(row.on_gpu for row in of_kind(rows, ScriptRow)) else "cpu"
        own, count = command.interpreter, len(command.arguments)  # which may hold secrets
        words = ["python" if own == sys.executable else Path(own).name, *command.words[1 : -count or None]]
        prove = f"{'torchrun … -m ' * (rank.world_size > 1)}trainstep run --ladder --patch fix.diff {shlex.join(words)}"
        changes = [each for each in all_changes("script") if each.needs_nothing]
        tries = [Try(each.line.code, each.expected.get(place, 1.0), each.phase) for each in changes]
        machine = next((busy(row.load, cores(), row.cpu_share) for row in of_kind(rows, ScriptRow)), "").strip(" ()")
        return Launch(f"trainstep run · {command.name}", prove=prove + " …" * bool(count), tries=tries, machine=machine)


def split_script(words: Sequence[str]) -> tuple[list[str], tuple[str, ...]]:
    """The words of the command line up to the script, and the script's; options that take a value take the next word.

    Args:
        words: after `run`.
    """
    flags = {each.name: each for each in dataclasses.fields(Run)}
    place = 0
    while place < len(words):
        word = words[place]
        if word == "--":
            return list(words[:place]), tuple(words[place + 1 :])
        if not word.startswith("-") or word == "-m":
            break
        name, equals, _ = word.removeprefix("--").partition("=")
        known = flags.get(name.replace("-", "_"))
        takes_value = known is not None and not equals and not isinstance(known.default, bool)
        place += 1 + takes_value
    return list(words[:place]), tuple(words[place:])
