"""Work beside the computation: on a GPU a stream of its own, ordered by events; on a CPU Gloo's threads.

The rule that keeps memory safe without the host ever waiting: every buffer is allocated and freed in the order of the
computation's stream. A side stream starts after what the computation has been given so far, so a buffer is there before
it is used; and the computation waits for the side stream's event before the buffer is freed, so it is there until then.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from trainstep.parallel.collectives import Waitable


class Pending:
    """Work under way. `wait` makes the current stream (on a CPU: the caller) wait for its end."""

    def __init__(
        self,
        event: torch.cuda.Event | None = None,
        work: Waitable | None = None,
        then: Callable[[], None] | None = None,
        holds: object = None,
    ) -> None:
        self._event = event
        self._work = work
        self._then = then
        self._holds = holds  # what must not be freed before the wait

    def wait(self) -> None:
        """Return when the current stream may use the result."""
        if self._event is not None:
            torch.cuda.current_stream().wait_event(self._event)
        if self._work is not None:
            self._work.wait()  # for NCCL's the current stream waits, too
        if self._then is not None:
            self._then()
        self._event = self._work = self._then = self._holds = None


class SideStream:
    """A stream for communication and the copies around it."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def run(
        self,
        start: Callable[[], Waitable | None] | None,
        *,
        before: Callable[[], None] | None = None,
        after: Callable[[], None] | None = None,
    ) -> Pending:
        """Run `before`, what `start` starts, and `after`, behind all that the current stream has so far.

        `start` returns a collective under way, or None if it has given the current stream all there is to do. On a CPU
        `after` runs when the collective is waited for.
        """
        if self._stream is None:
            if before is not None:
                before()
            work = None if start is None else start()
            if work is not None:
                return Pending(work=work, then=after, holds=start)
            if after is not None:
                after()
            return Pending()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            if before is not None:
                before()
            work = None if start is None else start()
            if work is not None and after is None:
                return Pending(work=work, holds=start)  # so that what is run here next does not wait for it
            if work is not None:
                work.wait()  # this stream waits for the group's own; the host does not
            if after is not None:
                after()
            return Pending(event=self._stream.record_event(), holds=(start, after))
