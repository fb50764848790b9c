"""A script run once for the ladder, in a folder of its own, with the outputs of each rank in a file there."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import re
import resource
import shutil
import signal
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from trainstep.base.cores import busy, cores, load
from trainstep.base.errors import OUT_OF_MEMORY
from trainstep.base.files import remove
from trainstep.base.hardware import free_host_bytes
from trainstep.base.precision import PrecisionName
from trainstep.ladder.budget import UNLIMITED, Budget, OutOfTime
from trainstep.ladder.change import Change
from trainstep.ladder.ranks import Failed, Leader, Order
from trainstep.ladder.trial.capture import FILE, Captured, of_all_ranks, read_captured
from trainstep.ladder.trial.in_memory import in_memory
from trainstep.observe.command import Command
from trainstep.observe.copying import Copies, InPlace
from trainstep.observe.loaders import begins_again
from trainstep.observe.log import RankLog, log_path, read_log
from trainstep.observe.rows import script_records
from trainstep.rows import ScriptRow
from trainstep.rows.records import of_kind

LEAST_S, SLOWEST = 120.0, 10.0
"""Seconds after which a later run is ended, and times what the script took as it is; the longer counts."""
MOST_FROM_STOCK = 0.5
"""Share of a run's batches that may have been loaded before it was timed; with more, it says too little of loading."""
ROOM, GROWS, CONTEXT_GIB = 0.7, 1.5, 1.0
"""Share of the free memory that runs beside one another may take, times a run's peak that one takes with what it is
checked by, and memory of a GPU that each process has for itself."""
TOLD = 200
"""Characters of a script's last words that are told."""


@dataclass(frozen=True)
class Taken:
    """Results that one run left."""

    folder: Path
    code: int
    log: RankLog
    step_ms: tuple[float, ...]
    """Milliseconds of each timed step; where several optimizers have steps of their own, of one of each."""
    first_step_ms: float | None
    failure: str
    """Reason why there is nothing to check; empty where there is."""
    captured: Captured | None
    from_stock: float = 0.0
    """Share of the timed steps' batches that loaders' workers had ready before, and loaded no others for."""

    @property
    def ms_per_step(self) -> float:
        """Milliseconds: the total of its timed steps over the number of those whose batches were loaded meanwhile.

        A total, as batches may come in bursts, and the median be of steps that wait for none; loaded meanwhile, as a
        short run would live on what workers fetched ahead while nothing was timed.
        """
        return statistics.fmean(self.step_ms) / (1 - self.from_stock)

    @property
    def is_in_first_epoch(self) -> bool:
        """True if it was stopped before its main loader was begun a second time: no later epoch was seen."""
        loaders, ended = self.log.facts.get("loaders", ()), self.log.ended or {}
        return bool(loaders) and ended.get("how") == "steps" and not begins_again(loaders)


