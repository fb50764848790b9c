"""The ranks of one start find one another, and nothing that an earlier start has left."""

import random
import threading
import time
from datetime import timedelta

import pytest
from torch.distributed import HashStore

from trainstep.parallel.process import fresh_store


def start(shared, world_size, *, missing=()):
    """All ranks but the missing ones, each in a thread, somewhat apart; what each finds of the others in the end."""
    found, dice = {}, random.Random(world_size)

    def rank(number, pause):
        time.sleep(pause)
        timeout_s = 0.3 if missing else 20
        try:
            store = fresh_store(shared, number, world_size, timeout_s=timeout_s)
            stale = store.check([f"address/{number}"])
            store.set(f"address/{number}", f"{number} of {id(found)}")
            store.wait([f"address/{each}" for each in range(world_size)], timedelta(seconds=timeout_s))
        except Exception as error:
            found[number] = error
            return
        others = [store.get(f"address/{each}").decode() for each in range(world_size)]
        found[number] = (stale, others)

    threads = [
        threading.Thread(target=rank, args=(number, 0.05 * dice.random()))
        for number in range(world_size)
        if number not in missing
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


@pytest.mark.parametrize("world_size", [1, 2, 5])
def test_every_start_is_by_itself(world_size):
    shared = HashStore()
    for _ in range(3):
        found = start(shared, world_size)
        addresses = [f"{number} of {id(found)}" for number in range(world_size)]
        assert found == dict.fromkeys(range(world_size), (False, addresses))


@pytest.mark.parametrize("missing", [0, 1])
def test_a_start_that_failed_half_way_does_not_matter_to_the_next(missing):
    shared = HashStore()
    failed = start(shared, 3, missing=[missing])
    assert len(failed) == 2
    assert all(isinstance(error, Exception) for error in failed.values())
    found = start(shared, 3)
    assert {rank: stale for rank, (stale, _) in found.items()} == {0: False, 1: False, 2: False}
    assert all(len(set(others)) == 3 for _, others in found.values())


def test_who_does_not_come_is_named():
    (error,) = start(HashStore(), 4, missing=[1, 2, 3]).values()
    assert isinstance(error, TimeoutError)
    assert "rank 1, 2, 3 did not come" in str(error)
