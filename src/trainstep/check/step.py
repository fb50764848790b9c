"""Is a training step right? Its loss, gradients, buffers and updates, held against the same workload's plain step.

A step is judged three times, and no speed is shown of one that fails any:

1. In float32, whatever its precision: what it changes otherwise (attention, compilation, loss, checkpointing) shows
   there at about 1e-5. The precision itself is not judged here.
2. In its own precision, per parameter and per row, at twice what the plain step is off by in that precision plus one
   rounding (`Reference.compare`). So are buffers that the pass changes, such as running statistics (`buffers`).
3. Twelve updates of its optimizer from the reference's weights and gradients, at float32's tolerance, or at that of the
   16 bits that weights are stored in (`updates`).

A step that updates in backward is judged in a backward pass that spoils what it would update, and by updates that it
makes in one.

Gradients are compared with the initial weights before the step is timed, and again with trained weights afterwards, in
the very step that was timed. Before it is timed, `PASSES` further passes over other batches are compared, by sketches,
and in full where these do not show that they are right: a gradient that is missing in every tenth pass, or of a rare
token alone, shows there.

A model with dropout has other gradients under other masks. Every computation starts from one seed, which gives eager
code of one precision the same masks. Compiled code draws other numbers, so it is compiled once more for the check, with
eager code's; so it is where the model draws numbers of its own, such as which labels to leave out. Another precision,
or a fused kernel, drops other elements on a GPU: where a step is off as it is, both sides are compared without dropout,
and by how many elements they would drop from, with which probability. A dropout of the author's own, which
`without_dropout` does not reach, is off in eval mode. A verdict says so. How a step drops, its float32 form shows over
many states of the generators (`draws`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from contextlib import nullcontext
from functools import partial
from typing import Any, Literal

import torch
from torch import nn

from trainstep.base.config import EVERY_BLOCK, FORM, StepConfig, settings_with
from trainstep.base.precision import PRECISIONS
from trainstep.check.draws import Draws, still_gradients
from trainstep.check.dropout import drops_otherwise, eager_random, without_dropout
from trainstep.check.gradients import Gradients
from trainstep.check.reference import TRAINED_STEPS, Reference
from trainstep.check.reproducible import NotReproducibleError
from trainstep.check.updates import compare_updates, named, take_updates
from trainstep.check.verdict import Deviation, Part, Verdict
from trainstep.measure.outcome import Failure, attempt
from trainstep.step.training_step import TrainingStep, build_step
from trainstep.step.weights import load, load_buffers
from trainstep.step.workload import WorkloadSource

Compared = Literal["as it is", "with eager code's random numbers", "without dropout", "in eval mode"]
"""Ways in which gradients were held against the reference."""
RIGHT_UNCOMPILED = "the same step is right without torch.compile"
"""Note on a compiled step that is wrong, where its eager form is right."""
WITH_CHECKPOINTING = "the plain step with its checkpointing"
COMPUTED_AGAIN = "the plain step with every block computed again"
WITH_FUSED_ATTENTION = "the plain step with PyTorch's fused attention"
FITTING = "the first step that fits"
"""Name of the reference where the plain step does not fit."""
OTHER_BATCHES = "other ones in every build; gradients are compared on the reference's"
MOST_UNLIKE = 3
"""Passes of a step that are compared in full, at most, where sketches do not show that they are right."""
START, TRAINED = 0, 1
"""The places of a `Reference`."""


def plain_form(config: StepConfig) -> StepConfig:
    """The same training by the plainest means: fp32, eager, nothing fused."""
    plain, names = StepConfig(), settings_with(FORM, without=("optimizer",) if config.optimizer == "sgd" else ())
    return dataclasses.replace(config, **{name: getattr(plain, name) for name in names})


def first_form(source: WorkloadSource, config: StepConfig) -> StepConfig:
    """Form that a ladder starts from: the plain form, with the workload's weights as they come."""
    return dataclasses.replace(plain_form(config), precision=source.own_precision)