@dataclass
class Script:
    """Runs it.

    Args:
        leader: runs what is to be run, on all ranks.
        folder: under which each run has its own.
        steps: updates of each run.
        copies: makes a copy of the working folder for each run; None if all run in the folder itself.
        tell: called with what is run, before it is.
        budget: the time for all runs.
        is_alone: whether each run is alone, also where it is only compared.
    """

    leader: Leader
    folder: Path
    steps: int
    copies: Copies | None = None
    tell: Callable[[str], object] = lambda text: None
    budget: Budget = UNLIMITED
    is_alone: bool = False
    _numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1), init=False)
    changed: list[str] = field(default_factory=list, init=False)
    """Files that were there before the first run, which changed them in place."""
    own_s: float | None = field(default=None, init=False)
    """Seconds that it took as it is, the first time: a change may make it wait for ever."""
    run_s: float = field(default=0.0, init=False)
    drawn_s: float = field(default=0.0, init=False)
    """Seconds of the last run, and of the last one under random roundings."""

    @property
    def command(self) -> Command:
        """Command that is run."""
        return self.leader.command

    def beside(self, first: Taken) -> int:
        """Runs that fit beside one another, by what the first one took of the processor and of memory.

        One on several ranks, or in the folder itself, has none beside it.
        """
        if self.is_alone or self.leader.rank.world_size > 1 or self.copies is None:
            return 1
        used, peak = resource.getrusage(resource.RUSAGE_CHILDREN), first.captured.peak_gib if first.captured else None
        found = [cores() / max(1.0, (used.ru_utime + used.ru_stime) / (self.own_s or 1.0))]
        found.append(ROOM * free_host_bytes() / (used.ru_maxrss * 1024))
        if total := first.log.facts.get("environment", {}).get("device_memory_gib"):
            found.append(ROOM * total / (GROWS * (peak or total) + CONTEXT_GIB))
        return max(1, int(min(found)))

    def run(
        self,
        what: str,
        changes: Sequence[Change] = (),
        *,
        rounding: tuple[PrecisionName, int] | None = None,
        without_dropout: bool = False,
        sources: Mapping[str, str] = {},
        is_judged: bool = True,
    ) -> Taken:
        """Run it once.

        Args:
            what: in words, for whoever waits.
            changes: that are made from outside.
            rounding: a precision in which results are rounded once more at random, and a seed.
            without_dropout: whether nothing is dropped, and compiled code draws as eager code does.
            sources: path → text that is run in its place.
            is_judged: whether it leaves what it is judged by; else it is only timed.

        One that takes far longer than the first, and is under no random roundings, is ended, and has failed.

        Raises:
            Interrupted: this process received Ctrl-C, SIGTERM or SIGHUP, whatever the script made of it.
            OutOfTime: the budget ended before it did.
            UsageError: the folder cannot be written.
        """
        if (left_s := self.budget.left_s) <= 0:
            raise OutOfTime
        number = next(self._numbers)
        self.tell(f"run {number}: {what}{busy(load(), cores())}")
        folder = self.folder / f"{number:03d}-{''.join(each if each.isalnum() else '-' for each in what)}"
        remove(self.folder if self.folder.is_symlink() else folder)
        folder.mkdir(parents=True)
        command, place, files = self.command, Path.cwd(), frozenset[str]()
        before = InPlace(self.folder) if self.copies is None and self.own_s is None else None
        if self.copies is not None:
            place, here = (folder / "copy").resolve(), self.copies.root
            self.copies.make(place)
            command = dataclasses.replace(command, target=self.copies.target(command, place))
            own = {path: text for path, text in sources.items() if Path(path).is_relative_to(here)}
            sources = {**sources, **{str(place / Path(path).relative_to(here)): text for path, text in own.items()}}
        is_limited = self.own_s is not None and rounding is None  # under random roundings it takes far longer
        order = Order(
            number,
            str(folder),
            str(place),
            command.target,
            self.steps,
            {
                "changes": [each.reference for each in changes],
                "rounding": rounding,
                "without_dropout": without_dropout,
                "sources": dict(sources),
            },
            min(left_s, max(LEAST_S, SLOWEST * (self.own_s or 0.0)) if is_limited else math.inf),
            is_judged,
        )
        start = time.monotonic()
        with in_memory(order.captured(0), (FILE,) if order.is_judged else ()):
            try:
                code, elsewhere = self.leader.carry_out(order)
            except TimeoutError as error:
                self._drop_captured(order)
                if self.budget.left_s <= 0:
                    raise OutOfTime from None
                failure = f"{error}; as it is, the script takes {self.own_s:.0f} s{_last_words(order.output(0))}"
                return Taken(folder, -signal.SIGTERM, read_log(log_path(folder, 0)), (), None, failure, None)
            finally:
                if self.copies is not None:
                    files = self.copies.written(place)
                    shutil.rmtree(place, ignore_errors=True)
                if before is not None:
                    self.changed = before.changed()
            took_s = time.monotonic() - start
            self.own_s = took_s if self.own_s is None else self.own_s
            self.run_s, self.drawn_s = (self.run_s, took_s) if rounding else (took_s, self.drawn_s or took_s)
            taken = self._taken(order, code, elsewhere)
        if taken.captured is not None:
            taken = dataclasses.replace(taken, captured=dataclasses.replace(taken.captured, files=files))
        return taken

    def _taken(self, order: Order, code: int, elsewhere: Failed | None) -> Taken:
        folder, place = Path(order.folder), Path(order.place)
        log = read_log(log_path(folder, 0))
        if self.copies is not None:  # which files the copy's are copies of
            here, there = (json.dumps(str(each))[1:-1] for each in (self.copies.root, place))
            log.facts = json.loads(json.dumps(log.facts).replace(there, here))
        rows = of_kind(script_records([log], self.command.name, code), ScriptRow)
        timed = [row for row in rows if row.status == "ok"]
        step_ms = tuple(map(sum, zip(*(row.samples["step"] for row in timed), strict=False))) if timed else ()
        captured, failure = self._captured(order) if order.is_judged else None, ""
        if elsewhere is not None:
            words = _last_words(order.output(elsewhere.rank))
            failure, captured = f"rank {elsewhere.rank} ended with exit code {elsewhere.code}{words}", None
        elif (order.is_judged and captured is None) or not step_ms or code:
            failure = next((row.reason for row in rows if row.status != "ok"), "")
            failure = failure or f"it ended with exit code {code}: {rows[0].ended}"
            failure += _last_words(order.output(0)) if code else ""
        batches = sum(row.batches or 0 for row in timed)
        from_stock = max(0, sum(row.from_stock or 0 for row in timed)) / batches if batches else 0.0
        if not failure and from_stock > MOST_FROM_STOCK:
            failure = (
                f"loaders' workers had {from_stock:.0%} of the batches ready before the steps that took them were "
                f"timed, where at most {MOST_FROM_STOCK:.0%} may be: take more updates than {self.steps} (--steps)"
            )
        first = timed[0].first_step_ms if timed else None
        return Taken(folder, code, log, step_ms, first, failure, captured, from_stock)

    def _captured(self, order: Order) -> Captured | None:
        """Captures of all ranks, by which they are checked; None where one left nothing."""
        every = [read_captured(order.captured(rank)) for rank in range(self.leader.rank.world_size)]
        self._drop_captured(order)
        found = [each for each in every if each is not None]
        return of_all_ranks(found) if len(found) == len(every) else None

    def _drop_captured(self, order: Order) -> None:
        """Drop what was captured: it is as large as the model."""
        for rank in range(self.leader.rank.world_size):
            (order.captured(rank) / FILE).unlink(missing_ok=True)


def _last_words(path: Path) -> str:
    """The last line of what it wrote; of an exception its type alone, as its text may hold secrets, and whether memory
    was short."""
    lines = [line.strip() for line in path.read_text(errors="replace").splitlines() if line.strip()]
    last = re.sub(r"^([A-Za-z_][\w.]*): .*", r"\1", lines[-1]) if lines else ""
    if lines and OUT_OF_MEMORY.search(lines[-1]) and not OUT_OF_MEMORY.search(last):
        last += ": out of memory"
    return f" (its last words: {last[-TOLD:]}; all of them: {path})" if lines else ""
