"""Results of a workload's plain step, as the reference of every check, and how far rounding takes them.

The plain step is the workload's own model in float32, eager, nothing replaced. It is looked at in two places: with its
initial weights, and with those it has after some training, because at the start attention's gradients are a few per
cent of all and a mistake in them is hard to see; there with another batch, as a mistake may be in some batches alone.
Its gradients are taken in float64 where the model runs in it, so that float32's own error is measured too; else
float32's stand in. What the pass makes of buffers goes with them. Both updates of the optimizer are taken here as well.

How far another precision may be off is measured, not assumed: the plain step in that precision, and the same with
roundings drawn at random (`RandomRounding`). Where the plain step is further off than its roundings explain, something
is wrong with it, and the random ones alone set the budget.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from trainstep.base.config import EVERY_BLOCK, StepConfig
from trainstep.base.precision import PrecisionName
from trainstep.base.tolerance import DRAWS, FLOAT32_AT_MOST, FLOAT32_LOSES, MORE_DRAWS, REPEATS, one_rounding
from trainstep.check.buffers import Watched, unlike
from trainstep.check.gradients import Gradients, Rounding, compare
from trainstep.check.reproducible import check_same_gradients, check_same_weights
from trainstep.check.rounding import RandomRounding
from trainstep.check.updates import take_updates
from trainstep.check.verdict import Deviation
from trainstep.measure.outcome import Failure, attempt
from trainstep.step.batches import fingerprint, map_tensors
from trainstep.step.casting import autocast_dtype, cast_parameters
from trainstep.step.randomness import from_seed, generator_states
from trainstep.step.training_step import TrainingStep, build_step, uncompiled
from trainstep.step.weights import copied_to_host, load, tensors_of
from trainstep.step.workload import WorkloadSource, resolve_device

TRAINED_STEPS = 10
"""Updates before the second place."""


@dataclass(frozen=True)
class Place:
    """Weights and a batch, with the loss and gradients there."""

    state: Mapping[str, Tensor]
    """Parameters and buffers, on the host."""
    batch: Any
    gradients: Gradients


def gradients_at(step: TrainingStep, batch: Any, number: int = 0) -> Gradients:
    """Loss and gradients of a batch with the step's weights as they are, and what became of its buffers; random numbers
    start from one seed, or from another one for each further `number`."""
    buffers = Watched(step.module, on_host=False)
    with from_seed(step.config.seed + number, [step.device]):
        before, loss = generator_states([step.device]), step.gradients(batch)
        drew = generator_states([step.device]) != before
    return Gradients.of(loss, step.module, buffers.changes(), drew)


@dataclass(frozen=True)
class _Measured:
    """Effects of rounding on a precision's gradients in one place."""

    draws: int
    """Number of random roundings that were measured."""
    random: Rounding
    """The most that one of them did."""
    cast: Rounding
    """Rounding by casting the weights, where they are cast."""
    most: Rounding
    """The same, and what the precision itself is off by where that is no more than roundings explain."""


Differentiate = Callable[[TrainingStep, Any], Gradients]
"""Loss and gradients of a batch, with the step's weights as they are."""
Places = Callable[[TrainingStep], Iterable[Any]]
"""Takes a step from place to place, and yields the batch there."""


def start_and_trained(step: TrainingStep) -> Iterator[Any]:
    """The first batch with the initial weights, and after some training the last one, which may have another shape."""
    batch = step.next_batch()
    yield batch
    for _ in range(TRAINED_STEPS):
        batch = step.next_batch()
        step(batch)
    yield batch


