"""Checkpoints that several hosts write: whole or not there, and read by other numbers of hosts and ranks."""

import os
import re
import threading
import time
from unittest import mock

import pytest
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from tests.hosts import Hosts
from tests.parallel.test_rollcall import sentence
from tests.train.runs import alone, config, far_apart, losses, names, on_rank, rows, until
from tests.workers import WorkerError, Workers

pytestmark = [pytest.mark.hosts, pytest.mark.distributed, pytest.mark.thorough]

STEPS = {"steps": 24, "eval_every": 12, "save_every": 24}


@pytest.mark.parametrize(
    "starts",
    [
        [("hsdp", 2, 4), ("fsdp", 1, 2), ("ddp", 3, 3)],
        [("ddp", 3, 3), ("hsdp", 2, 4), ("fsdp", 2, 2)],
        [("sharded-optimizer", 2, 4), ("sharded-optimizer", 3, 3), ("fsdp", 1, 2)],
        [("hsdp", 2, 4), ("sharded-optimizer", 3, 3), ("ddp", 2, 2)],
    ],
    ids=lambda starts: "-".join(scheme for scheme, _, _ in starts),
)
def test_a_run_goes_on_at_other_numbers_of_hosts_and_ranks_and_under_other_schemes(tmp_path, starts):
    """What three and four ranks both divide: 24 sequences an update."""
    alone(config(global_batch=24, **STEPS), tmp_path / "expected")
    for number, (scheme, count, ranks) in enumerate(starts, start=1):
        run = config(scheme=scheme, global_batch=24, step={"batch": 2}, **STEPS)
        with Hosts(max(count, 2)) as hosts, Workers(ranks, hosts=hosts if count > 1 else None) as workers:
            workers.run(until, run, tmp_path / "run", 8 * number) if number < 3 else workers.run(
                on_rank, run, tmp_path / "run"
            )
    assert [row["world_size"] for row in rows(tmp_path / "run")] == [ranks for _, _, ranks in starts for _ in range(8)]
    assert far_apart(losses(tmp_path / "expected"), losses(tmp_path / "run")) < 1e-5


def _dies_writing(process, run, out, where):
    """Train; the last rank, when it writes the second checkpoint, says so and waits for its end, or for a while."""
    write, written = FileSystemWriter.write_data, []

    def waits(*arguments):
        written.append(None)
        if len(written) == 2 and process.rank == process.world_size - 1:
            if where == "after":
                write(*arguments).wait()
            (out.parent / "writing").write_text(str(os.getpid()))
            time.sleep(60)
        return write(*arguments)

    with mock.patch.object(FileSystemWriter, "write_data", waits):
        on_rank(process, run, out)


@pytest.mark.parametrize("where", ["before", "after"])
@pytest.mark.parametrize("scheme", ["ddp", "hsdp", "sharded-optimizer"])
def test_a_host_that_dies_while_it_writes_leaves_a_whole_checkpoint_or_none(tmp_path, scheme, where):
    run, out = config(scheme=scheme, save_every=4, step={"batch": 1}), tmp_path / "run"
    with Hosts(2) as hosts, Workers(4, hosts=hosts, timeout_s=4) as workers:
        workers.run(_nothing)

        def dies():
            while not (tmp_path / "writing").exists():
                time.sleep(0.01)
            hosts.kill(1)

        threading.Thread(target=dies, daemon=True).start()
        with pytest.raises(WorkerError) as caught:
            workers.run(_dies_writing, run, out, where)
    for rank in (0, 1):
        said = sentence(caught.value.failures[rank])
        assert re.match(r"rank 2 \(host b\), rank 3 \(host b\) do not answer: ", said), caught.value.failures[rank]
        assert "See that there is room" not in said
    assert [name for name in names(out) if not name.startswith(".")] == ["step-00000004"]
    assert any(name.startswith(".step-00000008.") for name in names(out)), "it was begun"
    alone(config(save_every=4), out)
    alone(config(save_every=4), tmp_path / "expected")
    assert far_apart(losses(tmp_path / "expected"), losses(out)) < 1e-5
    assert names(out) == names(tmp_path / "expected"), "what was begun is removed"


def _nothing(process):
    pass
