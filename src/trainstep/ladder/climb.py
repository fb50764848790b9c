"""The ladder of a script: the script itself is run once per rung, with one change made from outside on what was kept.

The script as it is comes first, twice: what it does not repeat by itself cannot be held against a change. Each rung is
run and judged (`judge`); one that is wrong is never timed. One that is right is run in turns with what was kept before,
B A A B (the run that was judged is the first B), every run a process of its own, and its gain is a ratio between runs.
A rung that is faster is built upon, and one that needs less memory if it is certainly not much slower. Where several
were kept, the top and the script as it is take turns at the end: that ratio is what was proven.

What was right and brought nothing sure may bring something with others of its kind, as where launches set the pace and
each change leaves some: all of it is tried at once, or everything is before anything is tried alone. And it may bring
more where a step is shorter: each is tried once more on the top, if what it may have saved is of some weight there.

A larger batch is no rung of that kind (`larger`): it is held against what was kept by its samples per second alone, on
top of that, or of a rung that needs less memory where only that leaves room.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from trainstep.base.advice import Line
from trainstep.base.errors import OUT_OF_MEMORY
from trainstep.base.stats import RUN_SPREAD, Ratio, product, ratio_of_runs, verdict
from trainstep.check.reference import DRAWS
from trainstep.ladder.change import Change
from trainstep.ladder.judge import ScriptVerdict
from trainstep.ladder.judging import CannotJudge, Judging
from trainstep.ladder.larger import (
    lines_of,
    ms_per_sample,
    throughput_fields,
    why_memory_limits_not,
    why_not_told,
    with_room,
)
from trainstep.ladder.rung_rows import ratio_fields, rung_row
from trainstep.ladder.single import Script, Taken
from trainstep.ladder.turns import MOST_ROUNDS, AsShown, in_turns, times
from trainstep.ladder.workloads import NO_SLOWER
from trainstep.observe.loaders import share_of_waiting
from trainstep.observe.log import RankLog
from trainstep.rows import ANOTHER_STEP, AT_ONCE, ON_TOP, ScriptRungRow
from trainstep.rows.records import Status


@dataclass(frozen=True)
class Left:
    """A rung that was right and not kept."""

    kept: frozenset[str]  # the rungs that it was tried on
    saved_ms: float  # of a step, at most


def seen_of(log: RankLog) -> dict[str, Any]:
    """What a whole run shows beside its settings: whether numbers are read, why code is compiled again, and how much
    of its steps waits for data."""
    return {
        "reads": any(place["call"] == "item" for place in log.lines.values()),
        "recompiles": any(each["reason"] and each["step"] > 1 for each in log.recompilations),
        "waiting": share_of_waiting(log.steps),
    }


class Ladder:
    """Climbs, and remembers what was kept.

    Args:
        script: runs it.
        rungs: to try, in this order.
        rounds: how often a rung and what was kept take turns, at most.
        are_named: whether somebody asked for these rungs: they are tried even where memory speaks against them.
        at_once: whether all of them are tried together first, and one by one only where that is not kept.
    """

    def __init__(
        self,
        script: Script,
        rungs: Sequence[Change],
        rounds: int = MOST_ROUNDS,
        *,
        are_named: bool = False,
        at_once: bool = False,
    ) -> None:
        self.script, self.rungs, self.rounds = script, rungs, rounds
        self.are_named, self.at_once = are_named, at_once
        self.first: Taken | None = None
        self.code = 0  # the first run's exit code
        self.kept: list[Change] = []
        self.judge: Judging | None = None
        self.settings: Mapping[str, Any] = {}
        self._top: Taken | None = None
        self._left: dict[str, Left] = {}  # rungs that were right and not kept
        self._times_kept = 0
        self._tried_together: set[tuple[frozenset[str], frozenset[str]]] = set()  # on what was kept, by their names
        self._smaller: tuple[list[Change], Taken] | None = None  # what is right, needs less memory, and was not kept
        self._speedup = Ratio(1.0, None, between_runs=True)

    def climb(self) -> Iterator[ScriptRungRow]:
        """A row for every rung, for the script as it is first, and for the top against it last.

        Raises:
            Interrupted: the script was ended by a signal.
        """
        baseline = self.script.run("the script as it is")
        self.code = baseline.code
        if baseline.captured is None or baseline.failure:
            yield self._row("baseline", baseline, status="failed", reason=baseline.failure, verdict="failed")
            return
        self.first = self._top = baseline
        self.settings = baseline.log.facts["settings"] | seen_of(baseline.log)
        judge = Judging(self.script, self.rungs, self.settings)
        try:
            repeat = judge.begin(baseline.captured)
        except CannotJudge as error:
            yield self._row("baseline", baseline, verdict=error.verdict, reason=str(error), status="failed")
            return
        self.judge = judge
        yield self._row("baseline", baseline, repeat, verdict="baseline", kept=True, runs=1)
        place = next((place for place, rung in enumerate(self.rungs) if rung.trades), len(self.rungs))
        singly = self.rungs[:place]
        if self.at_once and len(every := _compatible(rung for rung in singly if not rung.skipped(self.settings))) > 1:
            yield (row := self._try_together(every))
            if row.kept:
                yield from map(self._left_out, (rung for rung in singly if rung.name not in self._names_kept))
                singly = ()
            singly = [rung for rung in singly if rung.name not in self._left]  # the only one that found its place
        for rung in singly:
            yield self.try_rung(rung)
        if left := self._left_together():
            yield self._try_together(left)
        for rung in singly:
            if self._may_gain_on_top(rung):
                yield self.try_rung(rung, ON_TOP)
        for rung in self.rungs[place:]:
            yield self.try_rung(rung)
        if len(self.kept) > 1 and self._times_kept > 1:
            yield self._proven()

    @property
    def runs_left(self) -> tuple[int, int]:
        """About how many runs, at least and at most, the rungs take that may be something for the script."""
        tried = [rung for rung in self.rungs if not rung.skipped(self.settings)]
        several, narrow = len(tried) > 1, sum(rung.precision is not None for rung in tried)
        in_turns = 4 * (len(tried) + several)  # B A A B, and the top at the end
        most = self.rounds * (in_turns + 4 * several) + (DRAWS + 1) * narrow
        if self.at_once and several:
            return 4 + (DRAWS + 1) * narrow, most + 4 * self.rounds
        return in_turns + (DRAWS + 1) * narrow, most

    def _may_gain_on_top(self, rung: Change) -> bool:
        """Whether something that is not of its kind was kept since it was tried, and the most that it may have saved is
        more than runs of the top differ by."""
        left, now = self._left.get(rung.name), {each.name for each in self.kept}
        if left is None or self._top is None or left.kept == now:
            return False
        its_place_is_taken = any(rung.name in each.instead_of for each in self.kept)
        takes_a_place = not left.kept.issuperset(now.intersection(rung.instead_of))
        return not (its_place_is_taken or takes_a_place) and left.saved_ms > RUN_SPREAD * self._top.ms_per_step

    def _left_together(self) -> list[Change]:
        """Several rungs that go with what was kept and may save something together, by as much as each may have; none
        where that is nothing."""
        assert self._top is not None, "the baseline was judged"
        kept, taken = self._names_kept, {name for rung in self.kept for name in rung.instead_of}
        may_save = {name: left.saved_ms for name, left in self._left.items() if left.saved_ms > 0}
        found = _compatible(
            rung
            for rung in self.rungs
            if rung.name in may_save and rung.name not in taken and kept.isdisjoint(rung.instead_of)
        )
        is_something = sum(may_save[rung.name] for rung in found) > RUN_SPREAD * self._top.ms_per_step
        is_new = (kept, frozenset(rung.name for rung in found)) not in self._tried_together
        return found if len(found) > 1 and is_something and is_new else []

    @property
    def _names_kept(self) -> frozenset[str]:
        return frozenset(rung.name for rung in self.kept)

    def _try_together(self, rungs: Sequence[Change]) -> ScriptRungRow:
        self._tried_together.add((self._names_kept, frozenset(rung.name for rung in rungs)))
        return self._guarded(self._try_on_top, rungs)

    def _left_out(self, rung: Change) -> ScriptRungRow:
        """The row of a rung that is not among those that were kept at once."""
        why = rung.skipped(self.settings)
        if instead := [each.name for each in self.kept if rung.name in each.instead_of]:
            why = why or f"{instead[0]} takes its place"
        return self._not_tried(rung, why or rung.nothing)

    def try_rung(self, rung: Change, suffix: str = "") -> ScriptRungRow:
        """Run it on what was kept, judge it, and time it if it is right; `suffix` ends its name in the row."""
        if why := rung.skipped(self.settings):
            row = self._not_tried(rung, why)
        elif rung.trades == "the step":
            row = self._guarded(self._try_another_step, [rung])
        else:
            row = self._guarded(self._try_on_top, [rung])
        return replace(row, rung=rung.name + suffix)

    def _guarded(self, attempt: Callable[[Sequence[Change]], ScriptRungRow], rungs: Sequence[Change]) -> ScriptRungRow:
        """The row of an attempt, also where nothing could be judged."""
        try:
            return attempt(rungs)
        except CannotJudge as error:
            return self._row(_named(rungs), None, status="failed", reason=str(error), verdict=error.verdict)

    def _try_on_top(self, rungs: Sequence[Change]) -> ScriptRungRow:
        assert self._top is not None, "the baseline was judged"
        assert self.judge is not None
        name, first = _named(rungs), rungs[0]
        if first.trades and not self.are_named and (why := why_memory_limits_not(self._top.captured)):
            return self._not_tried(first, why)
        replaced = {each for rung in rungs for each in rung.instead_of}
        before = [each for each in self.kept if each.name not in replaced]
        taken = self.script.run(name, [*before, *rungs])
        if taken.failure or taken.captured is None:
            return self._failed(name, taken)
        made = _made(rungs, taken)
        if not made:
            why = "; ".join(dict.fromkeys(rung.nothing for rung in rungs))
            return self._row(name, None, status="unsupported", reason=why, verdict="not tried")
        together = [*before, *made]
        found = self.judge.of(together, taken.captured, self._top.captured)
        if not found.is_right:
            return self._row(name, None, found, status="wrong", reason=str(found), verdict="wrong")
        return self._timed(made, together, taken, found)

    def _try_another_step(self, rungs: Sequence[Change]) -> ScriptRungRow:
        """Run it where memory has room, and tell its samples per second, if its losses are finite."""
        (rung,) = rungs
        assert self._top is not None, "the baseline was judged"
        bases, why = with_room([(self.kept, self._top), *([self._smaller] if self._smaller else [])])
        if why and not self.are_named:
            return self._not_tried(rung, why)
        for base, _ in bases:
            together = [*base, rung]
            taken = self.script.run(rung.name, together)
            if not OUT_OF_MEMORY.search(taken.failure):
                break
        if taken.failure or taken.captured is None:
            return self._failed(rung.name, taken)
        if broken := taken.captured.what_is_not_finite:
            return self._row(rung.name, None, status="wrong", reason=broken, verdict="wrong")
        if why := why_not_told(self._top, taken):
            return self._not_tried(rung, why)
        before, own = self._in_turns(rung.name, self.kept, together, begun=taken, as_shown=ms_per_sample)
        ratio = ratio_of_runs(ms_per_sample(before), ms_per_sample(own))
        further = [each.line.text for each in together if each not in self.kept and each is not rung]
        return self._row(
            rung.name,
            None,
            verdict=ANOTHER_STEP,
            runs=len(own),
            lines="; ".join([*further, lines_of(rung.line.text, self.settings)]),
            peak_gib=taken.captured.peak_gib,
            samples={"training_loss": list(taken.captured.losses)},
            **throughput_fields(before, own, ratio),
        )

    def _not_tried(self, rung: Change, why: str) -> ScriptRungRow:
        return self._row(rung.name, None, status="unsupported", reason=why, verdict="not tried")

    def _failed(self, name: str, taken: Taken) -> ScriptRungRow:
        status: Status = "out of memory" if OUT_OF_MEMORY.search(taken.failure) else "failed"
        return self._row(name, None, status=status, reason=taken.failure, verdict=status)

    def _timed(
        self, rungs: Sequence[Change], together: list[Change], taken: Taken, found: ScriptVerdict
    ) -> ScriptRungRow:
        name = _named(rungs)
        before, own = self._in_turns(name, self.kept, together, begun=taken)
        gain = ratio_of_runs(times(before), times(own))
        called = verdict(gain)
        speedup = product([self._speedup, gain]) if self.kept else gain
        no_slower = gain.interval is not None and gain.interval.low >= NO_SLOWER
        keep = called == "faster" or (no_slower and _is_smaller(taken, self._top))
        if keep:
            self.kept, self._top, self._speedup = together, taken, speedup
            self._times_kept += 1
            self._smaller = None  # it stood on what was kept before
            for rung in rungs:
                self._left.pop(rung.name, None)
        elif rungs[0].trades and _is_smaller(taken, self._top):
            self._smaller = together, taken
        if not keep and gain.interval is not None and len(rungs) == 1:
            at_most = statistics.median(run.ms_per_step for run in before) * (1 - 1 / gain.interval.high)
            self._left[name] = Left(frozenset(each.name for each in self.kept), at_most)
        return self._row(
            name,
            taken,
            found,
            own=own,
            verdict=called,
            kept=keep,
            runs=len(own),
            lines="; ".join(rung.line.text for rung in rungs),
            **ratio_fields("gain", gain),
            **ratio_fields("speedup", speedup),
        )

    def _in_turns(
        self,
        what: str,
        before: Sequence[Change],
        own: Sequence[Change],
        sources: Mapping[str, str] = {},
        *,
        begun: Taken | None = None,
        as_shown: AsShown = times,
    ) -> tuple[list[Taken], list[Taken]]:
        """Runs of what was kept before and of its own, as `turns.in_turns` has them."""

        def run(is_own: bool) -> Taken:
            words = what if is_own else "what was kept before" if before else "the script as it is"
            rungs, text = (own, sources) if is_own else (before, {})
            is_judged = not self.settings["on_gpu"]  # on a CPU what is copied slows the steps, so it is in all runs
            return self.script.run(f"{words}, timed", rungs, sources=text, is_judged=is_judged)

        taken = in_turns(run, self.rounds, begun=begun, as_shown=as_shown)
        if not all(taken):
            raise CannotJudge(
                f"{what}: when it took turns with what was kept before, no run of one side came to its end"
            )
        return taken

    def _proven(self) -> ScriptRungRow:
        name = "all that was kept"
        try:
            before, own = self._in_turns(name, (), self.kept)
        except CannotJudge as error:
            return self._row(name, None, status="failed", reason=str(error), verdict=error.verdict)
        ratio = ratio_of_runs(times(before), times(own))
        return self._row(
            name,
            self._top,
            own=own,
            verdict=verdict(ratio),
            kept=True,
            runs=len(own),
            lines="; ".join(rung.line.text for rung in self.kept),
            **ratio_fields("speedup", ratio),
        )

    def judge_sources(self, sources: Mapping[str, str], written: Sequence[Change]) -> ScriptRungRow:
        """A row for the script with other sources and nothing changed from outside: judged, then timed against it.

        Args:
            sources: path → text.
            written: the changes that the sources have.
        """
        name = "the patched script"
        assert self.judge is not None, "the ladder was climbed"
        taken = self.script.run(name, sources=sources, without_dropout=self.judge.drops)
        if taken.failure or taken.captured is None:
            return self._row(name, None, status="failed", reason=taken.failure, verdict="failed")
        try:
            found = self.judge.of_sources(written, taken.captured)
            if not found.is_right:
                return self._row(name, None, found, status="wrong", reason=str(found), verdict="wrong")
            before, own = self._in_turns(name, (), (), sources, begun=None if self.judge.drops else taken)
        except CannotJudge as error:
            return self._row(name, None, status="failed", reason=str(error), verdict=error.verdict)
        ratio = ratio_of_runs(times(before), times(own))
        holds = verdict(ratio) == "faster"
        ratios = ratio_fields("speedup", ratio)
        return self._row(name, taken, found, own=own, verdict=verdict(ratio), kept=holds, runs=len(own), **ratios)

    def _row(self, rung: str, taken: Taken | None, found: ScriptVerdict | None = None, **more: Any) -> ScriptRungRow:
        environment = self.first.log.facts.get("environment", {}) if self.first else {}
        compared = "without dropout" if self.judge and self.judge.drops and found is not None else None
        own = {"workload": self.script.command.name, "rung": rung, "environment": environment, "compared": compared}
        return rung_row(own, taken, found, **more)


def _compatible(rungs: Iterable[Change]) -> list[Change]:
    """Those that go together: of two of which one takes the other's place, that one."""
    found: list[Change] = []
    for rung in rungs:
        found = [*(each for each in found if each.name not in rung.instead_of), rung]
    return found


def _made(rungs: Sequence[Change], taken: Taken) -> list[Change]:
    """The changes that found something to change; those that look for it with the lines where it is."""
    found = []
    for rung in rungs:
        places = taken.log.facts.get("places", {}).get(rung.name, {})
        where = ", ".join(f"{line}: {how}" for line, how in sorted(places.items()))
        if places or not rung.nothing:
            found.append(replace(rung, line=Line(f"{rung.line.text} ({where})")) if rung.nothing else rung)
    return found


def _named(rungs: Sequence[Change]) -> str:
    return AT_ONCE.join(rung.name for rung in rungs)


def _is_smaller(taken: Taken, than: Taken | None) -> bool:
    """Whether its peak is known and lower by more than runs differ."""
    own, other = (each.captured.peak_gib if each and each.captured else None for each in (taken, than))
    return own is not None and other is not None and own < (1 - RUN_SPREAD) * other