class StepCheck:
    """Checks steps of one workload against its plain step.

    Where that does not fit, the reference is the same computation with every block computed again, or with the step's
    own checkpointing; then with PyTorch's fused attention, whose memory is linear in the context, but whose inner
    roundings no random ones show; and where none of these fits, or the workload's attention is its own, the first step
    that does.
    """

    def __init__(self, source: WorkloadSource, plain: StepConfig) -> None:
        self.source, self.plain = source, plain
        self._too_large: set[StepConfig] = set()
        self._references: tuple[Reference, Reference] | None = None
        self._unlike = ""
        """Reason why the workload can be held against nothing; empty where it can."""
        self._held_against = ""
        self._not_plain = ""
        """Reason why the plain step is not the reference; empty where it is."""
        self._still: Reference | None = None
        """The plain step in eval mode, where a step was held against that."""
        self._plain_draws: Draws | None = None

    @property
    def reference(self) -> Reference:
        """The plain step as it is."""
        assert self._references is not None, "a step was judged before"
        return self._references[0]

    def _refer_to(self, plain: StepConfig) -> tuple[Reference, Reference]:
        """The plain step as it is, and with its dropout switched off: the same one where it has none."""
        if self._unlike:
            raise NotReproducibleError(self._unlike)
        try:
            with without_dropout() as seen:
                without = Reference(self.source, plain)
            return Reference(self.source, plain) if seen.calls else without, without
        except NotReproducibleError as error:
            self._unlike = str(error)  # the error itself would keep weights and gradients in memory, by its traceback
            raise

    @property
    def is_stood_in_for(self) -> bool:
        """True if the reference is some step, as no plain one fits."""
        return self._held_against.startswith(FITTING)

    def _choose_reference(self, config: StepConfig) -> tuple[Reference, Reference]:
        """The plainest form that fits, each tried once, or else this step."""
        for form, called in self._forms(config).items():
            if form in self._too_large:
                continue
            found = attempt(partial(self._refer_to, form))
            if not isinstance(found, Failure):
                self._held_against = called and f"{called}, {self._why_not}"
                return found
            self._too_large.add(form)
            self._not_plain = self._not_plain or f"{found.status}: {found.reason}"
        found = self._refer_to(config)
        self._held_against = f"{FITTING}, {self._why_not}"
        return found

    def _forms(self, config: StepConfig) -> dict[StepConfig, str]:
        """The plain step and what is nearest to it and smaller, with what each is called."""
        forms = {self.plain: ""}
        for checkpointing, called in {EVERY_BLOCK: COMPUTED_AGAIN, config.checkpointing: WITH_CHECKPOINTING}.items():
            forms.setdefault(dataclasses.replace(self.plain, checkpointing=checkpointing), called)
        if self.source.is_builtin:
            for form in list(forms):
                forms.setdefault(dataclasses.replace(form, attention="sdpa"), WITH_FUSED_ATTENTION)
        return forms

    @property
    def _why_not(self) -> str:
        return f"as the plain one ended with {self._not_plain.partition(':')[0]}"

    def start(self, config: StepConfig) -> tuple[TrainingStep, Verdict]:
        """Build a step and judge it in float32, with its initial weights, and by its updates.

        Raises:
            UsageError: the reference's loss or gradients are not finite, so nothing can be compared with them.
            NotReproducibleError: the workload does not compute the same twice.
        """
        if self._references is None:
            self._references = self._choose_reference(config)
        reference, precision = self.reference, self.reference.config.precision
        notes = {"reference": self._held_against, "unseen_rows": reference.unseen}
        float32: Verdict | None = None
        if config.precision == precision and PRECISIONS[precision].is_half:
            notes["not_in_float32"] = self._not_plain
        if config.precision != precision:
            tried = attempt(lambda: self._judge_twice(dataclasses.replace(config, precision=precision)))
            if isinstance(tried, Failure):
                notes["not_in_float32"] = f"{tried.status}: {tried.reason}"
            else:
                float32 = tried
        step = build_step(self.source, config)
        own, compared = self._judge_compiled(step, START)
        update = self._update(step)
        if float32 is not None:
            update = max(update, float32.parts["update"], key=lambda each: each.share)
            notes |= float32.notes
        if reference.batches_differ:
            notes["batches"] = OTHER_BATCHES
        notes |= _how(compared)
        in_float32 = float32.gradients if float32 else None
        return step, Verdict(own, in_float32, {"update": update}, notes={k: v for k, v in notes.items() if v})

    def end(self, step: TrainingStep, verdict: Verdict) -> Verdict:
        """Judge the same step, after it was timed, with trained weights."""
        load(step.module, self.reference.places[TRAINED].state)
        own, compared = self._judge_compiled(step, TRAINED)
        worst = max(filter(None, (verdict.gradients, own)), key=lambda each: each.severity)
        return dataclasses.replace(verdict, gradients=worst, notes={**verdict.notes, **_how(compared)})

    def judge(self, config: StepConfig) -> Verdict:
        """Judge a step that is not timed: start, some training, end."""
        step, verdict = self.start(config)
        if verdict.is_right:
            for _ in range(TRAINED_STEPS):
                step(step.next_batch())
            verdict = self.end(step, verdict)
        return verdict

    def _judge_twice(self, config: StepConfig) -> Verdict:
        step = build_step(self.source, config)
        own, compared = self._judge_compiled(step, START)
        return self.end(step, Verdict(own, parts={"update": self._update(step)}, notes=_how(compared)))

    def _judge(self, step: TrainingStep, place: int) -> tuple[Deviation, Compared]:
        assert self._references is not None, "start comes first"
        reference, without = self._references
        draws, drops = reference.draws_numbers, reference is not without
        is_same = step.config.precision == reference.config.precision
        compared: Compared = "as it is"
        found: Any = None
        if draws and step.config.compile != "off" and (is_same or not drops):
            found, compared = self._hold_as_eager(step.config, reference, place), "with eager code's random numbers"
        elif is_same or not drops:
            found = self._hold(step, reference, place)
        if drops and (found is None or not found.is_right):
            found, draws_still = self._hold_without_dropout(step.config, without, place)
            compared, draws = "without dropout", draws_still or without.draws_numbers
        if draws and not found.is_right and not found.fault:
            found, compared = self._hold_still(step.config, place), "in eval mode"
        if reference.draws_numbers and place == START and is_same and found.is_right:
            found = dataclasses.replace(found, fault=self._draws_otherwise(step))
        return found, compared

    def _draws_otherwise(self, step: TrainingStep) -> str:
        """Say how the step draws otherwise than the plain one may; empty where it does not."""
        batch = step.place(self.reference.places[START].batch)
        if self._plain_draws is None:
            self._plain_draws = Draws.of(self._build(self.reference.config, self.reference, START), batch)
        fault = Draws.of(step, batch).fault(self._plain_draws)
        load(step.module, self.reference.places[START].state)
        return fault

    def _judge_compiled(self, step: TrainingStep, place: int) -> tuple[Deviation, Compared]:
        """The same, and of compiled code that is wrong, whether it is right uncompiled."""
        found, compared = self._judge(step, place)
        if not found.is_right and step.config.compile != "off":
            plain = self._build(dataclasses.replace(step.config, compile="off"), self.reference, place)
            if self._judge(plain, place)[0].is_right:
                found = dataclasses.replace(found, note=RIGHT_UNCOMPILED)
        return found, compared

    def _hold(self, step: TrainingStep, reference: Reference, place: int) -> Deviation:
        found = reference.compare(self._gradients(step, reference, place), place, step.config.precision)
        return self._hold_further(step, reference, found) if place == START and found.is_right else found

    def _hold_further(self, step: TrainingStep, reference: Reference, found: Deviation) -> Deviation:
        """Deviation of the first further pass that is wrong, or else what was found."""
        in_backward, precision, unlike = step.updates_in_backward, step.config.precision, 0
        for number, (batch, _) in enumerate(reference.further):
            if unlike == MOST_UNLIKE:
                break
            load_buffers(step.module, reference.places[START].state)
            with nullcontext() if in_backward is None else in_backward.on(lambda parameters: None):
                own = reference.differentiate(step, step.place(batch), number + 1)
            if not reference.resembles(own, number, precision):
                unlike += 1
                if not (wrong := reference.at(number).compare(own, 0, precision)).is_right:
                    return dataclasses.replace(wrong, note=f"in pass {number + 2}, with the initial weights")
        return found

    def _gradients(self, step: TrainingStep, reference: Reference, place: int) -> Gradients:
        is_own = place == START and not reference.batches_differ  # its own data first
        batch = step.next_batch() if is_own else step.place(reference.places[place].batch)
        in_backward = step.updates_in_backward
        with nullcontext() if in_backward is None else in_backward.on(_spoil):
            found = reference.differentiate(step, batch)
        if in_backward is not None:
            load(step.module, reference.places[place].state)
        return found

    def _build(self, config: StepConfig, reference: Reference, place: int) -> TrainingStep:
        """A step of its own, in one of the places."""
        step = build_step(self.source, config)
        if place != START:
            load(step.module, reference.places[place].state)
        return step

    def _hold_as_eager(self, config: StepConfig, reference: Reference, place: int) -> Deviation:
        """The same of a step that is built, and compiled, with eager code's random numbers."""
        with eager_random():
            return self._hold(self._build(config, reference, place), reference, place)

    def _hold_without_dropout(self, config: StepConfig, reference: Reference, place: int) -> tuple[Deviation, bool]:
        """The same with dropout off on both sides, while what each would have dropped is compared; and whether the step
        draws random numbers all the same."""
        with without_dropout() as seen:
            step = self._build(config, reference, place)
            gradients = self._gradients(step, reference, place)
            own = dict(seen.elements)
            found = reference.compare(gradients, place, config.precision)
            if place == START and found.is_right:
                found = self._hold_further(step, reference, found)
        with without_dropout() as seen:
            self._gradients(self._build(reference.config, reference, place), reference, place)
        is_eager = all(each.compile == "off" and each.precision != "fp16" for each in (config, reference.config))
        fault = drops_otherwise(own, seen.elements, are_counted=is_eager)  # fp16 may take several passes
        return (dataclasses.replace(found, fault=fault) if found.is_right else found), gradients.drew

    def _hold_still(self, config: StepConfig, place: int) -> Deviation:
        """The same in eval mode on both sides, which switches a dropout of the author's own off."""
        with without_dropout():
            self._still = self._still or Reference(self.source, self.reference.config, differentiate=still_gradients)
            return self._hold(self._build(config, self._still, place), self._still, place)

    def _update(self, step: TrainingStep) -> Part:
        reference, entry = self.reference, PRECISIONS[step.config.precision]
        take = partial(
            take_updates, step.optimizer, step.module.named_parameters(), reference.update_gradients,
            in_backward=step.updates_in_backward,
            update=step.update if step.graph is not None and step.scaler is None else None,  # gradients are unscaled
        )  # fmt: skip
        if entry.is_stored_half:
            expected = reference.updates_from_zero(step.config.precision)
            zeros = dict.fromkeys(expected, 0.0)
            return named(compare_updates(take(from_zero=True), expected, zeros, entry.unit_roundoff))
        return named(compare_updates(take(), reference.updates, reference.sizes))


def _how(compared: Compared) -> dict[str, str]:
    return {} if compared == "as it is" else {"compared": compared}


def _spoil(parameters: Iterable[nn.Parameter]) -> None:
    """In the place of an update in backward: whoever reads these weights afterwards, which another step would not have
    changed yet, computes no number."""
    with torch.no_grad():
        for parameter in parameters:
            parameter.fill_(math.nan)
