"""A user's workload in a training run: its batches by number, divided among the ranks, and a pass's random numbers.

Update number n takes the workload's batches (n-1)·k to n·k-1, k being `batches_per_update`, whatever the number of
ranks. Every draw of a batch and every pass starts all generators from a number made of the run's seed and the batch's
number. So a curve depends neither on where the run was interrupted, nor, with dropout too, on the number of ranks, as
long as they take whole batches.

A sequence (`__getitem__` and `__len__`) is read by index, which starts over at its end. Anything else is iterated, on
every rank, and what was used before an interruption is drawn again. A print of the last batch goes into each
checkpoint, so that batches which are others after a restart are an error and no other curve.
"""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainstep.base.config import StepConfig
from trainstep.base.errors import UsageError, place_of
from trainstep.parallel.process import AgreedError, Process, on_all_ranks
from trainstep.rows.records import Scalar
from trainstep.step.batches import fingerprint, map_tensors, share_of
from trainstep.step.randomness import seed_everything
from trainstep.step.training_step import batches_of
from trainstep.step.workload import Workload, WorkloadSource
from trainstep.train.config import RunConfig, differences, division
from trainstep.train.data import Data

SAME_BATCHES = (
    "a batch is to follow from its number alone: torch, numpy and `random` are seeded before the factory is called and "
    "before each batch is drawn; seed any other generator in the factory"
)


class NumberedBatches:
    """A workload's batches by number, from 0 on; an iterable's in order, the last one as often as it is asked for."""

    def __init__(self, workload: Workload, seed: int) -> None:
        self._seed, given = seed, workload.batches
        self._sequence: Any = given if _is_sequence(given) else None
        self._iterator = batches_of(workload)
        self._drawn, self._last = 0, None

    @property
    def is_sequence(self) -> bool:
        """True if a batch can be had without those before it."""
        return self._sequence is not None

    def __getitem__(self, number: int) -> Any:
        """The batch of this number; of an iterable none before the last one that was asked for.

        Raises:
            UsageError: there are no batches, or drawing one failed.
        """
        if self._sequence is not None:
            if not len(self._sequence):
                raise UsageError("the workload's batches are empty; give a list or loader that has some")
            return self._draw(lambda: self._sequence[number % len(self._sequence)], number)
        assert number >= self._drawn - 1, f"batch {number}, and {self._drawn} are drawn"
        while self._drawn <= number:
            self._last = self._draw(lambda: next(self._iterator), self._drawn)
            self._drawn += 1
        return self._last

    def _draw(self, draw: Callable[[], Any], number: int) -> Any:
        seed_everything(seed_of(self._seed, "batch", number))
        try:
            return draw()
        except UsageError:
            raise
        except Exception as error:
            failed = f"drawing batch {number} of the workload failed: {type(error).__name__}: {error}"
            raise UsageError(f"{failed}{place_of(error)}") from error


