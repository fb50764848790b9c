"""Results of a workload's plain step, as the reference of every check, and how far rounding takes them.

The plain step is the workload's own model in float32, eager, nothing replaced. It is looked at in two places: with its
initial weights, and with those it has after some training, because at the start attention's gradients are a few per
cent of all and a mistake in them is hard to see; there with another batch, as a mistake may be in some batches alone.
Its gradients are taken in float64 where the model runs in it, so that float32's own error is measured too; else
float32's stand in. What the pass makes of buffers goes with them. Both updates of the optimizer are taken here as well.

A mistake may also be in some passes alone, or in rows that few batches reach. So `PASSES` further batches are looked at
with the initial weights, each by a sketch (`Gradients.sketched`): gradients of them all would take too much memory. The
sketches are held against the roundings of the first place, scaled with the gradients. Where that does not show a pass
to be right, its reference is computed in full (`at`), with roundings of its own.

How far another precision may be off is measured, not assumed: the plain step in that precision, and the same with
roundings drawn at random (`RandomRounding`). Where the plain step is further off than its roundings explain, something
is wrong with it, and the random ones alone set the budget.
"""

from __future__ import annotations

import dataclasses
import math
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
from trainstep.step.batches import tensors_of as contents_of
from trainstep.step.casting import autocast_dtype, cast_parameters
from trainstep.step.randomness import from_seed, generator_states
from trainstep.step.training_step import TrainingStep, build_step, uncompiled
from trainstep.step.weights import copied_to_host, load, load_buffers, tensors_of
from trainstep.step.workload import WorkloadSource, resolve_device

TRAINED_STEPS = 10
"""Updates before the second place."""
PASSES = 16
"""Further passes: more than a dozen, so that what goes wrong after ten, or in every tenth, is among them."""
LOOKED_AT = 128
"""Batches among which these are chosen, where rows have no gradient otherwise."""


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


