"""Who is missing when a collective fails: the ranks ask each other, through the store by which they found each other.

While all goes well nothing is asked. A thread of each rank waits for a key of the store, which costs no processor time
(a store in a file is looked at four times a second). A rank whose collective fails, or that stops by an error of its
own, says so in the store, and where it was; then the threads of the others answer for their ranks, with what torch's
flight recorder has of their collectives and the line of code that they are at. So a rank that hangs in a user's code is
named with that line; one whose thread cannot answer (killed, stopped, cut off, or in compiled code that keeps Python's
lock) as silent. The first verdict is every rank's.

Over Gloo, ranks that take different collectives for the same one would wait until the timeout: one that has run out of
batches comes to a barrier, the others average gradients. A second thread of each rank looks every `LOOKS_S` whether its
rank has stood still. Then it compares its rank's collective with that of the last rank that stood still before it, and
ends its process where they came to collectives in different orders.

A rank that is still there `ENDED_S` after the first failure is ended by its own thread: it hangs, or waits for one that
does, and torchrun starts the processes again only when all have ended. Anything that is asked of the store is asked by
a thread that is given up after a while, since the store's host may be the one that died.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from functools import partial
from typing import Any, NoReturn

import torch.distributed as dist
from torch._C._distributed_c10d import FileStore
from torch.distributed.distributed_c10d import PrefixStore

from trainstep.base.errors import CollectiveError, UsageError, line_of, place_of, printable, say
from trainstep.parallel.announced import BESIDE, Call, members, noted, started
from trainstep.parallel.verdict import Answer, apart, verdict

GRACE_S = 5.0  # how long a rank may take to answer
ENDED_S = 10.0  # how long a rank may still be there after another has failed
LOOKS_S = 5.0  # how often a thread looks whether its rank stands still
_SPEAKS_S = 0.5  # how long a thread lets its rank answer for itself: often all fail at once
_ENDING_S = 2.0  # how long a rank waits for its thread to end, which it does at once unless the store is gone
# A connection that is silent for so long may be dropped between hosts; then this rank is named, and cannot answer.
_WAKING_S = 86_400.0  # how long a thread waits for its key at a time; torch warns on the terminal whenever that is over
_LOOKS_S = 0.25  # where the store is a file, how long between two looks at it
_GPU_GAVE_UP = "unspecified launch failure"
_OF_A_COLLECTIVE = re.compile(
    r"gloo/|connectFullMesh|timeout caused pair closure|closed by peer|reset by peer|\bNCCL\b|ncclComm|\[c10d\]"
)
"""Texts of a backend's plain `RuntimeError`; Gloo's mostly names its source, but not always."""


def is_of_a_collective(error: BaseException | None) -> bool:
    """True if this, or what caused it, is that other ranks could not be reached or did not come in time."""
    while error is not None:
        if isinstance(error, dist.DistError) or (
            isinstance(error, RuntimeError) and (_OF_A_COLLECTIVE.search(str(error)) or _is_of_copies(error))
        ):
            return not isinstance(error, CollectiveError)
        error = error.__cause__
    return False


def _is_of_copies(error: RuntimeError) -> bool:
    """True if the GPU gave up waiting for another's copies: its error says no more than that a kernel failed."""
    if _GPU_GAVE_UP not in str(error):
        return False
    waited = [(time.time() - each.since) / each.timeout_s for each in noted() if each.timeout_s and not each.has_ended]
    return any(0.9 < share < 2.0 for share in waited)  # of what began long before, no event says any more that it ended


