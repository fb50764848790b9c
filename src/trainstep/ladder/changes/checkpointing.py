"""Blocks that are computed again in backward: time for memory."""

from __future__ import annotations

from typing import Any

from trainstep.base.advice import Line
from trainstep.ladder.change import Change, without_blocks
from trainstep.ladder.trial.trial import Trial


def checkpointed_blocks(trial: Trial) -> None:
    """The repeated blocks of every model that is called in training keep their inputs alone, and backward runs them
    again, with the random numbers of the first time."""

    def change(module: Any) -> None:
        from trainstep.checkpointing.recomputing import Checkpointing
        from trainstep.step.blocks import find_blocks

        if find_blocks(module):
            Checkpointing(module, "every-1")

    trial.on_first_call.append(change)


CHECKPOINTED = Change(
    "checkpointed blocks",
    Line(
        "torch.utils.checkpoint.checkpoint(block, x, …, use_reentrant=False)",
        "in place of block(x, …); gradient_checkpointing_enable() of transformers' models",
    ),
    {"script": 0.75},
    script=checkpointed_blocks,
    why_not=lambda settings: "the script sets it itself" if settings["checkpoints"] else without_blocks(settings),
    trades="time for memory",
)
