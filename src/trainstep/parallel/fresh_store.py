"""A store that no process of an earlier start has written to.

Ranks find each other through a key-value store, where each leaves its address. torchrun keeps that store when it starts
its workers again after one was killed (seen in torch 2.13; the number of the start, which it tells them, may differ
between hosts). Then a rank that is early finds the address of a process that is dead, and waits for it in vain. So
before anything else the ranks agree on a new name, under which they then keep all they write.

Rank 0 makes the name. Every other rank calls by leaving a word that it has just made up; rank 0 answers each word with
the name; the rank that made up the word, and no other, confirms. Rank 0 answers again when a rank's word changes, as it
does when the first one was a dead process's.
"""

from __future__ import annotations

import time
import uuid
from datetime import timedelta

from torch.distributed.distributed_c10d import PrefixStore, Store

_POLL_S = 0.01


def fresh_store(store: Store, rank: int, world_size: int, *, timeout_s: float) -> Store:
    """The part of `store` under a name that all ranks of this start, and no others, know.

    Raises:
        TimeoutError: some rank has not come in time.
    """
    word = uuid.uuid4().hex
    if rank == 0:
        _answer_all(store, word, world_size, time.monotonic() + timeout_s)
        return PrefixStore(f"start/{word}", store)
    store.set(f"call/{rank}", word)
    store.wait([f"answer/{word}"], timedelta(seconds=timeout_s))
    name = store.get(f"answer/{word}").decode()
    store.set(f"confirm/{name}/{rank}", "")
    return PrefixStore(f"start/{name}", store)


def _answer_all(store: Store, name: str, world_size: int, deadline: float) -> None:
    waiting = set(range(1, world_size))
    answered: dict[int, str] = {}
    while waiting:
        for rank in sorted(waiting):
            if store.check([f"confirm/{name}/{rank}"]):
                waiting.discard(rank)
            elif store.check([f"call/{rank}"]):
                word = store.get(f"call/{rank}").decode()
                if answered.get(rank) != word:
                    answered[rank] = word
                    store.set(f"answer/{word}", name)
        if time.monotonic() > deadline:
            raise TimeoutError(f"rank {', '.join(map(str, sorted(waiting)))} did not come to the rendezvous in time")
        time.sleep(_POLL_S)
