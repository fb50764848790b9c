"""What a script's runs are held against: itself, again, in another precision, and under random roundings, each run when
the judge asks for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from trainstep.base.precision import PrecisionName
from trainstep.ladder.change import Change
from trainstep.ladder.judge import ScriptJudge, ScriptVerdict
from trainstep.ladder.single import Script
from trainstep.ladder.trial.capture import Captured

NOT_REPRODUCIBLE = "not reproducible"


class CannotJudge(Exception):
    """Something cannot be held against the script as it is: why, as a sentence, and the verdict in two words."""

    def __init__(self, why: str, verdict: str = "not judged") -> None:
        super().__init__(why)
        self.verdict = verdict


class Judging:
    """Judges runs of a script, and has it run for that.

    Args:
        script: runs it.
        rungs: of which some change its precision.
        settings: what its first run said of itself.
    """

    def __init__(self, script: Script, rungs: Sequence[Change], settings: Mapping[str, Any]) -> None:
        self._script, self._rungs = script, rungs
        self._own = _precision_of(settings)
        self.drops = any(model["drops"] for model in settings["models"])
        """Whether it drops something at random; runs are held against each other without."""
        self._judge: ScriptJudge | None = None

    def begin(self, baseline: Captured) -> ScriptVerdict:
        """Run the script again, and see whether it repeats itself.

        Raises:
            CannotJudge: it does not, or not well enough for anything to be told from it.
        """
        if broken := baseline.what_is_not_finite:
            raise CannotJudge(f"{broken}: nothing can be held against a script that does not train")
        reference = self._captured("the script as it is, without dropout") if self.drops else baseline
        again = self._captured("the same again")
        if again.weights != reference.weights:
            raise CannotJudge(
                "two runs from the same seeds start from other weights: they are drawn from another seed, or the "
                "second run resumes what the first one wrote, which --cwd-copy prevents",
                NOT_REPRODUCIBLE,
            )
        self._judge = ScriptJudge(reference, [again], self._own, self._draw)
        repeat = self._judge.of_repeat()
        if not repeat.is_judged:
            raise CannotJudge(
                "what rounding alone does to its first gradients is "
                f"{repeat.gradients.gradient_allowed:.2g} of them: no change could be told from it"
            )
        if not repeat.is_right:
            raise CannotJudge(
                f"two runs from the same seeds differ by more than rounding: {repeat}. Look for data or noise that is "
                "drawn from another seed (numpy's default_rng, the clock), or for threads that race",
                NOT_REPRODUCIBLE,
            )
        return repeat

    def of(self, rungs: Sequence[Change], captured: Captured, kept: Captured | None) -> ScriptVerdict:
        """Of a run with these changes.

        Args:
            captured: what it left.
            kept: what the run left that it was changed from.

        Raises:
            CannotJudge: what rounding does to it is as large as what is compared, or a run failed that it needs.
        """
        if self.drops:
            captured, kept = self._captured(f"{rungs[-1].name}, without dropout", rungs), None
        precision = self._precision(rungs)
        found = self._begun.judge(captured, precision, kept)
        if not found.is_judged:
            raise CannotJudge(f"what {precision}'s rounding alone does to its first gradients is as large as they are")
        return found

    def of_sources(self, rungs: Sequence[Change], captured: Captured) -> ScriptVerdict:
        """Of a run, without dropout, of other sources that have these changes."""
        return self._begun.judge(captured, self._precision(rungs))

    @property
    def _begun(self) -> ScriptJudge:
        assert self._judge is not None, "the script was run again"
        return self._judge

    def _precision(self, rungs: Sequence[Change]) -> PrecisionName:
        return next((rung.precision for rung in reversed(rungs) if rung.precision), self._own)

    def _captured(
        self, what: str, rungs: Sequence[Change] = (), rounding: tuple[PrecisionName, int] | None = None
    ) -> Captured:
        taken = self._script.run(what, rungs, rounding=rounding, without_dropout=self.drops)
        if taken.captured is None:
            raise CannotJudge(f"{what} could not be run: {taken.failure}")
        return taken.captured

    def _draw(self, precision: PrecisionName, seed: int | None) -> Captured:
        """The script in a precision, by itself or under random roundings."""
        change = [rung for rung in self._rungs if rung.precision == precision and precision != self._own]
        if seed is None:
            return self._captured(f"the script in {precision}", change)
        return self._captured(f"roundings of {precision} at random, {seed + 1}", change, (precision, seed))


def _precision_of(settings: Mapping[str, Any]) -> PrecisionName:
    """What a script computes in."""
    half: dict[str, PrecisionName] = {"bfloat16": "bf16", "float16": "fp16"}
    named = [*settings["autocast"], *(name for model in settings["models"] for name in model["dtypes"])]
    for name, precision in half.items():
        if name in named:
            return precision
    return "tf32" if settings["on_gpu"] and settings["matmul"] != "highest" else "fp32"
