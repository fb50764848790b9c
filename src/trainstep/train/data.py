"""The data of a run: what the loop asks of any, and tokens, of which sequences make which update.

The sequences of an update follow from the seed and the update's number alone. So the place in the data is the number of
the update, no state of a loader is saved, and every number of ranks sees the same global batches: a rank takes its
consecutive part of each.
"""

from __future__ import annotations

import contextlib
import hashlib
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from trainstep.base.config import StepConfig
from trainstep.base.errors import UsageError
from trainstep.parallel.process import Process, on_all_ranks
from trainstep.plan.flops import step_flops
from trainstep.rows.records import Scalar
from trainstep.step.model.text import Tokens, cut_sequences, load_tokens
from trainstep.step.workload import Workload, builtin_workload, make_optimizer
from trainstep.train.config import BuiltinRun

_PIECES, _PIECE_TOKENS = 64, 2**16
"""Pieces of the tokens, this many, evenly spaced, that are hashed; of a small data set that is all of it."""
_CHECKED_TOKENS = 2**24  # ids are held against the vocabulary this many at a time

Batch = tuple[Tensor, Tensor]  # inputs and targets, each (batch, context), int64


class Data(Protocol):
    """A workload and its batches by number, which a run trains on; every rank has one and calls it alike."""

    @property
    @abstractmethod
    def parameters(self) -> str:
        """Say how many the model has."""

    @property
    @abstractmethod
    def validates(self) -> bool:
        """True if there are batches to validate on."""

    @abstractmethod
    def check(self, process: Process) -> None:
        """Raise `AgreedError` on every rank where one cannot train on its part. All ranks call it."""

    @abstractmethod
    def describe(self) -> dict[str, Scalar]:
        """Identify the data: a run goes on only with the same."""

    @abstractmethod
    def workload(self, step: StepConfig) -> Workload:
        """Build the workload. Its batches come from here."""

    def watch(self, optimizer: torch.optim.Optimizer) -> None:
        """Take notice of the optimizer that was built, before its first step."""
        return

    @abstractmethod
    def training_parts(self, step: int, rank: int, world_size: int, batch: int) -> Sequence[Any]:
        """Draw a rank's part of update number `step`, pass by pass; those of a built-in model have `batch` sequences.

        Raises:
            UsageError: a user's batch cannot be drawn, or the ranks cannot divide its rows.
        """

    @abstractmethod
    def validation_parts(self, rank: int, world_size: int, batch: int) -> Sequence[Any]:
        """Draw a rank's part of the validation, the same every time."""

    def flops(self, world_size: int) -> float | None:
        """Compute the FLOPs of a rank's part of an update; None where they have to be counted."""
        return None

    def evaluating(self) -> contextlib.AbstractContextManager[None]:
        """Make a context in which the module validates."""
        return contextlib.nullcontext()

    def note(self, step: int, process: Process) -> dict[str, Any]:
        """Give what a checkpoint after update `step` says of the data; the same on every rank, or it is an error."""
        return {}

    def resume(self, step: int, note: Mapping[str, Any], process: Process, say: Callable[[str], None]) -> None:
        """Go to the place after update `step`, of whose checkpoint this is the note.

        Raises:
            AgreedError: the data is not what the run was trained on.
        """
        return


@dataclass(frozen=True)
class TokenData(Data):
    """Training and validation tokens, and the sequences cut from them."""

    training: Tokens
    validation: Tokens
    is_text: bool  # whether the tokens are the bytes of text
    config: BuiltinRun
    """Says how many sequences of which length make an update and a validation, and which seed chooses them."""

    validates = True

    @property
    def parameters(self) -> str:
        return f"{self.config.model.num_parameters:,} parameters"

    def check(self, process: Process) -> None:
        on_all_ranks(process, partial(self.check_ids, process.rank, process.world_size))

    def flops(self, world_size: int) -> float:
        return (
            step_flops(self.config.model, self.config.train.global_batch, self.config.step.context, "step") / world_size
        )

    def workload(self, step: StepConfig) -> Workload:
        """Build the model, with the optimizer and the weight decay of the run."""
        made = builtin_workload(self.config.model, step, batches=())
        decay = self.config.train.weight_decay
        made.optimizer = partial(make_optimizer, step.optimizer, step.learning_rate, weight_decay=decay)
        return made

    def training_parts(self, step: int, rank: int, world_size: int, batch: int) -> list[Batch]:
        """A rank's part of update number `step`, in passes of `batch` sequences."""
        random = np.random.default_rng([self.config.step.seed, step])
        starts = random.integers(0, len(self.training) - self.config.step.context, size=self.config.train.global_batch)
        return self._parts(self.training, starts, rank, world_size, batch)

    def validation_parts(self, rank: int, world_size: int, batch: int) -> list[Batch]:
        """A rank's part of the validation, the same every time: sequences evenly spaced over the validation tokens."""
        count = self.config.train.eval_batches * self.config.train.global_batch
        starts = np.linspace(0, len(self.validation) - self.config.step.context - 1, count).astype(np.int64)
        return self._parts(self.validation, starts, rank, world_size, batch)

    def describe(self) -> dict[str, Scalar]:
        """Identity of the tokens: how many, and a hash of pieces all over them."""
        digest = hashlib.sha256()
        for tokens in (self.training, self.validation):
            for start in np.linspace(0, max(0, len(tokens) - _PIECE_TOKENS), _PIECES).astype(np.int64):
                digest.update(np.ascontiguousarray(tokens[start : start + _PIECE_TOKENS]).tobytes())
        return {"tokens": len(self.training) + len(self.validation), "sha256": digest.hexdigest()[:16]}

    def check_ids(self, rank: int, world_size: int) -> None:
        """Look at a rank's part of all tokens.

        Raises:
            UsageError: one is outside the vocabulary.
        """
        # Text is bytes; that the vocabulary has them was seen when they were read.
        for tokens in () if self.is_text else (self.training, self.validation):
            part = np.array_split(tokens, world_size)[rank]
            for start in range(0, len(part), _CHECKED_TOKENS):
                if (largest := int(part[start : start + _CHECKED_TOKENS].max())) >= self.config.model.vocab_size:
                    raise UsageError(
                        f"the data holds token id {largest}, beyond the vocabulary of {self.config.model.vocab_size}; "
                        "give the data that fits the model, or --vocab-size"
                    )

    def _parts(
        self, tokens: Tokens, starts: npt.NDArray[np.integer], rank: int, world_size: int, batch: int
    ) -> list[Batch]:
        mine = np.split(starts, world_size)[rank]
        context, vocab_size = self.config.step.context, self.config.model.vocab_size
        return [cut_sequences(tokens, part, context, vocab_size) for part in np.split(mine, len(mine) // batch)]


def open_data(path: Path | None, config: BuiltinRun) -> TokenData:
    """The tokens of a text file, a folder, a `.bin` file or the standard library's source (None), split in two.

    Raises:
        UsageError: no such data, or too little of it for one sequence to train on and one to validate on.
    """
    tokens = load_tokens(path, config.model.vocab_size)
    context = config.step.context
    kept = int(len(tokens) * config.train.validation_fraction)
    training, validation = tokens[: len(tokens) - kept], tokens[len(tokens) - kept :]
    for what, part in (("training", training), ("validation", validation)):
        if len(part) < context + 1:
            raise UsageError(
                f"of {len(tokens)} tokens {len(part)} are for {what}, but one sequence needs context + 1 = "
                f"{context + 1}; give more data, a shorter --context or another --validation-fraction"
            )
    return TokenData(training, validation, is_text=path is None or path.suffix != ".bin", config=config)
