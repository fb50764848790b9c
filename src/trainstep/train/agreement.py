"""Mistakes become those of every rank, so that no rank waits for one that has left, and one alone says so."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

from trainstep.errors import UsageError
from trainstep.parallel.process import Process

Result = TypeVar("Result")


class AgreedError(UsageError):
    """A mistake that every rank knows of; it is enough that the first one says it."""


def on_first_rank(process: Process, call: Callable[[], Result]) -> Result:
    """Call on rank 0; its result, or its `UsageError` as an `AgreedError`, is that of every rank."""
    outcome: list[Result | UsageError | None] = [None]
    if process.rank == 0:
        try:
            outcome = [call()]
        except UsageError as error:
            outcome = [error]
    dist.broadcast_object_list(outcome, group=process.group, group_src=0)
    if isinstance(outcome[0], UsageError):
        raise AgreedError(str(outcome[0])) from outcome[0]
    return outcome[0]  # type: ignore[return-value]


def on_all_ranks(process: Process, call: Callable[[], Result]) -> Result:
    """Call on every rank; the first rank's `UsageError`, if there is any, is that of every rank."""
    mine: UsageError | None = None
    result: Result | None = None
    try:
        result = call()
    except UsageError as error:
        mine = error
    errors: list[str | None] = [None] * process.world_size
    dist.all_gather_object(errors, None if mine is None else str(mine), group=process.group)
    for rank, message in enumerate(errors):
        if message is not None:
            raise AgreedError(message if process.world_size == 1 else f"rank {rank}: {message}") from mine
    return result  # type: ignore[return-value]