Differentiate = Callable[..., Gradients]
"""Loss and gradients of a step's batch, with its weights as they are, and the number of the pass."""
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
        plain: list[Place] = []
        for batch in places(step):
            state, kept = copied_to_host(tensors_of(step.module)), _on_host(batch)
            found = differentiate(step, batch)
            found.check_finite(config.precision, trained=bool(plain))
            plain.append(Place(state, kept, found.on_host()))
        del step, batch, found
        self._unsteady: frozenset[str] = frozenset()
        self.batches_differ = self._build_again(places, plain[0])
        """True if a second build gets other batches."""
        plain = [dataclasses.replace(each, gradients=self._steady(each.gradients)) for each in plain]
        self.draws_numbers = plain[0].gradients.drew
        """True if a step of the model draws from torch's generators."""
        exact = self._exact(plain)
        self.is_exact = exact is not None
        """True if the gradients are float64's."""
        self.places = exact or plain
        self._measured: dict[tuple[PrecisionName, bool], list[_Measured]] = {}
        self._from_zero: dict[PrecisionName, Mapping[str, Tensor]] = {}

    def _build_again(self, places: Places, known: Place) -> bool:
        """True if the same workload, built once more, comes to the first place with another batch.

        Raises:
            NotReproducibleError: it has other weights, or makes other gradients of the same batch.
        """
        step = build_step(self.source, self.config)
        own = next(iter(places(step)))
        check_same_weights(known.state, tensors_of(step.module))
        again, first = self.differentiate(step, step.place(known.batch)), known.gradients
        check_same_gradients(first, again, self.config.precision)
        self._unsteady = unlike(first.buffers, again.buffers, max(REPEATS, one_rounding(self.config.precision)))
        return fingerprint(own) != fingerprint(known.batch)

    def _at(self, step: TrainingStep, place: Place) -> Gradients:
        """Gradients and buffers that are compared, there, which the step is brought to."""
        load(step.module, place.state)
        return self._steady(self.differentiate(step, step.place(place.batch)))

    def _steady(self, found: Gradients) -> Gradients:
        """The same without buffers that a second build changes otherwise."""
        return dataclasses.replace(found, buffers=found.buffers.without(self._unsteady)) if self._unsteady else found

    def _exact(self, plain: Sequence[Place]) -> list[Place] | None:
        """The same in float64, with every block computed again where memory asks for that; None where it has no such
        form here."""
        for checkpointing in dict.fromkeys((self.config.checkpointing, EVERY_BLOCK)):
            config = dataclasses.replace(self.config, checkpointing=checkpointing)
            found = attempt(partial(self._in_float64, config, plain))
            if not isinstance(found, Failure) or found.status != "out of memory":
                return None if isinstance(found, Failure) else found
        return None

    def _in_float64(self, config: StepConfig, plain: Sequence[Place]) -> list[Place] | None:
        """Each place with its gradients in float64; None where the model computes something else there."""
        step = build_step(self.source, config)
        step.module.double()
        found = []
        for place in plain:
            double = map_tensors(place.batch, lambda tensor: tensor.double() if tensor.is_floating_point() else tensor)
            exact = self._at(step, dataclasses.replace(place, batch=double))
            if not compare(exact, place.gradients, Rounding(), FLOAT32_AT_MOST).is_right:
                return None
            found.append(dataclasses.replace(place, gradients=exact.on_host()))
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
    def further(self) -> list[tuple[Any, Gradients]]:
        """Batches of further passes with the initial weights, and sketches of their gradients. Where rows have none in
        the places, batches come first that may reach other rows than those before."""
        step, found = build_step(self.source, self.config), list[tuple[Any, Gradients]]()
        self.differentiate(step, step.next_batch())  # a pass goes before, as in the steps that are compared
        seen, are_missing = set[Any](), bool(self._unseen([]))
        for left in range(LOOKED_AT, 0, -1):
            batch = step.next_batch()
            known, seen = len(seen), seen | _rows_of(batch)
            if are_missing and len(seen) == known and left > PASSES - len(found):
                continue
            load_buffers(step.module, self.places[0].state)
            sketch = self._steady(self.differentiate(step, batch, len(found) + 1)).sketched()
            if math.isfinite(sum([sketch.loss, *sketch.squares.values()])):
                found.append((_on_host(batch), sketch))
            if len(found) == PASSES:
                break
        return found

    def resembles(self, found: Gradients, number: int, precision: PrecisionName) -> bool:
        """True if the sketch of a further pass is as near as the first place's roundings, which were measured, explain.
        Where it is not, `at` decides."""
        expected, first = self.further[number][1], self.places[0].gradients
        larger = math.sqrt(sum(expected.squares.values()) / (sum(first.squares.values()) or 1.0))
        plain = self._measured[precision, False][0].most.times(max(1.0, larger))
        return self._within(self._steady(found).sketched(), expected, precision, plain).is_right

    def at(self, number: int) -> Reference:
        """The reference of a further pass in full, as its only place."""
        places, differentiate = self.further[number][:1], partial(self.differentiate, number=number + 1)
        return Reference(self.source, self.config, lambda step: map(step.place, places), differentiate)

    @cached_property
    def unseen(self) -> str:
        """Rows of matrices that have no gradient in any pass, such as a rare token's, in words."""
        return self._unseen([sketch.by_name for _, sketch in self.further])

    def _unseen(self, further: Iterable[Mapping[str, Tensor]]) -> str:
        several = [*(place.gradients.rows for place in self.places), *further]
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
        expected = self.places[place].gradients
        while not (deviation := self._within(found.on(device), expected, precision, known[place].most)).is_right:
            if known[place].draws >= MORE_DRAWS:
                is_other = precision != self.config.precision
                return self._with_plain(deviation, found, place, form, known[place]) if is_other else deviation
            found = found.on_host()
            more = min(2 * known[place].draws, MORE_DRAWS) or DRAWS
            known[place] = self._draw(self._rounded_step(*form), self.places[place], known[place], more)
        return deviation

    def _with_plain(
        self, deviation: Deviation, found: Gradients, place: int, form: tuple[PrecisionName, bool], known: _Measured
    ) -> Deviation:
        """Deviation of the step, with a note whether the plain step in this precision has it too, within its own
        roundings."""
        plain = self._at(self._rounded_step(*form), self.places[place])
        if not compare(found, plain, known.random, one_rounding(form[0])).is_right:
            return deviation
        return dataclasses.replace(deviation, note=f"so is the plain step in {form[0]}, {OWN_ARITHMETIC}")

    def _measure(self, precision: PrecisionName, narrow_weights: bool) -> list[_Measured]:
        """Measure this precision's rounding in each place, by a few drawings; where float64 shows what it is off by
        itself, by none until a step is further off."""
        casts = self._narrowing() if narrow_weights else [Rounding()] * len(self.places)
        step, none = self._rounded_step(precision, narrow_weights), Rounding()
        draws = 0 if precision == self.config.precision and self.is_exact else DRAWS
        of_each = zip(self.places, casts, strict=True)
        return [self._draw(step, place, _Measured(0, none, cast, none), draws) for place, cast in of_each]

    def _within(self, found: Gradients, expected: Gradients, precision: PrecisionName, plain: Rounding) -> Deviation:
        if precision == "fp32":
            plain = plain.times(FLOAT32_LOSES)
        return compare(found, expected, plain, one_rounding(precision))

    def _rounded_step(self, precision: PrecisionName, narrow_weights: bool) -> TrainingStep:
        step = build_step(self.source, dataclasses.replace(self.config, precision=precision))
        if narrow_weights:
            cast_parameters(step.module, torch.bfloat16)
        return step

    def _draw(self, step: TrainingStep, place: Place, known: _Measured, draws: int) -> _Measured:
        """The same from this many random roundings."""
        plain, random = self._at(step, place), known.random
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
            return self._at(step, place)

    def _narrowing(self) -> list[Rounding]:
        """Roundings of the weights alone in each place, computed as the reference is.

        It is not random: norms whose weights are all alike are all off alike.
        """
        found = []
        step = build_step(self.source, self.config)
        for place in self.places:
            narrow = {name: place.state[name].to(torch.bfloat16) for name, _ in step.module.named_parameters()}
            narrowed = dataclasses.replace(place, state={**place.state, **narrow})
            found.append(Rounding.between(self._at(step, narrowed), place.gradients))
        return found


def _on_host(batch: Any) -> Any:
    """A copy of the batch in the host's memory."""
    return map_tensors(batch, lambda tensor: tensor.to("cpu", copy=True))


def _rows_of(batch: Any) -> set[Any]:
    """Keys by which a batch may reach rows: shapes, and whole numbers such as tokens, by the place of their tensor."""
    found = set[Any]()
    for place, tensor in enumerate(contents_of(batch)):
        numbers = [] if tensor.is_floating_point() or tensor.is_complex() else tensor.unique().tolist()
        found |= {(place, tensor.shape), *((place, number) for number in numbers)}
    return found


OWN_ARITHMETIC = "with nothing else changed: by the model's own arithmetic there, or torch's"
"""Ends what is said of a precision that takes a plain step further than its roundings."""