class OwnData(Data):
    """A workload that is built, and its batches.

    Raises:
        UsageError: the workload cannot be built, or gives no batch.
    """

    def __init__(self, source: WorkloadSource, config: RunConfig) -> None:
        self._config = config
        self._workload = source.build(config.step)
        self._batches = NumberedBatches(self._workload, config.step.seed)
        self._seeds: deque[int] = deque()  # of the passes that were handed out last
        self._modules = list(self._workload.module.modules())
        self._first, self._update = self._batches[0], 0

    @property
    def parameters(self) -> str:
        module = self._workload.module
        counts = [sum(each.numel() for each in module.parameters() if each.requires_grad is trained)
                  for trained in (True, False)]  # fmt: skip
        return f"{sum(counts):,} parameters{f', {counts[1]:,} of them frozen' if counts[1] else ''}"

    @property
    def validates(self) -> bool:
        return self._workload.validation is not None

    def workload(self, step: StepConfig) -> Workload:
        """The workload as it was built, each forward drawing from its pass's own numbers."""
        del step  # it was built with it
        forward = self._workload.forward

        def from_its_seed(module: nn.Module, batch: Any) -> Any:
            seed_everything(self._seeds[0])
            self._seeds.rotate(-1)  # to the next pass, and from the last to the first
            return forward(module, batch)

        return dataclasses.replace(self._workload, forward=from_its_seed)

    def training_parts(self, step: int, rank: int, world_size: int, batch: int) -> list[Any]:
        del batch  # it is for built-in models
        self._update, count = step, self._config.train.batches_per_update
        return self._parts("train", self._batches, range((step - 1) * count, step * count), rank, world_size)

    def validation_parts(self, rank: int, world_size: int, batch: int) -> list[Any]:
        del batch
        given, count = (
            self._workload.validation,
            self._config.train.eval_batches * self._config.train.batches_per_update,
        )
        assert given is not None, "asked only where there is one"
        seed_everything(seed_of(self._config.step.seed, "validation", -1))
        batches: Any = given if _is_sequence(given) else list(islice(iter(given), count))
        if not len(batches):
            raise UsageError(
                "the workload's validation batches are empty, or an iterator that was used up; give a list"
            )
        return self._parts("validation", batches, range(min(count, len(batches))), rank, world_size)

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Inside, the module is in eval mode; then each of its modules is in the mode it was in."""
        modes = [each.training for each in self._modules]
        self._workload.module.eval()
        try:
            yield
        finally:
            for each, mode in zip(self._modules, modes, strict=True):
                each.training = mode

    def describe(self) -> dict[str, Scalar]:
        """Identity of the module and its batches: names, shapes and types, and a print of the first batch."""
        named = [*self._workload.module.named_parameters(), *self._workload.module.named_buffers()]
        shapes = [(name, tuple(each.shape), str(each.dtype), each.requires_grad) for name, each in named]
        digest = hashlib.blake2b(repr(shapes).encode(), digest_size=8).hexdigest()
        return {"module": digest, "first_batch": fingerprint(self._first)}

    def check(self, process: Process) -> None:
        """Raise `AgreedError` where the first batch of a rank is not rank 0's, or the ranks cannot divide its rows."""
        _check_alike(_gathered(self.describe()["first_batch"], process), 0)
        if (ranks := division(self._config.train.batches_per_update, process.world_size)[1]) > 1:
            on_all_ranks(process, lambda: share_of(self._first, 0, ranks))

    def watch(self, optimizer: torch.optim.Optimizer) -> None:
        """Start every update of the optimizer from the same numbers on every rank.

        Raises:
            UsageError: it evaluates the loss itself.
        """
        check_steps_once(optimizer)
        self._optimizer, self._made = optimizer, options_of(optimizer)
        seed = self._config.step.seed
        optimizer.register_step_pre_hook(lambda *_: seed_everything(seed_of(seed, "update", self._update)))

    def note(self, step: int, process: Process) -> dict[str, Any]:
        number = step * self._config.train.batches_per_update - 1
        prints = _gathered(fingerprint(self._batches[number]), process)
        _check_alike(prints, number)
        options = {"made": self._made, "now": options_of(self._optimizer)}
        return {"options": options, "batch": number, "batch_print": prints[0]}

    def resume(self, step: int, note: Mapping[str, Any], process: Process, say: Callable[[str], None]) -> None:
        """Give the optimizer its options of then, and go to the last batch of update `step`.

        Raises:
            AgreedError: the optimizer is made otherwise, or the batch is not the one that was trained on.
        """
        if "options" in note:
            on_all_ranks(process, lambda: check_options(self._made, note["options"]["made"]))
            restore_options(self._optimizer, note["options"]["now"])
        number = step * self._config.train.batches_per_update - 1
        if not self._batches.is_sequence:
            say(f"drawing {number + 1} batches again, to go on with the next")
        on_all_ranks(process, lambda: self._check_drawn(number, note))

    def _check_drawn(self, number: int, note: Mapping[str, Any]) -> None:
        found = fingerprint(self._batches[number])
        if note.get("batch_print", found) != found:
            raise UsageError(
                f"batch {number} of the workload, drawn again, is not the one that was trained on, so the run would go "
                f"on with other data; {SAME_BATCHES}"
            )

    def _parts(self, what: str, batches: Any, numbers: Sequence[int], rank: int, world_size: int) -> list[Any]:
        passes, ranks = division(len(numbers), world_size)
        mine = numbers[rank // ranks * passes :][:passes]
        parts = []
        self._seeds.clear()
        for number in numbers:
            if number in mine or not getattr(batches, "is_sequence", True):
                batch = batches[number]
            if number in mine:
                part = map_tensors(share_of(batch, rank % ranks, ranks) if ranks > 1 else batch, Tensor.clone)
                parts.append(part)
                self._seeds.append(seed_of(self._config.step.seed, what, number, rank % ranks, ranks))
        return parts


def seed_of(*words: int | str) -> int:
    """A seed made of these, which no other words are likely to make."""
    return int.from_bytes(hashlib.blake2b(repr(words).encode(), digest_size=8).digest(), "little")


def _is_sequence(batches: Any) -> bool:
    return hasattr(batches, "__getitem__") and hasattr(batches, "__len__") and not isinstance(batches, (str, Mapping))


def _gathered(mine: Any, process: Process) -> list[Any]:
    everywhere: list[Any] = [None] * process.world_size
    dist.all_gather_object(everywhere, mine, group=process.group)
    return everywhere


def _check_alike(prints: Sequence[str], number: int) -> None:
    for rank, theirs in enumerate(prints):
        if theirs != prints[0]:
            raise AgreedError(
                f"the workload gives rank {rank} another batch {number} than rank 0. Give every rank the same batches, "
                "without a DistributedSampler or whatever else takes the rank's own: train divides each batch among "
                f"the ranks itself, and {SAME_BATCHES}"
            )


_HOW_ONLY = ("params", "foreach", "fused", "capturable", "differentiable")
"""Options of an optimizer that say how it is computed, not what."""


def options_of(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Values that each of its groups has of an update, as JSON has them; some optimizers count there."""
    return [
        {name: told for name, value in group.items() if name not in _HOW_ONLY and (told := _as_json(value)) is not _NOT}
        for group in optimizer.param_groups
    ]


def check_options(made: Sequence[Mapping[str, Any]], saved: Sequence[Mapping[str, Any]]) -> None:
    """Raise `UsageError` where an optimizer is made otherwise than the one of a checkpoint."""
    flat = [
        {f"group {place} {name}": value for place, group in enumerate(groups) for name, value in group.items()}
        for groups in (made, saved)
    ]
    if found := differences(*flat):
        raise UsageError(
            f"the workload's optimizer is made otherwise than that of the run (its own → asked for): "
            f"{'; '.join(found)}. Go on with its own, or start a new run with another --out"
        )


def restore_options(optimizer: torch.optim.Optimizer, saved: Sequence[Mapping[str, Any]]) -> None:
    """Give each group what `options_of` found in it."""
    for group, values in zip(optimizer.param_groups, saved, strict=True):
        for name, value in values.items():
            own = group.get(name)  # None where an update put it there
            if isinstance(own, Tensor):
                own.fill_(value)
            else:
                group[name] = tuple(value) if isinstance(own, tuple) else value


def check_steps_once(optimizer: torch.optim.Optimizer) -> None:
    """Raise `UsageError` for an optimizer that evaluates the loss itself, several times an update."""
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise UsageError(
            f"{type(optimizer).__name__} evaluates the loss several times an update (its step takes a closure); train "
            "takes optimizers that update once from the gradients, such as AdamW"
        )


_NOT = object()


def _as_json(value: Any) -> Any:
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.item()
    if isinstance(value, (list, tuple)):
        items = [_as_json(each) for each in value]
        return _NOT if any(each is _NOT for each in items) else items
    return value if value is None or isinstance(value, (bool, int, float, str)) else _NOT
