"""Start-up, agreement between ranks, and workers that end when they should."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed import TCPStore

from tests.workers import WorkerError, Workers
from trainstep.base.errors import UsageError
from trainstep.parallel.process import (
    bind_device,
    check_ranks_agree,
    is_first_to_say,
    join_group,
    resolve_group,
    torchrun_command,
)

REPOSITORY = Path(__file__).parents[2]

pytestmark = pytest.mark.distributed


def _identity(process):
    total = torch.tensor([process.rank + 1.0])
    dist.all_reduce(total, group=process.group)
    return process.rank, process.world_size, str(process.device), total.item()


def test_workers_share_a_group(two):
    assert two.run(_identity) == [(0, 2, "cpu", 3.0), (1, 2, "cpu", 3.0)]


def _agree(process, named, settings):
    check_ranks_agree("Wrapper", named[process.rank].items(), process.group, settings=settings[process.rank])


A = {"a": torch.zeros(2, 3, requires_grad=True), "b": torch.zeros(4, dtype=torch.bfloat16)}
SAME = [{"cap": 1}] * 4

DISAGREEMENTS = {
    "shape": (A | {"b": torch.zeros(5, dtype=torch.bfloat16)}, "b (bfloat16 (5,), frozen) as parameter 1"),
    "dtype": (A | {"b": torch.zeros(4)}, "b (float32 (4,), frozen) as parameter 1, rank 0 b (bfloat16 (4,), frozen)"),
    "name": ({"c": A["a"], "b": A["b"]}, "c (float32 (2, 3)) as parameter 0, rank 0 a (float32 (2, 3))"),
    "frozen": (A | {"a": torch.zeros(2, 3)}, "a (float32 (2, 3), frozen) as parameter 0"),
    "order": ({"b": A["b"], "a": A["a"]}, "b (bfloat16 (4,), frozen) as parameter 0"),
    "missing": ({"a": A["a"]}, "has 1 parameters, rank 0 2; b (bfloat16 (4,), frozen) is the first that only rank 0"),
}


def _disagree(process, cases):
    """Every rank's message, case by case, in one group: no rank is left waiting in any of them."""
    messages = []
    for third, settings in cases:
        named = [A, A, third, A]
        try:
            _agree(process, named, settings)
            messages.append("agreed")
        except UsageError as error:
            messages.append(str(error))
    return messages


def test_ranks_that_differ_are_named_on_every_rank(four):
    cases = [(third, SAME) for third, _ in DISAGREEMENTS.values()]
    cases += [(A, SAME), (A, [{"cap": 1}, {"cap": 1}, {"cap": 1}, {"cap": 2}])]
    by_rank = four.run(_disagree, cases)
    assert all(messages == by_rank[0] for messages in by_rank)
    *wrong, agreed, settings = by_rank[0]
    for message, (name, (_, expected)) in zip(wrong, DISAGREEMENTS.items(), strict=True):
        assert expected in message, name
        assert "rank 2 " in message
        assert "rank 1 " not in message
        assert "rank 3 " not in message
    assert agreed == "agreed"
    assert "rank 3 has cap = 2 as setting, rank 0 cap = 1" in settings


def test_an_uninitialised_process_is_told_what_to_do():
    with pytest.raises(UsageError, match="not initialised; start with torchrun"):
        resolve_group(None)


def test_without_torchrun_the_command_is_given(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["trainstep", "bench", "collectives", "--size-mb", "1,10"])
    monkeypatch.setenv("RANK", "0")
    for name in ("LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    command = "torchrun --nproc-per-node=2 -m trainstep bench collectives --size-mb 1,10"
    assert torchrun_command() == command
    with pytest.raises(UsageError, match=f"MASTER_PORT are not set; run: {command}"), join_group():
        pass


def test_of_ranks_that_say_the_same_one_is_the_first(monkeypatch):
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    told = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    for name, value in told.items():
        monkeypatch.setenv(name, value)
    assert [is_first_to_say(text) for text in ("a", "a", "b", "a")] == [True, False, True, False]
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert is_first_to_say("a"), "torchrun has started all again"
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "False")
    assert is_first_to_say("a"), "there is no store that outlives the ranks"


