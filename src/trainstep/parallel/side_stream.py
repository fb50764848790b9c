"""Streams of a GPU, and the side stream that runs beside computation."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch

from trainstep.parallel.gloo import Staged, Waitable

_known: dict[tuple[int, int], torch.cuda.Stream] = {}  # by device and address


def current_stream(device: torch.device | None = None) -> torch.cuda.Stream:
    """Stream as `torch.cuda.current_stream` has it, of a device with its number, by default the current one.

    torch makes a new object each time, in 17 µs of the host (notebook/lab-log.md, 2026-11-27), which asks several times
    for every gather; here it is one for each stream.
    """
    number = torch._C._cuda_getDevice() if device is None else device.index
    key = number, torch._C._cuda_getCurrentRawStream(number)
    if (stream := _known.get(key)) is None:
        stream = _known[key] = torch.cuda.current_stream(number)
    return stream


@dataclass
class Pending:
    """Work under way on a side stream."""

    event: torch.cuda.Event | None = None
    work: Waitable | None = None
    then: Callable[[], object] | None = None
    holds: object = None  # what must not be freed before the wait

    def join(self) -> None:
        """On a GPU, let the current stream, which may be another side stream, wait too; the memory is held on to."""
        if self.event is not None:
            current_stream().wait_event(self.event)

    def wait(self) -> None:
        """Let the current stream (on a CPU: the caller) wait for the end of the work."""
        self.join()
        if self.work is not None:
            self.work.wait()  # for NCCL's the current stream waits, too
        if self.then is not None:
            self.then()
        self.event = self.work = self.then = self.holds = None

    def __del__(self) -> None:
        """Free memory after its use where nobody waited for it, after an error or where its owner is gone."""
        if self.event is not None and not sys.is_finalizing():
            self.join()


class SideStream:
    """Runs communication and the copies around it beside computation: on a GPU a stream, on a CPU Gloo's threads.

    The rule that keeps memory safe without the host ever waiting: every buffer is allocated and freed in the order of
    the computation's stream. A side stream starts after what the computation has been given so far, so a buffer is
    there before it is used; and the computation waits for the side stream's event before the buffer is freed, so it is
    there until then.
    """

    def __init__(self, device: torch.device) -> None:
        # Before the computation's: a barrier or a small copy, which others wait for, would wait for its large kernels.
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device, priority=-1)
            self._given = torch.cuda.Event()  # of the computation; wait_stream would make one for every run

    def run(
        self,
        start: Callable[[], Waitable | None] | None,
        *,
        before: Callable[[], object] | None = None,
        after: Callable[[], object] | None = None,
    ) -> Pending:
        """Run `before`, what `start` starts, and `after`, behind all that the current stream has so far.

        `start` returns a collective under way, or None if it has given the current stream all there is to do. Where
        the host has to wait for the collective (between CPUs; staged), `after` runs when it is waited for.
        """
        stream = self._stream
        if stream is None:
            return self._run_on_current(start, before, after)
        device, computing = torch._C._cuda_getDevice(), current_stream(stream.device)
        self._given.record(computing)
        stream.wait_event(self._given)
        torch.cuda.set_stream(stream)  # and its device; torch.cuda.stream() takes the host 10 µs
        try:
            return self._run_on_current(start, before, after)
        finally:
            torch.cuda.set_stream(computing)
            if device != computing.device_index:
                torch.cuda.set_device(device)

    def _run_on_current(
        self,
        start: Callable[[], Waitable | None] | None,
        before: Callable[[], object] | None,
        after: Callable[[], object] | None,
    ) -> Pending:
        """Run on the current stream, where there is a side stream on that."""
        stream = self._stream
        if before is not None:
            before()
        work = None if start is None else start()
        if work is not None and (stream is None or after is None or isinstance(work, Staged)):
            return Pending(work=work, then=after, holds=start)  # and what is run here next does not wait for it
        if work is not None:
            work.wait()  # this stream waits for the group's own; the host does not
        if after is not None:
            after()
        return Pending() if stream is None else Pending(event=stream.record_event(), holds=(start, after))
