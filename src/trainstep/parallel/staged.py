"""The way of a GPU's tensors through the host's memory, which Gloo reads and writes, and back.

There: copies into pinned memory on the current stream, which the host waits for, as no stream could make Gloo's threads
wait. That is a wait for all that the stream was given before, such as the layers of backward that made a gradient. From
then on nothing of the call is on the GPU, and whatever it is given next runs beside Gloo.

Back: the host waits for Gloo, and what the current stream does after that comes after the copies.

Tensors of a CPU take the same way, in plain memory, where lists are packed for Gloo.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor


class Waitable(Protocol):
    """A call under way."""

    def wait(self) -> object:
        """Let the current stream (on a CPU: the caller) wait for the result."""


def when_over(work: Any, call: Callable[[], None]) -> None:
    """Call when a call under way over the host's memory is over, on the thread that carries it out."""
    if isinstance(work, dist.Work):
        work.get_future().add_done_callback(lambda _: call())
    else:
        work.when_over(call)


def host_room(likes: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """Memory of the host for the elements of all, (sum of elements,), and each one's stretch of it, (elements,)."""
    sizes = [like.numel() for like in likes]
    memory = torch.empty(sum(sizes), dtype=likes[0].dtype, pin_memory=likes[0].is_cuda)
    return memory, list(memory.split(sizes))


def to_host(tensors: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """`host_room` with the elements of one-dimensional tensors; they are there when this returns."""
    memory, parts = host_room(tensors)
    for part, tensor in zip(parts, tensors, strict=True):
        part.copy_(tensor, non_blocking=True)
    if tensors[0].is_cuda:
        torch.cuda.current_stream(tensors[0].device).synchronize()
    return memory, parts


class Staged:
    """A call under way over the host's memory; waiting for it brings the results back: (from, to).

    `before` makes of what has come what is to be brought back.
    """

    def __init__(
        self, work: Waitable, back: Sequence[tuple[Tensor, Tensor]], before: Callable[[], object] = lambda: None
    ) -> None:
        self._work: Waitable | None = work
        self._back, self._before = back, before

    def when_over(self, call: Callable[[], None]) -> None:
        """As the function; what has come is not brought back yet."""
        when_over(self._work, call)

    def wait(self) -> None:
        """The host waits for Gloo, the current stream for the copies."""
        if self._work is None:
            return
        self._work.wait()
        self._before()
        for source, target in self._back:
            target.copy_(source, non_blocking=True)  # torch keeps pinned memory until streams are through with it
        self._work, self._back, self._before = None, (), lambda: None
