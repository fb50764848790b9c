"""Is a changed script the same training? Held against the script as it is: the first update's gradients, the loss
of every update, how far all weights have moved at the end, and what else the run shows.

Gradients are compared as the check of steps compares them (`check.gradients`): per parameter, per row and by
their scale. What all may be off by is measured on the script itself: it is run again
with results rounded once more at random (`RandomRounding`), all else being as the script has it. A change of precision
is judged by the script with that change alone and random roundings on top, whose difference is what roundings in that
precision do; what the change itself is off by counts only where roundings explain it. As everywhere, twice that and one
rounding are allowed.

An optimizer that gets the very gradients that it got before is held to its first update as well, at float32's
tolerance (`check.updates`): what it does otherwise shows there long before it shows in the weights at the end.

What else a run shows (`ladder.trial.shown`) is compared as buffers are (`check.buffers`): buffers after the first pass
and at the end, copies of the weights, and outputs in evaluation. In fp16 it is not, where a pass that overflows moves
buffers once more. The modes of models' calls and the elements of dropout must be equal, and files that the script
writes must be written again, where the script repeats them.

Roundings grow as training goes on, and so do the differences of the random runs: losses are held against those at the
same update, and weights at the end. Where rounding alone moves what is compared by half of itself, nothing can be held
against it, and that is said instead.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import TYPE_CHECKING

import torch

from trainstep.base.precision import PrecisionName
from trainstep.base.tolerance import (
    DRAWS,
    FLOAT32_LOSES,
    NEAR,
    SCRIPT_DRAWS,
    VACUOUS,
    allowed_error,
    headroom,
    larger,
    one_rounding,
)
from trainstep.check import buffers
from trainstep.check.gradients import Error, Rounding, compare
from trainstep.check.parts import norm
from trainstep.check.updates import compare_updates, named
from trainstep.check.verdict import Deviation, Part, Verdict

if TYPE_CHECKING:
    from trainstep.ladder.trial.capture import Captured

Draw = Callable[[PrecisionName, "int | None"], "Captured"]
"""Runs the script in a precision: without a seed as it is, with one under random roundings."""


@dataclass(frozen=True)
class _Apart:
    """Differences of one run from another; of a large model they take a while to compute."""

    gradients: Rounding
    losses: list[float]
    moved: float
    shown: dict[str, buffers.Apart]

    @staticmethod
    def between(found: Captured, reference: Captured) -> _Apart:
        return _Apart(
            Rounding.between(found.gradients, reference.gradients),
            _losses_apart(found, reference),
            _moved_apart(found, reference),
            _shown_apart(found, reference),
        )


@dataclass
class _Usual:
    """Error that rounding gives each of them, in one precision."""

    draws: int = 0
    gradients: Rounding = field(default_factory=Rounding)
    losses: list[float] = field(default_factory=list)  # by update, relative
    moved: float = 0.0
    shown: dict[str, float] = field(default_factory=dict)

    def take(self, apart: _Apart) -> None:
        """Take one more difference: the largest counts, and what is no number allows anything."""
        self.gradients = Rounding.most([self.gradients, apart.gradients])
        self.losses = [larger(*pair) for pair in zip_longest(self.losses, apart.losses, fillvalue=0.0)]
        self.moved = larger(self.moved, apart.moved)
        self.shown = {name: larger(self.shown.get(name, 0.0), each.error) for name, each in apart.shown.items()}


class ScriptCheck:
    """Checks runs of one script.

    Args:
        reference: the script as it is.
        repeats: the same again.
        own: the precision that the script computes in.
        draw: runs it.
    """

    def __init__(self, reference: Captured, repeats: Iterable[Captured], own: PrecisionName, draw: Draw) -> None:
        self.reference, self.repeats, self.own, self._draw = reference, list(repeats), own, draw
        self._usual: dict[PrecisionName, _Usual] = {}
        self._plain: dict[PrecisionName, Captured] = {own: self.reference}
        self._changed: dict[PrecisionName, _Apart] = {}  # what a change of precision alone is off by
        self._repeated = [_Apart.between(each, self.reference) for each in self.repeats]

    def of_repeat(self) -> Verdict:
        """Check the script run again: it should repeat itself to within rounding.

        Random roundings are drawn only for one that differs by more than one rounding, which is allowed at least.
        """
        verdicts = [self._verdict(each, self.own, _Usual()) for each in self.repeats]
        if not all(each.is_right for each in verdicts):
            verdicts = [self._verdict(each, self.own, self._measured(self.own, DRAWS)) for each in self.repeats]
        return max(verdicts, key=lambda each: (not each.is_right, _gradients(each).severity))

    def judge(self, found: Captured, precision: PrecisionName, kept: Captured | None = None) -> Verdict:
        """Check a changed run.

        Args:
            kept: the run that it was changed from, whose first update it takes too where their gradients are equal;
                the reference by default.
        """
        verdict, update = self._judge(found, precision), _update(found, kept or self.reference)
        return verdict if update is None else replace(verdict, parts={"update": update, **verdict.parts})

    def _judge(self, found: Captured, precision: PrecisionName) -> Verdict:
        verdict = self._verdict(found, precision, self._with_repeats(precision, DRAWS))
        gradients = _gradients(verdict)
        is_near = gradients.worst <= NEAR * gradients.worst_allowed
        if not verdict.is_right and not verdict.faults and is_near:
            verdict = self._verdict(found, precision, self._with_repeats(precision, SCRIPT_DRAWS))
        return verdict

    def _with_repeats(self, precision: PrecisionName, draws: int) -> _Usual:
        """Errors of rounding, and of the script where it does not repeat itself."""
        usual = self._measured(precision, draws)
        for each in self._repeated:
            usual.take(each)
        return usual

    def _measured(self, precision: PrecisionName, draws: int) -> _Usual:
        """Errors of rounding in a precision, and of the change to it where roundings explain that."""
        if precision not in self._plain:
            self._plain[precision] = self._draw(precision, None)
        plain, drawn = self._plain[precision], self._usual.setdefault(precision, _Usual())
        while drawn.draws < draws:
            drawn.take(_Apart.between(self._draw(precision, drawn.draws), plain))
            drawn.draws += 1
        usual, one = replace(drawn), one_rounding(precision)
        is_explained = precision == self.own  # plain is the reference itself
        if is_explained or compare(plain.gradients, self.reference.gradients, usual.gradients, one).is_right:
            if precision not in self._changed:
                self._changed[precision] = _Apart.between(plain, self.reference)
            usual.take(self._changed[precision])
        return usual

    def _verdict(self, found: Captured, precision: PrecisionName, usual: _Usual) -> Verdict:
        one, factor = one_rounding(precision), FLOAT32_LOSES if precision == "fp32" else 1.0
        deviation = compare(found.gradients, self.reference.gradients, usual.gradients.times(factor), one)
        most, each_loss = 0.0, [("losses", 0.0, one)]
        for apart, known in zip_longest(_losses_apart(found, self.reference), usual.losses, fillvalue=0.0):
            most = max(most, known)
            each_loss.append(("losses", apart, allowed_error(factor * headroom(1) * most, one)))
        losses = _part(*max(each_loss, key=_severity))
        if len(found.losses) != len(self.reference.losses):
            losses = Part(math.inf, 0.0, "losses")
        moved_allowed = allowed_error(factor * usual.moved, one)
        moved = _part("weights at the end", _moved_apart(found, self.reference), moved_allowed)
        parts = {"losses": losses, "moved": moved}
        shown = [
            (name, each.error / size, (2 * factor * headroom(each.count) * usual.shown.get(name, 0.0) + floor) / size)
            for name, each in _shown_apart(found, self.reference).items()
            for size, floor in [(each.change or 1.0, each.rounded(one))]
        ]
        if shown and precision != "fp16":  # where a pass that overflows moves buffers once more
            parts["shown"] = _part(*max(shown, key=_severity))
        return Verdict(deviation, parts=parts, faults=tuple(self._faults(found)))

    def _faults(self, found: Captured) -> Iterator[str]:
        """Differences without a number, in what the script repeats."""
        reference = self.reference
        if found.weights != reference.weights:
            yield "training starts from other weights"
        for what, expected in reference.said.items():
            own = found.said.get(what, expected)
            if own != expected and all(each.said.get(what) == expected for each in self.repeats):
                yield f"{what}: {own}, in place of {expected}"
        if missing := sorted(reference.files.intersection(*(each.files for each in self.repeats)) - found.files):
            yield f"it does not write {', '.join(missing[:3])}{' and more' * (len(missing) > 3)}"


def _part(name: str, error: float, allowed: float) -> Part:
    """A quantity of a whole training; where roundings alone move it by half of itself, any finite one is right."""
    return Part(error, allowed if allowed < VACUOUS else math.inf, name)


def _gradients(verdict: Verdict) -> Deviation:
    assert verdict.gradients is not None, "a script's are compared"
    return verdict.gradients


def _severity(quantity: tuple[str, float, float]) -> tuple[bool, float, float]:
    """Larger where an error is worse for what it is allowed: what is wrong, NaN first, then what uses more of it.

    A quantity that says nothing uses its budget too. It must not hide behind one that is right.
    """
    name, error, allowed = quantity
    return not _part(name, error, allowed).is_right, Part(error, allowed).share, error


def _update(found: Captured, kept: Captured) -> Part | None:
    own, other = found.gradients.by_name, kept.gradients.by_name
    if own.keys() != other.keys() or not all(torch.equal(own[name], other[name]) for name in own):
        return None
    if found.first_moved.keys() != kept.first_moved.keys():
        return None
    return named(compare_updates(found.first_moved, kept.first_moved, kept.sizes), "the first update")


def _losses_apart(found: Captured, reference: Captured) -> list[float]:
    pairs = zip(found.losses, reference.losses, strict=False)
    return [abs(own - expected) / (abs(expected) or 1.0) for own, expected in pairs]


def _shown_apart(found: Captured, reference: Captured) -> dict[str, buffers.Apart]:
    """Values that the reference shows, by name, and those that it leaves alone and this run does not."""
    modules = found.shown.modules | reference.shown.modules
    moved = found.shown.after.keys() & reference.shown.unchanged
    known = dict(buffers.apart(replace(found.shown, modules=modules), reference.shown))
    return known | {name: buffers.Apart(math.inf, 1.0, 1, None) for name in moved}


def _moved_apart(found: Captured, reference: Captured) -> float:
    """‖Δ − Δ_ref‖ / ‖Δ_ref‖ over all weights; infinite where other ones were trained, or in other numbers of steps."""
    if found.moved.keys() != reference.moved.keys() or found.updates != reference.updates:
        return math.inf
    square = error = 0.0
    for name, expected in reference.moved.items():
        square += norm(expected) ** 2
        error += Error.between(found.moved[name], expected).norm ** 2
    return math.sqrt(error / square) if square else (math.inf if error else 0.0)