class Rollcall:
    """A rank's part in the roll call, from when it has joined its group until it leaves.

    Args:
        store: of these ranks of this start alone.
    """

    def __init__(self, store: Any, rank: int, world_size: int) -> None:
        self._store, self._rank, self._world_size = store, rank, world_size
        self._main = threading.get_ident()
        self._speaks = threading.Event()  # the rank itself has noticed a failure
        self._is_over = threading.Event()
        self.doing = ""
        """Work of this rank, for the sentence: "update 12 of ddp"."""
        if world_size > 1:
            store.set(f"host/{rank}", socket.gethostname())
            self._thread = threading.Thread(target=self._watch, name="rollcall", daemon=True)
            self._looking = threading.Thread(target=self._look, name="looking", daemon=True)
            for thread in (self._thread, self._looking):
                thread.start()

    def failed(self, error: BaseException) -> CollectiveError:
        """Error to raise where a collective has failed: which ranks are missing, and in which collective."""
        self._speaks.set()
        is_beside = isinstance(error, UsageError)  # of whoever waited for the thread
        mine = dataclasses.replace(self._here(place_of(error)[2:-1]), is_waiting=True, is_beside=is_beside)
        told = str(error).splitlines()[0] if is_beside else f"{self._was_in(mine)} ({shortened(error)})"
        if self._world_size > 1:
            with _undisturbed():
                found = self._in_time(lambda store: self._verdict(store, mine))
            told = f"{found or self._unreachable()}; {told}"
            self._end()
        return CollectiveError(printable(told))

    def _was_in(self, mine: Answer) -> str:
        waited = _oldest(started())
        where = f"{waited.name} no. {waited.number}" if waited else mine.place
        said = f"rank {self._rank} was in {where}"
        said += f" of {self.doing}" if self.doing else ""
        return said + (f" for {waited.seconds:.1f} s" if waited else "")

    def stopped(self, error: BaseException) -> None:
        """Tell the others that this rank ends by an error of its own."""
        self._speaks.set()
        self._is_over.set()
        if self._world_size == 1:
            return
        said = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        answer = dataclasses.replace(self._here(), stopped=said.splitlines()[0][:300])

        def tell(store: Any) -> str:
            self._answer(store, answer)
            self._wake(store)
            return ""

        self._in_time(tell)
        self._end()

    def leave(self) -> None:
        """Tell the others that this rank leaves in order."""
        self._is_over.set()
        if self._world_size > 1:
            answer = Answer(self._rank, socket.gethostname(), has_left=True)
            with contextlib.suppress(RuntimeError):  # the store's process has left first
                self._store.set(f"answer/{self._rank}", json.dumps(dataclasses.asdict(answer)))
                self._store.set(f"wake/{self._rank}", "")
            self._end()

    def _end(self) -> None:
        """Wait for the threads: one that wakes up while Python ends takes the process down with it (SIGABRT)."""
        self._is_over.set()
        for thread in {self._thread, self._looking} - {threading.current_thread()}:
            thread.join(_ENDING_S)

    def _in_time(self, ask: Callable[[Any], str]) -> str | None:
        """Result that a thread brings back; None if the store does not answer."""
        found: list[str] = []

        def run() -> None:
            with contextlib.suppress(RuntimeError):  # of the store: its host is gone
                found.append(ask(self._store.clone()))

        thread = threading.Thread(target=run, name="asking", daemon=True)
        thread.start()
        thread.join(GRACE_S + 2)
        return found[0] if found else None

    def _verdict(self, store: Any, mine: Answer) -> str:
        """Ask everyone; what the first rank that did so has found."""
        store.add("asking", 1)
        self._answer(store, mine)
        self._wake(store)
        answers = {self._rank: mine}
        deadline = time.monotonic() + GRACE_S
        while not store.check(["verdict"]):
            for rank in range(self._world_size):
                if rank not in answers and store.check([f"answer/{rank}"]):
                    answers[rank] = Answer(**json.loads(store.get(f"answer/{rank}")))
            if len(answers) == self._world_size or time.monotonic() > deadline:
                others = [rank for rank in range(self._world_size) if rank not in answers]
                silent = {rank: store.get(f"host/{rank}").decode() for rank in others}
                store.compare_set("verdict", "", verdict(mine, answers, silent))
            else:
                time.sleep(0.05)
        heard = store.add("heard", 1)
        deadline = time.monotonic() + 1
        while self._rank == 0 and heard < store.add("asking", 0) and time.monotonic() < deadline:
            time.sleep(0.05)  # where no torchrun keeps the store, it ends with this process
            heard = store.add("heard", 0)
        return store.get("verdict").decode()

    def _answer(self, store: Any, answer: Answer) -> None:
        """Stop at what was said first: what comes after is mostly a consequence."""
        store.compare_set(f"answer/{self._rank}", "", json.dumps(dataclasses.asdict(answer)))

    def _wake(self, store: Any) -> None:
        """Wake the threads of all ranks, once."""
        if store.add("wakes", 1) == 1:
            for rank in range(self._world_size):
                store.set(f"wake/{rank}", "")

    def _here(self, place: str = "") -> Answer:
        """Place of the rank now, or `place`; asked by its own thread or by another."""
        last: dict[str, Call] = {}
        calls = started()
        for call in calls:
            last[call.group] = call
        frame, oldest = sys._current_frames().get(self._main), _oldest(calls)
        return Answer(
            self._rank,
            socket.gethostname(),
            self.doing,
            place or (line_of(frame) if frame is not None else ""),
            {group: (call.number, call.name) for group, call in last.items()},
            {group: members(group) for group in last},
            is_waiting=oldest is not None and not oldest.is_over,
            waits_in=(oldest.group, oldest.number, oldest.name) if oldest else (),
        )

    def _look(self) -> None:
        """End this process where it and another rank take different collectives for the same one."""
        before = None
        while not self._is_over.wait(LOOKS_S):
            frame = sys._current_frames().get(self._main)
            now = frame and (id(frame), frame.f_lasti)
            if now == before and (mine := self._here()).is_waiting and (found := self._in_time(partial(_met, mine))):
                self.stopped(CollectiveError(found))
                self._leave_at_once(found)
            before = now

    def _leave_at_once(self, found: str, where: str = "") -> NoReturn:
        say(f"trainstep: {found}; rank {self._rank} {where}is ended", to_stderr=True)
        os._exit(1)

    def _watch(self) -> None:
        """Wait for a failure anywhere; answer, and end this process if it does not end by itself."""
        try:
            store = self._store.clone()
            while not self._is_awake(store):
                pass
            if self._is_over.is_set():
                return
            if not self._speaks.wait(_SPEAKS_S):
                self._answer(store, self._here())
        except RuntimeError:
            return  # the store is gone, and with it torchrun's process, or all is over
        if self._is_over.wait(ENDED_S):
            return
        found = self._in_time(lambda store: store.get("verdict").decode() if store.check(["verdict"]) else "")
        self._leave_at_once(
            found or "another rank has stopped", f"was still at {self._here().at} {ENDED_S:.0f} s later, and "
        )

    def _is_awake(self, store: Any) -> bool:
        if isinstance(_innermost(store), FileStore):  # it would look a hundred times a second
            return self._is_over.wait(_LOOKS_S) or bool(store.check([f"wake/{self._rank}"]))
        try:
            store.wait([f"wake/{self._rank}"], timedelta(seconds=_WAKING_S))
        except dist.DistNetworkError:
            raise
        except RuntimeError:  # it took too long
            return bool(store.check([f"wake/{self._rank}"]))
        return True

    def _unreachable(self) -> str:
        store = _innermost(self._store)
        where = f" at {store.host}:{store.port}" if hasattr(store, "port") else ""
        return (
            f"the store{where}, by which the ranks find each other, does not answer, so its host is down or cut off "
            f"from this one (host {socket.gethostname()})"
        )


