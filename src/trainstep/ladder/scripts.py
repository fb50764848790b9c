"""The ladder of a script: the script itself is run anew for each change, which is made from outside.

The script as it is comes first, twice: what it does not repeat by itself cannot be compared with a change. A run is
compared (`judge`) with the script as it is, in another precision and under random roundings, each run when the check
asks for it; one that is wrong is never timed. One that is right takes turns with what was accepted before, B A A B (the
run that was compared is the first B), every run a process of its own, and its gain is a ratio between runs.

Timed runs are alone. Runs that are only compared go beside one another, as many as the first run's processor time and
memory leave room for (`_ahead`).
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from typing import Any

import torch

from trainstep.base.advice import Line
from trainstep.base.errors import OUT_OF_MEMORY
from trainstep.base.precision import PrecisionName
from trainstep.base.stats import ratio_of_runs, summarize, verdict
from trainstep.base.tolerance import DRAWS
from trainstep.check.script import ScriptCheck
from trainstep.check.verdict import Verdict
from trainstep.ladder.budget import OutOfTime
from trainstep.ladder.change import Change
from trainstep.ladder.ladder import Refused, Tried, is_open, ratio_fields
from trainstep.ladder.single import Script, Taken
from trainstep.ladder.trial.capture import Captured, same_training
from trainstep.ladder.trial.trial import PROBABILITIES
from trainstep.measure.environment import why_no_half
from trainstep.observe.habits import REVERSIBLE, habits_of, place_of
from trainstep.observe.lines import shown_line
from trainstep.observe.log import RankLog
from trainstep.observe.steps import phase_shares
from trainstep.rows import FINAL, PATCHED, ChangeRow
from trainstep.rows.records import Times

NOT_REPRODUCIBLE = "not reproducible"
EAGER, BY_INDICES = "with the random numbers of eager code", "with batches that draw by their indices"
MOVED = ". It ran in a copy of the folder; --in-place runs it in the folder itself"
MOST_ROUNDS, ROUND = 3, 4
"""Times that B A A B is run, at most, and its runs."""
Asked = tuple[str, Sequence[Change], tuple[PrecisionName, int] | None]
"""A run that is only compared: in words, with which changes, and under which random roundings."""


def not_judged(why: str, verdict: str = "not judged", **values: Any) -> Refused:
    """Something cannot be compared with the script as it is: why, as a sentence, and the verdict in two words."""
    return Refused("failed", why, verdict, **values)


def seen_of(log: RankLog) -> dict[str, Any]:
    """Settings that a whole run shows beside its own: why code is compiled again, the phases' shares of its steps, and
    debugging that is on."""
    files = log.facts.get("files", ())
    return {
        "recompiles": any(each["reason"] and each["step"] > 1 for each in log.recompilations),
        "shares": phase_shares(log.steps),
        "debugging": [
            {"name": name, "file": place[0], "line": place[1]} if (place := place_of(name, files)) else {"name": name}
            for name in {name for name, *_ in habits_of(log)} & {*REVERSIBLE}
        ],
    }


def times(runs: Sequence[Taken]) -> list[Sequence[float]]:
    """Milliseconds of a step of each run, by its total."""
    return [(run.ms_per_step,) for run in runs]


def in_turns(
    run: Callable[[bool], Taken],
    rounds: int,
    *,
    least: int = 1,
    begun: Taken | None = None,
    has_time: Callable[[], bool] = lambda: True,
) -> tuple[list[Taken], list[Taken]]:
    """Runs of A and of B, of which failed ones are left out, until the difference is clear or small.

    Args:
        run: runs B where it is given True, and A else.
        rounds: how often B A A B is run, at most: a machine that grows slower meanwhile does so for both alike.
        least: how often at least.
        begun: the first B, where it has been run.
        has_time: asked before each further round.
    """
    taken: tuple[list[Taken], list[Taken]] = ([], [begun] if begun else [])
    for number in range(max(rounds, least)):
        for is_b in (False, False, True) if begun and number == 0 else (True, False, False, True):
            found = run(is_b)
            if found.step_ms and not found.failure:
                taken[is_b].append(found)
        if min(map(len, taken)) < 2:
            break
        shown = times(taken[0]), times(taken[1])
        is_decided = is_lost(*shown) or not is_open(ratio_of_runs(*shown))
        if number + 1 >= least and (is_decided or not has_time()):
            break
    return taken


def is_lost(before: Sequence[Sequence[float]], own: Sequence[Sequence[float]]) -> bool:
    """True if every run was slower than all that it took turns with: more turns could at best show that it loses
    nothing."""
    return min(map(statistics.median, own)) > max(map(statistics.median, before))


@dataclass(kw_only=True)
class TriedRun(Tried):
    """A run of the script that is right."""

    taken: Taken
    turns: tuple[list[Taken], list[Taken]] | None = None
    """Runs of the script as it is and of its own, where they took turns."""


class ScriptRunner:
    """Runs a script with changes, and has it run again for what they are compared with.

    Args:
        script: runs it.
        rounds: how often a change and what was accepted take turns, at most.
        are_named: whether somebody asked for the changes: they are tried even where what was measured speaks against
            them.
        is_patched: whether a patch is to be proven at the end, for which time is kept.
    """

    tries_all_again = False

    def __init__(
        self, script: Script, rounds: int = MOST_ROUNDS, *, are_named: bool = False, is_patched: bool = False
    ) -> None:
        self.script, self.rounds, self.are_named, self.is_patched = script, rounds, are_named, is_patched
        self.beside = 1  # runs that are only compared, at once
        self._ran_ahead: dict[str, Taken] = {}
        self.first: Taken | None = None
        self.code = 0  # the first run's exit code
        self.settings: Mapping[str, Any] = {}
        self.draws = False
        """True if its models draw random numbers. Runs are compared without dropout, and with eager code's numbers."""
        self.judge: ScriptCheck | None = None  # once the script was seen to repeat itself
        self._own: PrecisionName = "fp32"
        self._precisions: dict[PrecisionName, Change] = {}  # which change brings it
        self._rounds: dict[str, int] = {}  # change → how often it took turns

    def skipped(self, change: Change) -> str:
        """Reason why it does not apply to the script, or cannot bring enough."""
        is_half = change.precision == "bf16" and not self.settings["on_gpu"] and not self.are_named
        why = change.skipped(self.settings, is_named=self.are_named)
        return why or (why_no_half(torch.device("cpu")) if is_half else "")

    def gain(self, change: Change) -> float:
        """The factor to expect of it in this script."""
        return change.gain("script", self.settings.get("shares", {}))

    def cost_s(self, made: Sequence[Change], top: Tried | None) -> float:
        """Seconds of one round, of draws in a precision that is new, and of the proofs that follow."""
        new = {each.precision for each in made if each.precision} - self._precisions.keys()
        timed = ROUND * (1 + bool(top is not None and top.changes) + self.is_patched) * self.script.run_s
        compared = (self.draws + len(new)) * self.script.run_s + DRAWS * len(new) * self.script.drawn_s
        return timed + compared / min(self.beside, 1 + DRAWS)

    def excludes(self, change: Change, other: Change) -> bool:
        """True if a change takes the other's place."""
        return other.name in change.instead_of

    def measure(self, name: str, made: Sequence[Change], top: Tried | None) -> TriedRun:
        """Run it with the changes, compare it, and time it in turns with the top."""
        if top is None:
            return self._begin()
        assert isinstance(top, TriedRun)
        before = [each for each in top.changes if not any(self.excludes(new, each) for new in made)]
        taken, captured = self._ran(self.script.run(name, [*before, *made]))
        places = {name: lines for name, lines in taken.log.facts.get("places", {}).items() if lines}
        if not (found := _found_places(made, places)):
            raise Refused("unsupported", "; ".join(dict.fromkeys(each.nothing for each in made)), "not tried")
        changes = [*before, *found]
        # A later run of what was accepted may have no lines for it: its code is compiled there.
        self.settings = {**self.settings, "places": self.settings.get("places", {}) | places}
        checked = self._compared(changes, captured, top.taken.captured)
        others, own = self._in_turns(name, top.changes, changes, begun=taken)
        self._rounds |= {each.name: max(self._rounds.get(each.name, 1), len(own) // 2) for each in found}
        tried = self._tried(changes, taken, checked, own)
        tried.turns = None if top.changes else (others, own)
        tried.made, tried.gain = found, ratio_of_runs(times(others), times(own))
        return tried

    def row(self, name: str, values: Mapping[str, Any]) -> ChangeRow:
        """Row of the change."""
        environment = self.first.log.facts.get("environment", {}) if self.first else {}
        case = {"workload": self.script.command.name, "change": name, "environment": environment, "between_runs": True}
        return ChangeRow(**{**case, **values})

    def proof(self, first: Tried, top: Tried, accepted: int) -> ChangeRow | None:
        """All that was accepted in turns with the script as it is, where several gains were multiplied."""
        if len(top.changes) < 2 or accepted < 2:
            return None
        assert isinstance(top, TriedRun)
        try:
            before, own = top.turns = self._in_turns(FINAL, (), top.changes)
        except Refused as refused:
            return self.row(FINAL, refused.values)
        except OutOfTime:
            return self.row(FINAL, Refused("unsupported", "the budget had no time for it", "not tried").values)
        ratio, lines = ratio_of_runs(times(before), times(own)), "; ".join(each.line.text for each in top.changes)
        values = self._tried(top.changes, top.taken, None, own).values | ratio_fields("speedup", ratio)
        return self.row(FINAL, {**values, "verdict": verdict(ratio), "accepted": True, "code": lines})

    def check_sources(
        self, sources: Mapping[str, str], written: Sequence[Change], top: Tried | None = None
    ) -> ChangeRow:
        """A row for the script with other sources and nothing changed from outside: compared, then timed against it, by
        as many runs as decided about the changes. One that does what the top did, in its time, is one more run of it.

        Args:
            sources: path → text.
            written: the changes that the sources have.
            top: what was accepted.
        """
        taken = self.script.run(PATCHED, sources=sources, without_dropout=self.draws)
        try:
            _, captured = self._ran(taken)
            found = self._right(self._judge.judge(captured, self._precision(written)))
            least = max((self._rounds.get(each.name, 1) for each in written), default=1)
            begun = None if self.draws else taken
            known = turns_with(begun, top) if begun and top and top.names == {each.name for each in written} else None
            before, own = known or self._in_turns(PATCHED, (), (), sources, begun=begun, least=least)
        except Refused as refused:
            return self.row(PATCHED, refused.values)
        ratio = ratio_of_runs(times(before), times(own))
        values = self._tried([], taken, found, own).values | ratio_fields("speedup", ratio)
        return self.row(PATCHED, {**values, "verdict": verdict(ratio), "accepted": verdict(ratio) == "faster"})

    def _begin(self) -> TriedRun:
        """Run it as it is, twice, and see whether it repeats itself."""
        first = self.script.run("the script as it is")
        self.code = first.code
        if first.captured is None or first.failure:
            why = first.failure + MOVED * (self.script.copies is not None and "No such file" in first.failure)
            raise Refused("failed", why, **self._tried([], first, None, ()).values)
        self.first = first
        self.settings = first.log.facts["settings"] | seen_of(first.log)
        self._own, self.draws = _precision_of(self.settings), self.settings["draws"]
        self.beside = 1 if self.settings["picks_by_time"] else self.script.beside(first)
        try:
            if self.script.changed:
                names = ", ".join(self.script.changed[:3]) + " and more" * (len(self.script.changed) > 3)
                raise not_judged(
                    f"the first run changed {names} of the folder, and "
                    "the next would begin with that: leave out --in-place, so that each run has a copy of it",
                    NOT_REPRODUCIBLE,
                )
            repeat = self._repeated(first.captured)
        except Refused as refused:
            raise Refused(**{**self._tried([], first, None, ()).values, **refused.values}) from None
        return self._tried([], first, repeat, ())

    def _repeated(self, first: Captured) -> Verdict:
        if broken := first.what_is_not_finite:
            raise not_judged(f"{broken}: nothing can be held against a script that does not train")
        plain: Asked = ("the script as it is, without dropout", (), None)
        once_more: Asked = ("the same again", (), None)
        # A GPU seldom repeats itself to the bit, and changes in the script's own precision need the draws anyhow.
        drawn = [self._drawn(self._own, seed) for seed in range(DRAWS * self.settings["on_gpu"])]
        self._ahead([plain] * self.draws + [once_more, *drawn])
        reference = self._captured(*plain) if self.draws else first
        again = self._captured(*once_more)
        if again.weights != reference.weights:
            raise not_judged(
                "two runs from the same seeds start from other weights: they are drawn from another seed, or the "
                "second run resumes what the first one wrote, which a copy for each run (without --in-place) prevents",
                NOT_REPRODUCIBLE,
            )
        judge = ScriptCheck(reference, [again], self._own, lambda *drawn: self._captured(*self._drawn(*drawn)))
        repeat = judge.of_repeat()
        if repeat.gradients is not None and repeat.gradients.is_vacuous:
            raise not_judged(
                "what rounding alone does to its first gradients is "
                f"{repeat.gradients.gradient_allowed:.2g} of them: no change could be told from it"
            )
        if not repeat.is_right:
            raise not_judged(
                f"two runs from the same seeds differ by more than rounding: {repeat}. Look for data or noise that is "
                "drawn from another seed (numpy's default_rng, the clock), or for threads that race",
                NOT_REPRODUCIBLE,
            )
        self.judge = judge
        return repeat

    @property
    def _judge(self) -> ScriptCheck:
        assert self.judge is not None, "the script was run again"
        return self.judge

    def _ran(self, taken: Taken) -> tuple[Taken, Captured]:
        """The run, and what it left; `Refused` where it failed."""
        if taken.failure or taken.captured is None:
            raise Refused("out of memory" if OUT_OF_MEMORY.search(taken.failure) else "failed", taken.failure)
        return taken, taken.captured

    def _compared(self, changes: Sequence[Change], captured: Captured, accepted: Captured | None) -> Verdict:
        """Verdict on a run with these changes; `Refused` where it is wrong, or nothing can be told of it.

        Args:
            captured: what it left.
            accepted: what the run left that it was changed from.
        """
        precision = self._precision(changes)
        is_known = precision in (self._own, *self._precisions)
        self._precisions |= {each.precision: each for each in changes if each.precision}
        own: Asked = (f"{changes[-1].name}, without dropout", changes, None)
        drawn = [] if is_known else [self._drawn(precision, seed) for seed in (None, *range(DRAWS))]
        self._ahead([own] * self.draws + drawn)
        if self.draws:
            captured, accepted = self._captured(*own), None
        found = self._judge.judge(captured, precision, accepted)
        if found.gradients is not None and found.gradients.is_vacuous:
            raise not_judged(f"what {precision}'s rounding alone does to its first gradients is as large as they are")
        return self._right(found)

    def _right(self, found: Verdict) -> Verdict:
        if not found.is_right:
            raise Refused("wrong", str(found), **self._columns(found))
        return found

    def _precision(self, changes: Sequence[Change]) -> PrecisionName:
        return next((each.precision for each in reversed(changes) if each.precision), self._own)

    def _captured(self, what: str, changes: Sequence[Change], rounding: tuple[PrecisionName, int] | None) -> Captured:
        taken = self._ran_ahead.pop(what, None)
        if taken is None or taken.captured is None:  # beside others it may have failed for want of memory, or a port
            taken = self._run(what, changes, rounding)
        if taken.captured is None:
            raise not_judged(f"{what} could not be run: {taken.failure}")
        return taken.captured

    def _run(self, what: str, changes: Sequence[Change], rounding: tuple[PrecisionName, int] | None) -> Taken:
        return self.script.run(what, changes, rounding=rounding, without_dropout=self.draws)

    def _ahead(self, asked: Sequence[Asked]) -> None:
        """Make runs that will be asked for beside one another, where some fit."""
        if min(len(asked), self.beside) < 2:
            return
        alone_s = self.script.run_s
        with ThreadPoolExecutor(self.beside) as pool:
            running = {pool.submit(self._run, *each): each[0] for each in asked}
            try:
                done, _ = wait(running, return_when=FIRST_EXCEPTION)
                self._ran_ahead = {running[each]: each.result() for each in done}
            except BaseException:  # the threads end when their runs do
                self.script.leader.is_over = True
                pool.shutdown(wait=False, cancel_futures=True)
                raise
        self.script.run_s = alone_s

    def _drawn(self, precision: PrecisionName, seed: int | None) -> Asked:
        """The script in a precision, by itself or under random roundings."""
        change = [self._precisions[precision]] if precision != self._own else []
        if seed is None:
            return f"the script in {precision}", change, None
        return f"roundings of {precision} at random, {seed + 1}", change, (precision, seed)

    def _in_turns(
        self,
        what: str,
        before: Sequence[Change],
        own: Sequence[Change],
        sources: Mapping[str, str] = {},
        *,
        least: int = 1,
        begun: Taken | None = None,
    ) -> tuple[list[Taken], list[Taken]]:
        """Runs of what was accepted before and of its own."""

        def run(is_own: bool) -> Taken:
            words = what if is_own else "what was accepted before" if before else "the script as it is"
            changes, text = (own, sources) if is_own else (before, {})
            is_judged = not self.settings["on_gpu"]  # on a CPU what is copied slows the steps, so it is in all runs
            return self.script.run(f"{words}, timed", changes, sources=text, is_judged=is_judged)

        def has_time() -> bool:
            return self.script.budget.left_s >= self.cost_s((), None)

        taken = in_turns(run, self.rounds, least=least, begun=begun, has_time=has_time)
        if not all(taken):
            raise not_judged(
                f"{what}: when it took turns with what was accepted before, no run of one side came to its end"
            )
        return taken

    def _tried(self, changes: Sequence[Change], taken: Taken, found: Verdict | None, own: Sequence[Taken]) -> TriedRun:
        """A run that may be a row.

        Args:
            taken: the run that was compared.
            found: what was found of it.
            own: all runs that were timed; by default that one.
        """
        runs = list(own) or ([taken] if taken.step_ms else [])
        peak = taken.captured.peak_gib if taken.captured is not None else None
        values = self._columns(found) if found is not None else {}
        if runs:
            by_run = [run.ms_per_step for run in runs]
            samples: dict[str, Any] = {"step": [each for run in runs for each in run.step_ms], "runs": by_run}
            values |= {
                "times": {"step": Times.of(summarize(by_run))},
                "n": len(samples["step"]),
                "samples": samples,
                "first_step_ms": statistics.median([run.first_step_ms or 0.0 for run in runs]),
                "peak_gib": peak,
                "runs": len(runs),
            }
            if taken.captured is not None:
                samples["training_loss"] = list(taken.captured.losses)
                values |= {"updates": len(taken.captured.losses), "in_first_epoch": taken.is_in_first_epoch}
                values["is_whole"] = (taken.log.ended or {}).get("how") == "returned"
        return TriedRun(changes=list(changes), made=[], values=values, peak=peak, taken=taken)

    def _columns(self, found: Verdict) -> dict[str, Any]:
        """The fields of a row that say what was found; a budget that says nothing is left out."""
        columns = {name: value for name, value in found.columns().items() if not name.startswith("float32_")}
        drops = self.judge is not None and self.judge.reference.said.get(PROBABILITIES)
        how = [("without dropout" if drops else EAGER)] * self.draws
        how += [BY_INDICES] * bool(self.first and self.first.log.facts.get("draws_batches"))
        return columns | {"compared": ", ".join(how) or None}


def turns_with(taken: Taken, top: Tried | None) -> tuple[list[Taken], list[Taken]] | None:
    """The turns that the top took with the script as it is, with a run of the patched script as one more of the top;
    None where that trains otherwise, by a bit."""
    if not isinstance(top, TriedRun) or top.turns is None or taken.captured is None or top.taken.captured is None:
        return None
    is_same = same_training(taken.captured, top.taken.captured)
    return (top.turns[0], [*top.turns[1], taken]) if is_same else None


def _found_places(made: Sequence[Change], places: Mapping[str, Mapping[str, str]]) -> list[Change]:
    """The changes that found something to change; those that look for it with the lines where it is."""
    found = []
    for change in made:
        own = places.get(change.name, {})
        divided = [(*line.rsplit(":", 1), how) for line, how in sorted(own.items())]
        where = ", ".join(f"{shown_line(file, int(number))}: {how}" for file, number, how in divided)
        if own or not change.nothing:
            found.append(replace(change, line=Line(f"{change.line.text} ({where})")) if change.nothing else change)
    return found


def _precision_of(settings: Mapping[str, Any]) -> PrecisionName:
    """Precision that a script computes in."""
    half: dict[str, PrecisionName] = {"bfloat16": "bf16", "float16": "fp16"}
    named = [*settings["autocast"], *(name for model in settings["models"] for name in model["dtypes"])]
    for name, precision in half.items():
        if name in named:
            return precision
    return "tf32" if settings["on_gpu"] and settings["matmul"] != "highest" else "fp32"
