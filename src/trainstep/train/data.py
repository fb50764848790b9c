"""The tokens of a run: which sequences make which update.

The sequences of an update follow from the seed and the update's number alone. So the place in the data is the number of
the update, no state of a loader is saved, and every number of ranks sees the same global batches: a rank takes its
consecutive part of each.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt
from torch import Tensor

from trainstep.base.config import ModelConfig, StepConfig
from trainstep.base.errors import UsageError
from trainstep.rows.records import Scalar
from trainstep.step.model.text import Tokens, cut_sequences, load_tokens
from trainstep.step.workload import Workload, builtin_workload, make_optimizer
from trainstep.train.config import RunConfig

_PIECES, _PIECE_TOKENS = 64, 2**16
"""Pieces of the tokens, this many, evenly spaced, that are hashed; of a small data set that is all of it."""
_CHECKED_TOKENS = 2**24  # ids are held against the vocabulary this many at a time

Batch = tuple[Tensor, Tensor]  # inputs and targets, each (batch, context), int64


@dataclass(frozen=True)
class TokenData:
    """Training and validation tokens, and the sequences cut from them."""

    training: Tokens
    validation: Tokens
    is_text: bool  # whether the tokens are the bytes of text
    config: RunConfig
    """Says how many sequences of which length make an update and a validation, and which seed chooses them."""

    @property
    def validates(self) -> bool:
        """True if there are tokens to validate on."""
        return True

    @property
    def parameters(self) -> str:
        """Number of the model's parameters."""
        return f"{self._model.num_parameters:,} parameters"

    def workload(self, step: StepConfig) -> Workload:
        """The model, with the optimizer and the weight decay of the run. Its batches come from here."""
        made = builtin_workload(self._model, step, batches=())
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

    def check_ids(self, rank: int, world_size: int) -> TokenData:
        """Look at a rank's part of all tokens; returns the data.

        Raises:
            UsageError: one is outside the vocabulary.
        """
        # Text is bytes; that the vocabulary has them was seen when they were read.
        for tokens in () if self.is_text else (self.training, self.validation):
            part = np.array_split(tokens, world_size)[rank]
            for start in range(0, len(part), _CHECKED_TOKENS):
                if (largest := int(part[start : start + _CHECKED_TOKENS].max())) >= self._model.vocab_size:
                    raise UsageError(
                        f"the data holds token id {largest}, beyond the vocabulary of {self._model.vocab_size}; "
                        "give the data that fits the model, or --vocab-size"
                    )
        return self

    @property
    def _model(self) -> ModelConfig:
        assert self.config.model is not None, "a workload has its own batches"
        return self.config.model

    def _parts(
        self, tokens: Tokens, starts: npt.NDArray[np.integer], rank: int, world_size: int, batch: int
    ) -> list[Batch]:
        mine = np.split(starts, world_size)[rank]
        context, vocab_size = self.config.step.context, self._model.vocab_size
        return [cut_sequences(tokens, part, context, vocab_size) for part in np.split(mine, len(mine) // batch)]


def open_data(path: Path | None, config: RunConfig) -> TokenData:
    """The tokens of a text file, a folder, a `.bin` file or the standard library's source (None), split in two.

    Raises:
        UsageError: no such data, or too little of it for one sequence to train on and one to validate on.
    """
    assert config.model is not None, "a workload has its own batches"
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