def _innermost(store: Any) -> Any:
    """The store that keeps what is under this one's prefixes."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """While the ranks ask, SIGTERM does nothing: torchrun sends it as soon as one process is dead, and waits."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _met(mine: Answer, store: Any) -> str:
    """Compare this rank with the one that stood still before it, by `apart`; each leaves word of where it stands.

    Only the first rank that finds this is told: when it has ended, the others fail by themselves.
    """
    backend, _, ranks = mine.waits_in[0].partition(":")
    if backend != "gloo":
        return ""
    key = f"stands/{ranks}"
    before = json.loads(store.get(key)) if store.check([key]) else None
    store.set(key, json.dumps(dataclasses.asdict(mine)))
    found = apart(Answer(**before), mine) if before else ""
    return found if found and int(store.compare_set("found", "", str(mine.rank))) == mine.rank else ""


def _oldest(calls: Iterable[Call]) -> Call | None:
    """Oldest of training's collectives that has not ended, else the last."""
    training = [call for call in calls if not call.group.endswith(BESIDE)]
    return next((call for call in training if not call.is_over), training[-1] if training else None)


def shortened(error: BaseException) -> str:
    """The first line of a backend's message, without the place in its own source."""
    line = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return re.sub(r"^(\[[^\]]*\] *)+", "", line).split(". This is typically")[0][:300]
