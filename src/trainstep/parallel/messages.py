"""Exchanges over Gloo by messages from rank to rank, every receive announced before anything is sent.

Gloo sends a message when it knows that the other rank is ready for it. What tells a rank that this one is ready takes
the same connection, behind all that is being sent on it. Gloo's own all-gather and all-to-all send first, so two ranks
mostly take turns: while one sends, the other does not know that it may. Here receives come first, and both directions
of a connection are used at once. Between two hosts at 1 Gbit/s an all-to-all of 25 MB takes 108 ms for Gloo's 210.

An exchange runs on a thread of its group's, which waits for its messages; as of Gloo's own threads there are two. What
is under way is noted (`announced`), since torch's flight recorder does not know of messages.
"""

from __future__ import annotations

import itertools
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import nullcontext
from queue import SimpleQueue
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import record_function

from trainstep.parallel.announced import Announced, Record, is_profiled, note

Message = tuple[int, Tensor]
"""The other rank, by its number in the group, and contiguous memory of the host that is sent or written into."""
THREADS = 2  # of a group
_ENDING_S = 1.0
_TAGS = 2**30
"""The first tag, and how many there are: a user's own messages have small ones, and an exchange is over long before its
tag comes again."""


class Exchange:
    """Messages under way."""

    def __init__(self, record: Record) -> None:
        self._record = record
        self._done: Future[None] = Future()

    def wait(self) -> None:
        """Wait until everything was received and sent.

        Raises:
            RuntimeError: Gloo's: another rank is gone, or the group's timeout is over.
        """
        self._done.result()

    def when_over(self, call: Callable[[], object]) -> None:
        """Call when everything was received and sent, on the thread that does it."""
        self._done.add_done_callback(lambda _: call())

    def carry_out(self, backend: Any, receives: Sequence[Message], sends: Sequence[Message]) -> None:
        """Receive and send, and wait for it, on the thread that calls."""
        tag = _TAGS + self._record.number % _TAGS
        profiled = record_function(f"gloo:{self._record.name}") if is_profiled() else nullcontext()
        try:
            with profiled:  # in which torch's own range of each message is a part
                works = [backend.recv([into], other, tag) for other, into in receives]
                works += [backend.send([what], other, tag) for other, what in sends]
                while works:
                    works.pop(0).wait()
        except BaseException as error:
            self._record.is_over = True
            self._done.set_exception(error.with_traceback(None))  # which would keep the memory
        else:
            self._record.is_over = True
            self._done.set_result(None)


class _Carriers:
    """A group's threads, and how many exchanges it has had."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.numbers: Iterator[int] = itertools.count(1)
        self.jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        threads = [
            threading.Thread(target=_carry, args=(self.jobs,), name=f"messages {number}", daemon=True)
            for number in range(THREADS)
        ]
        for thread in threads:
            thread.start()
        self.end = weakref.finalize(group, _end, self.jobs, threads)  # or when Python ends


_carriers: weakref.WeakKeyDictionary[dist.ProcessGroup, _Carriers] = weakref.WeakKeyDictionary()
_carriers_change = threading.Lock()  # autograd's threads start exchanges, too


def exchange(
    name: Announced, group: dist.ProcessGroup, *, receives: Sequence[Message], sends: Sequence[Message]
) -> Exchange:
    """Start to receive and to send; between two ranks the first that is sent goes into the first that is received.

    All ranks of the group start the same exchanges in the same order. Memory that is received into must not be used,
    and what is sent must not change, until the exchange was waited for.
    """
    backend = group._get_backend(torch.device("cpu"))
    with _carriers_change:
        if group not in _carriers:
            _carriers[group] = _Carriers(group)
        carriers = _carriers[group]
        where = f"messages:{group.group_name}:{group.group_desc}"
        record = Record(where, next(carriers.numbers), name, time.time())
        started = Exchange(record)
        carriers.jobs.put(lambda: started.carry_out(backend, receives, sends))
    note(record)
    return started


def _carry(jobs: SimpleQueue[Callable[[], None] | None]) -> None:
    while (job := jobs.get()) is not None:
        job()
        del job  # and with it the memory, which would live on until the next


def _end(jobs: SimpleQueue[Callable[[], None] | None], threads: Sequence[threading.Thread]) -> None:
    """End the threads, and wait for it unless they wait for others: one that runs on while Python ends takes the
    process down with it (SIGABRT)."""
    for _ in threads:
        jobs.put(None)
    for thread in threads:
        if thread is not threading.current_thread():
            thread.join(_ENDING_S)