class Reference:
    """The plain step of one workload: its gradients in two places, its updates, and what rounding does to it.

    Args:
        config: the plain configuration, whose precision is float32 unless that does not fit.
        places: takes a step to each place, and yields the batch there.
        differentiate: what is compared there.

    Raises:
        UsageError: loss or gradients are not finite.
        NotReproducibleError: built once more, it has other weights or gradients.
    """

    def __init__(
        self,
        source: WorkloadSource,
        config: StepConfig,
        places: Places = start_and_trained,
        differentiate: Differentiate = gradients_at,
    ) -> None:
        self.source, self.config, self.differentiate = source, config, differentiate
        step = build_step(source, config)
        states, batches = [], []
        plain: list[Gradients] = []
        for batch in places(step):
            states.append(copied_to_host(tensors_of(step.module)))
            batches.append(map_tensors(batch, lambda tensor: tensor.to("cpu", copy=True)))
            found = differentiate(step, batch)
            found.check_finite(config.precision, trained=bool(plain))
            plain.append(found.on_host())
        del step, batch, found
        self._unsteady: frozenset[str] = frozenset()
        self.batches_differ = self._build_again(places, states[0], batches[0], plain[0])
        """True if a second build gets other batches."""
        plain = [self._steady(each) for each in plain]
        self.draws_numbers = plain[0].drew
        """True if a step of the model draws from torch's generators."""
        exact = self._exact(states, batches, plain)
        self.is_exact = exact is not None
        """True if the gradients are float64's."""
        chosen = plain if exact is None else exact
        self.places = [Place(*each) for each in zip(states, batches, chosen, strict=True)]
        self._measured: dict[tuple[PrecisionName, bool], list[_Measured]] = {}
        self._from_zero: dict[PrecisionName, Mapping[str, Tensor]] = {}

    def _build_again(self, places: Places, state: Mapping[str, Tensor], batch: Any, known: Gradients) -> bool:
        """True if the same workload, built once more, comes to the first place with another batch.

        Raises:
            NotReproducibleError: it has other weights, or makes other gradients of the same batch.
        """
        step = build_step(self.source, self.config)
        own = next(iter(places(step)))
        check_same_weights(state, tensors_of(step.module))
        again = self.differentiate(step, step.place(batch))
        check_same_gradients(known, again, self.config.precision)
        self._unsteady = unlike(known.buffers, again.buffers, max(REPEATS, one_rounding(self.config.precision)))
        return fingerprint(own) != fingerprint(batch)

    def _at(self, step: TrainingStep, batch: Any) -> Gradients:
        """Gradients and buffers that are compared, there."""
        return self._steady(self.differentiate(step, step.place(batch)))

    def _steady(self, found: Gradients) -> Gradients:
        """The same without buffers that a second build changes otherwise."""
        return dataclasses.replace(found, buffers=found.buffers.without(self._unsteady)) if self._unsteady else found

    def _exact(
        self, states: Sequence[Mapping[str, Tensor]], batches: Sequence[Any], plain: Sequence[Gradients]
    ) -> list[Gradients] | None:
        """The same in float64, with every block computed again where memory asks for that; None where it has no such
        form here."""
        for checkpointing in dict.fromkeys((self.config.checkpointing, EVERY_BLOCK)):
            config = dataclasses.replace(self.config, checkpointing=checkpointing)
            found = attempt(partial(self._in_float64, config, states, batches, plain))
            if not isinstance(found, Failure):
                return found
            if found.status != "out of memory":
                return None
        return None

    def _in_float64(
        self,
        config: StepConfig,
        states: Sequence[Mapping[str, Tensor]],
        batches: Sequence[Any],
        plain: Sequence[Gradients],
    ) -> list[Gradients] | None:
        """The gradients of each place; None where the model computes something else in float64."""
        step = build_step(self.source, config)
        step.module.double()
        found = []
        for state, batch, known in zip(states, batches, plain, strict=True):
            double = map_tensors(batch, lambda tensor: tensor.double() if tensor.is_floating_point() else tensor)
            load(step.module, state)
            exact = self._at(step, double)
            if not compare(exact, known, Rounding(), FLOAT32_AT_MOST).is_right:
                return None
            found.append(exact.on_host())
        return found

    @cached_property
    def updates(self) -> Mapping[str, Tensor]:
        """Distances that each parameter moves in updates of the gradients of the two places."""
        step = build_step(self.source, self.config)
        moved = take_updates(step.optimizer, step.module.named_parameters(), self.update_gradients)
        return copied_to_host(moved)

    def updates_from_zero(self, precision: PrecisionName) -> Mapping[str, Tensor]:
        """The same of weights that are stored in 16 bits, and zero at first."""
        if precision not in self._from_zero:
            step = build_step(self.source, dataclasses.replace(self.config, precision=precision))
            parameters = step.module.named_parameters()
            moved = take_updates(step.optimizer, parameters, self.update_gradients, from_zero=True)
            self._from_zero[precision] = copied_to_host(moved)
        return self._from_zero[precision]

    @cached_property
    def unseen(self) -> str:
        """Rows of matrices that have no gradient in any place, such as a rare token's, in words."""
        several = [place.gradients.rows for place in self.places]
        names = [name for name, rows in several[0].items() if len(rows) > 1]
        none = {name: torch.stack([rows[name] == 0 for rows in several if name in rows]).all(0) for name in names}
        return ", ".join(
            f"{int(each.sum())} of {len(each)} rows of {name}" for name, each in none.items() if each.any()
        )

    @property
    def update_gradients(self) -> list[Mapping[str, Tensor]]:
        """The gradients of the first update and of the others."""
        return [place.gradients.by_name for place in self.places]

    @cached_property
    def sizes(self) -> Mapping[str, float]:
        """‖W‖ of each parameter at the start."""
        return {name: float(value.norm()) for name, value in self.places[0].state.items() if value.is_floating_point()}

    def compare(
        self, found: Gradients, place: int, precision: PrecisionName, *, narrow_weights: bool = False
    ) -> Deviation:
        """Hold what a step in this precision computed in one of the places against the reference.

        Args:
            narrow_weights: all weights were cast to autocast's type before they were used, as a wrapper does that
                gathers them in it: then those of norms and embeddings round too, and with them the sums of blocks'
                outputs, which autocast leaves in float32. Gradients of float16 weights cannot be unscaled, so there
                what rounding may do is that of autocast alone.
        """
        form = (precision, narrow_weights and autocast_dtype(precision) == torch.bfloat16)
        if form not in self._measured:
            found = found.on_host()  # what is measured needs room for two more
            self._measured[form] = self._measure(*form)
        known, device = self._measured[form], resolve_device(self.config.device)
        while not (deviation := self._within(found.on(device), place, precision, known[place].most)).is_right:
            if known[place].draws >= MORE_DRAWS:
                is_other = precision != self.config.precision
                return self._with_plain(deviation, found, place, form, known[place]) if is_other else deviation
            found = found.on_host()
            known[place] = self._draw(self._rounded_step(*form), self.places[place], known[place])
        return deviation

    def _with_plain(
        self, deviation: Deviation, found: Gradients, place: int, form: tuple[PrecisionName, bool], known: _Measured
    ) -> Deviation:
        """Deviation of the step, with a note whether the plain step in this precision has it too, within its own
        roundings."""
        step = self._rounded_step(*form)
        load(step.module, self.places[place].state)
        plain = self._at(step, self.places[place].batch)
        if not compare(found, plain, known.random, one_rounding(form[0])).is_right:
            return deviation
        return dataclasses.replace(deviation, note=f"so is the plain step in {form[0]}, {OWN_ARITHMETIC}")

    def _measure(self, precision: PrecisionName, narrow_weights: bool) -> list[_Measured]:
        """Measure this precision's rounding in each place, by a few drawings."""
        casts = self._narrowing() if narrow_weights else [Rounding()] * len(self.places)
        step, none = self._rounded_step(precision, narrow_weights), Rounding()
        of_each = zip(self.places, casts, strict=True)
        return [self._draw(step, place, _Measured(0, none, cast, none)) for place, cast in of_each]

    def _within(self, found: Gradients, place: int, precision: PrecisionName, plain: Rounding) -> Deviation:
        if precision == "fp32":
            plain = plain.times(FLOAT32_LOSES)
        return compare(found, self.places[place].gradients, plain, one_rounding(precision))

    def _rounded_step(self, precision: PrecisionName, narrow_weights: bool) -> TrainingStep:
        step = build_step(self.source, dataclasses.replace(self.config, precision=precision))
        if narrow_weights:
            cast_parameters(step.module, torch.bfloat16)
        return step

    def _draw(self, step: TrainingStep, place: Place, known: _Measured) -> _Measured:
        """The same from `DRAWS` random roundings, or from twice as many as before."""
        draws = min(2 * known.draws, MORE_DRAWS) or DRAWS
        load(step.module, place.state)
        plain = self._at(step, place.batch)
        random = known.random
        for seed in range(known.draws, draws):
            random = Rounding.most([random, Rounding.between(self._drawn(step, place, seed), plain)])
        precision = step.config.precision
        explained = compare(plain, place.gradients, random.plus(known.cast), one_rounding(precision)).is_right
        trusted = explained or (precision == self.config.precision and self.is_exact)
        own = Rounding.between(plain, place.gradients)
        most = Rounding.most([random, own]) if trusted else random
        return _Measured(draws, random, known.cast, most)

    def _drawn(self, step: TrainingStep, place: Place, seed: int) -> Gradients:
        """Gradients of one random rounding."""
        with uncompiled(), RandomRounding(step.config.precision, seed):
            load(step.module, place.state)
            return self._at(step, place.batch)

    def _narrowing(self) -> list[Rounding]:
        """Roundings of the weights alone in each place, computed as the reference is.

        It is not random: norms whose weights are all alike are all off alike.
        """
        found = []
        step = build_step(self.source, self.config)
        for place in self.places:
            load(step.module, place.state)
            with torch.no_grad():
                for parameter in step.module.parameters():
                    parameter.copy_(parameter.to(torch.bfloat16))
            found.append(Rounding.between(self._at(step, place.batch), place.gradients))
        return found


OWN_ARITHMETIC = "with nothing else changed: by the model's own arithmetic there, or torch's"
"""Ends what is said of a precision that takes a plain step further than its roundings."""