def test_a_device_that_is_not_there():
    with pytest.raises(UsageError, match="expected auto, cpu or cuda"):
        bind_device("tpu", 0)
    with pytest.raises(UsageError, match="local rank 99 has no GPU"):
        bind_device("cuda", 99)
    assert bind_device("cpu", 99) == torch.device("cpu")


def _outside(process):
    inner = dist.new_group([0])
    try:
        return resolve_group(inner).size()
    except UsageError as error:
        return str(error)


def test_a_group_that_this_rank_is_not_in(two):
    inside, outside = two.run(_outside)
    assert inside == 1
    assert "rank 1) is not in" in outside


def _joined_twice(process):
    from trainstep.parallel.process import joined

    with joined(process.device, rank=0, world_size=1, init_method="env://"):
        pass


def _alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def _rows_and_columns(process):
    """The members of this rank's row and column, in both layouts of four, and whether the groups are made once."""
    found = []
    for replicas in (2, 4):
        mesh = process.mesh(replicas)
        again = process.mesh(replicas)
        members = [dist.get_process_group_ranks(group) for group in mesh.get_all_groups()]
        timeouts = {group._get_backend(process.device).options._timeout for group in mesh.get_all_groups()}
        found.append((mesh.mesh_dim_names, members, again is mesh, {each.total_seconds() for each in timeouts}))
    return found


def test_consecutive_ranks_are_a_replica(four):
    for rank, (two_by_two, four_by_one) in enumerate(four.run(_rows_and_columns)):
        row, column = rank // 2 * 2, rank % 2
        names = ("replicate", "shard")
        assert two_by_two == (names, [[column, column + 2], [row, row + 1]], True, {60.0}), "and waits as long"
        assert four_by_one == (names, [[0, 1, 2, 3], [rank]], True, {60.0})


def _die_beside_a_mesh(process):
    groups = process.mesh(2).get_all_groups()
    if process.rank == 1:
        raise ArithmeticError("one rank's mistake")
    for group in reversed(groups):
        dist.all_reduce(torch.ones(1), group=group)


def test_a_rank_that_dies_is_an_error_in_every_group():
    """Rank 0 waits in its row, rank 3 in its column, and rank 2 for rank 0."""
    with Workers(4, timeout_s=20) as workers, pytest.raises(WorkerError) as caught:
        workers.run(_die_beside_a_mesh)
    assert "one rank's mistake" in caught.value.failures[1]
    assert all("all_reduce" in caught.value.failures[rank] for rank in (0, 2, 3))


def test_torchrun_says_on_how_many_hosts_the_ranks_are(monkeypatch):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    variables = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    for name, value in (variables | {"GROUP_WORLD_SIZE": 3}).items():
        monkeypatch.setenv(name, str(value))
    with join_group("cpu") as process:
        assert (process.hosts, process.world_size) == (3, 1)


def test_a_worker_that_was_killed_while_idle_is_an_error():
    with Workers(2, timeout_s=20) as workers:
        workers.run(_identity)
        pids = workers.process_ids()
        os.kill(pids[1], signal.SIGKILL)
        with pytest.raises(WorkerError) as caught:
            workers.run(_identity)
        assert "exit code -9" in caught.value.failures[1]
        assert not any(map(_alive, pids)), "no process is left"
        assert workers.run(_identity)[0] == (0, 2, "cpu", 3.0)


def test_a_second_group_is_refused(two):
    with pytest.raises(WorkerError, match="joined a group already"):
        two.run(_joined_twice)


def _never(process):
    time.sleep(600)


ORPHANS = """
import sys, tests.parallel.test_process as t
from tests.workers import Workers
if __name__ == "__main__":
    workers = Workers(2)
    workers.run(t._identity)
    print(*workers.process_ids(), flush=True)
    workers.run(t._never)
"""


@pytest.mark.thorough
def test_workers_do_not_outlive_a_killed_parent(tmp_path):
    command, environment = [sys.executable, "-c", ORPHANS], os.environ | {"TMPDIR": str(tmp_path)}
    parent = subprocess.Popen(command, cwd=REPOSITORY, env=environment, stdout=subprocess.PIPE, text=True)
    try:
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(pids) == 2
        assert all(map(_alive, pids))
    finally:
        parent.kill()
        parent.wait()
    deadline = time.monotonic() + 30
    while any(map(_alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(_alive, pids))
