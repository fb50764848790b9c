"""Who is missing when a collective fails, and where: on every rank that can still speak, the same."""

import gc
import os
import signal
import threading
import time
import weakref
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests.workers import WorkerError, Workers
from trainstep.base.errors import CollectiveError, UsageError
from trainstep.parallel import announced, rollcall
from trainstep.parallel.announced import Record, note, started
from trainstep.parallel.process import Process, joined
from trainstep.parallel.rollcall import Rollcall, is_of_a_collective


@pytest.fixture
def no_records(monkeypatch):
    """None of other tests' records, which live as long as what they are part of."""
    monkeypatch.setattr(announced, "_noted", weakref.WeakSet())


@pytest.mark.usefixtures("no_records")
@pytest.mark.parametrize(
    ("said", "seconds", "query", "expected"),
    [
        ("CUDA error: unspecified launch failure", 31, RuntimeError("CUDA error"), True),
        ("CUDA error: unspecified launch failure", 31, False, True),
        ("CUDA error: unspecified launch failure", 2, False, False),  # a kernel's own mistake
        ("CUDA error: unspecified launch failure", 31, True, False),
        ("CUDA error: an illegal memory access was encountered", 31, False, False),
    ],
)
def test_a_gpu_that_gave_up_waiting_for_copies_is_told_from_one_that_failed(said, seconds, query, expected):
    answers = {"side_effect": query} if isinstance(query, Exception) else {"return_value": query}
    end = mock.Mock(query=mock.Mock(**answers))
    record = Record("copies:0:default_pg 0", 7, "all_reduce", time.time() - seconds, end=end, timeout_s=30.0)
    note(record)
    assert is_of_a_collective(RuntimeError(said)) is expected


@pytest.mark.usefixtures("no_records")
def test_the_last_copies_are_among_what_was_started():
    record = Record("copies:0:default_pg 0", 0, "all_gather", time.time(), end=mock.Mock(query=lambda: False))
    note(record)
    assert record.group not in {call.group for call in started()}, "none was started yet"
    record.number, record.name = 3, "all_reduce"
    (call,) = [each for each in started() if each.group == record.group]
    assert (call.number, call.name, call.is_over) == (3, "all_reduce", False)
    del record
    gc.collect()
    assert "copies:0:default_pg 0" not in {call.group for call in started()}, "it goes with whoever made it"


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (RuntimeError("[/x/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer"), True),
        (RuntimeError("Application timeout caused pair closure"), True),
        (dist.DistBackendError("NCCL error in: …"), True),
        (RuntimeError("NCCL communicator was aborted on rank 1."), True),
        (RuntimeError("CUDA out of memory"), False),
        (ValueError("about gloo/ but no failure of it"), False),
        (CollectiveError("said before"), False),
    ],
)
def test_what_is_a_failed_collective(error, expected):
    assert is_of_a_collective(error) is expected
    caused = UsageError("could not be written")
    caused.__cause__ = error
    assert is_of_a_collective(caused) is expected


class DeadStore:
    """A store whose host does not answer: it refuses, or says nothing for ever."""

    def __init__(self, how):
        self.how = how

    def clone(self):
        if self.how == "refuses":
            raise dist.DistNetworkError("Connection refused")
        threading.Event().wait()

    def set(self, name, value):
        pass


@pytest.mark.parametrize("how", ["refuses", "says nothing"])
def test_a_store_that_is_gone_is_said_in_time(how, monkeypatch):
    waited, join = [], threading.Thread.join

    def joins(thread, timeout=None):
        if thread.name not in ("asking", "rollcall"):
            return join(thread, timeout)
        waited.append(timeout)
        return join(thread, timeout / 20)

    monkeypatch.setattr(threading.Thread, "join", joins)
    before = signal.getsignal(signal.SIGTERM)
    error = Rollcall(DeadStore(how), 1, 2).failed(RuntimeError("[gloo/pair.cc:5] Timed out"))
    assert "the store, by which the ranks find each other, does not answer" in str(error)
    assert str(error).endswith("(Timed out)")
    assert "\n" not in str(error)
    assert sum(waited) <= rollcall.GRACE_S + 4, "for the store, and for its own thread to end"
    assert len(waited) == 2
    assert signal.getsignal(signal.SIGTERM) is before


def reduced(group):
    total = torch.ones(3)
    dist.all_reduce(total, group=group)
    return total


def hang():
    time.sleep(60)  # one that was not ended goes on then, and has another exit code


