"""Training over several hosts: equal to one process, and a named error on every rank when the network breaks."""

import threading
import time

import pytest
import torch
import torch.distributed as dist

from tests.hosts import Hosts
from tests.parallel.test_rollcall import sentence
from tests.train.runs import alone, config, far_apart, losses, on_rank
from tests.workers import WorkerError, Workers

pytestmark = [pytest.mark.hosts, pytest.mark.distributed]


def test_training_over_two_hosts_equals_one_process(tmp_path):
    alone(config(), tmp_path / "alone")
    with Hosts(2) as hosts, Workers(4, hosts=hosts) as workers:
        for scheme in ("hsdp", "ddp"):
            workers.run(on_rank, config(scheme=scheme, step={"batch": 1}), tmp_path / scheme)
            assert far_apart(losses(tmp_path / "alone"), losses(tmp_path / scheme)) < 1e-5, scheme


def _steps(process):
    total = torch.ones(1000)
    for number in range(1, 10**6):
        process.now(f"update {number}")
        dist.all_reduce(total, group=process.group)
        time.sleep(0.01)


def broken(count, ranks, fault, *, timeout_s=3.0):
    """What every rank says when, after a second, `fault(hosts)` comes; and how long that took."""
    with Hosts(count) as hosts, Workers(ranks, hosts=hosts, timeout_s=timeout_s) as workers:
        workers.run(_met)
        ended = []

        def happens():
            ended.append(time.monotonic())
            fault(hosts)

        threading.Timer(1, happens).start()
        with pytest.raises(WorkerError) as caught:
            workers.run(_steps)
        return [sentence(caught.value.failures[rank]) for rank in range(ranks)], time.monotonic() - ended[0]


def _met(process):
    dist.barrier(group=process.group)


def test_a_cable_that_is_pulled_is_said_on_both_sides_within_the_timeout():
    said, seconds = broken(2, 3, lambda hosts: hosts.pull(1))
    for rank in (0, 1):
        assert said[rank].startswith("rank 2 (host b) does not answer: killed, stopped, hung or cut off; ")
        assert f"rank {rank} was in all_reduce no. " in said[rank]
        assert " of update " in said[rank]
    assert said[2].startswith(
        "the store at 10.77.0.1:29400, by which the ranks find each other, does not answer, so its"
    )
    assert "cut off from this one (host b)" in said[2]
    assert seconds < 3 + 5 + 2 + 5, "the timeout, the others' grace, and what a busy machine takes"