def _one_hangs(process):
    process.now("update 7")
    reduced(process.group)
    if process.rank == 1:
        rollcall.ENDED_S = 1.0
        hang()
    reduced(process.group)


def _one_fails(process):
    if process.rank == 1:
        raise ArithmeticError("one rank's mistake")
    reduced(process.group)


def _one_is_killed(process):
    if process.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    reduced(process.group)


def _crossed(process):
    rows, columns = process.mesh(2).get_all_groups()
    reduced(rows if process.rank in (0, 3) else columns)


def failures(ranks, function, timeout_s):
    with Workers(ranks, timeout_s=timeout_s) as workers, pytest.raises(WorkerError) as caught:
        workers.run(function)
    return caught.value.failures


def sentence(failure):
    """The last line of a traceback."""
    return failure.strip().splitlines()[-1].partition("CollectiveError: ")[2]


HANGS = (
    "rank 1 (host ",
    "hangs or is late: it is at test_rollcall.py:",
    "(hang) of update 7 and has not come to all_reduce no. 2; ",
    " was in all_reduce no. 2 of update 7 for ",
)
FAILS = ("stopped with ArithmeticError: one rank's mistake; rank",)
KILLED = ("rank 1 (host ", "does not answer: killed, stopped, hung or cut off; ")


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("function", "timeout_s", "on_it", "on_the_others"),
    [
        (_one_hangs, 2, "exit code 1)", HANGS),  # its own thread ended it
        (_one_fails, 20, "ArithmeticError: one rank's mistake", FAILS),
        (_one_is_killed, 20, "exit code -9", KILLED),
    ],
)
def test_a_rank_that_hangs_fails_or_is_killed_is_named_by_the_others(function, timeout_s, on_it, on_the_others):
    found = failures(3, function, timeout_s)
    assert on_it in found[1]
    for rank in (0, 2):
        assert all(part in sentence(found[rank]) for part in on_the_others), sentence(found[rank])


@pytest.mark.distributed
def test_ranks_that_wait_for_different_collectives_are_told_so():
    found = failures(4, _crossed, 2)
    for rank in range(4):
        assert "the ranks wait for different collectives: " in sentence(found[rank])


def _keys_while_all_goes_well(process):
    store = dist.distributed_c10d._get_default_store()
    reduced(process.group)
    before = store.num_keys()
    for number in range(5):
        process.now(f"update {number}")
        reduced(process.group)
    keys, deadline = store.num_keys() - before, time.monotonic() + 10
    while True:
        calls = [call for call in started() if call.group == "gloo:0:default_pg"]
        are_over = all(call.is_over for call in calls)  # which Gloo's thread notes soon after
        if are_over or time.monotonic() > deadline:
            return keys, [call.number for call in calls][-5:], are_over
        time.sleep(0.01)


@pytest.mark.distributed
def test_while_all_goes_well_nothing_is_written():
    with Workers(2) as workers:
        found = workers.run(_keys_while_all_goes_well)
    assert [keys for keys, _, _ in found] == [0, 0]
    assert [numbers for _, numbers, _ in found] == [[2, 3, 4, 5, 6]] * 2, "torch counts for us"
    assert all(are_over for _, _, are_over in found)


def test_ranks_that_do_not_come_are_an_error_in_time():
    with (
        pytest.raises(CollectiveError, match=r"did not come together: this one, on host .*, waited up to 0\.5 s"),
        joined(torch.device("cpu"), rank=0, world_size=2, store=dist.HashStore(), timeout_s=0.5),
    ):
        pass


def test_a_process_without_a_group_says_nothing():
    Process(0, 1, torch.device("cpu"), mock.Mock()).now("update 1")


@pytest.mark.parametrize("how", ["leaves", "stops", "fails"])
def test_no_thread_is_left_that_could_wake_up_while_python_ends(how, monkeypatch):
    monkeypatch.setattr(rollcall, "GRACE_S", 0.2)
    one, other = (
        Rollcall(dist.PrefixStore("ranks", store), rank, 2) for store in [dist.HashStore()] for rank in (0, 1)
    )
    if how == "leaves":
        one.leave()
    elif how == "stops":
        one.stopped(ArithmeticError("mine"))
    else:
        said = str(one.failed(RuntimeError("[gloo/pair.cc:5] Timed out")))
        assert said.endswith("(Timed out)")
    assert not one._thread.is_alive()
    other.leave()
    assert not other._thread.is_alive()
