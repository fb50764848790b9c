"""The ladder of a script of several ranks: all of them run what the first one's ladder says, and all are judged."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.observe.measuring import SCRIPTS
from tests.torchrun import torchrun
from trainstep.base.errors import UsageError
from trainstep.ladder.ranks import Leader, Order, check_one_host
from trainstep.observe.command import command_of
from trainstep.observe.supervise import Rank
from trainstep.rows import ChangeRow
from trainstep.rows.records import of_kind, read_records

FOLLOW = """
import os, sys
from pathlib import Path
from trainstep.ladder.ranks import follow
from trainstep.observe.command import command_of
from trainstep.observe.supervise import Rank
sys.exit(follow(command_of([sys.argv[1]]), Rank.of(os.environ), Path(sys.argv[2])))
"""


def test_ranks_on_several_hosts_are_refused():
    check_one_host({})
    check_one_host({"LOCAL_WORLD_SIZE": "2", "WORLD_SIZE": "2"})
    with pytest.raises(UsageError, match="2 of 4 ranks on this host; expected all"):
        check_one_host({"LOCAL_WORLD_SIZE": "2", "WORLD_SIZE": "4"})


@pytest.fixture
def two(tmp_path, monkeypatch):
    """The first rank's leader, another process that follows, and how an order of a script is made."""
    file, ladder = tmp_path / "script.py", tmp_path / "ladder"
    environment = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_PORT": "1"}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    file.write_text("")
    words = [sys.executable, "-c", FOLLOW, str(file), str(ladder)]
    leader = Leader(command_of([str(file)]), Rank(0, 2, "test"), ladder)
    monkeypatch.setattr(leader, "_folder", ladder / f"orders-{os.getpid()}-{_started(os.getpid())}")
    trial = {"changes": [], "rounding": None, "without_dropout": False, "sources": {}}

    def order(number, text):
        file.write_text("import os, sys, time\nrank = int(os.environ['RANK'])\n" + text)
        folder = tmp_path / f"{number}"
        folder.mkdir()
        return Order(number, str(folder), str(tmp_path), str(file), 3, trial, 60.0)

    with leader.others():
        follower = subprocess.Popen(words, env={**os.environ, "RANK": "1"})
        monkeypatch.setenv("RANK", "0")
        yield leader, order
    assert follower.wait(20) == 0, "it ends with the ladder"


def _started(pid):
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc to tell one start of torchrun from another")
def test_runs_are_of_all_ranks_and_end_when_one_fails(two):
    leader, order = two
    tell = "open(f'told-{rank}', 'a').write(os.environ['MASTER_PORT'] + ' ')\n"
    first = order(1, tell)
    assert leader.carry_out(first) == (0, None)
    assert leader.carry_out(order(2, tell)) == (0, None)
    ports = [Path(first.place, f"told-{rank}").read_text().split() for rank in (0, 1)]
    assert ports[0] == ports[1]
    assert len(set(ports[0])) == 2, "a port of its own for every run"
    start = time.monotonic()
    code, failed = leader.carry_out(order(3, "time.sleep(0 if rank else 50)\nsys.exit('lost' if rank else 0)\n"))
    assert (code, failed.rank, failed.code) == (1, 1, 1)
    code, failed = leader.carry_out(order(4, "time.sleep(50 if rank else 0)\nsys.exit(0 if rank else 7)\n"))
    assert (code, failed) == (7, None), "the other one was ended"
    assert time.monotonic() - start < 25


@pytest.mark.thorough
@pytest.mark.distributed
@pytest.mark.timeout(900)
def test_a_script_under_torchrun_climbs(tmp_path):
    names = "fused optimizer,bf16 autocast"
    options = ["--ladder", "--in-place", "--steps", 8, "--changes", names, "--out", tmp_path]
    # Gradients of more than one bucket.
    ended = torchrun("trainstep", "run", *options, SCRIPTS / "data_parallel.py", timeout=900, WIDTH="256")
    assert ended.returncode == 0, ended.stderr
    rows = {row.change: row for row in of_kind(read_records(tmp_path / "results.jsonl"), ChangeRow)}
    assert (rows["baseline"].verdict, rows["baseline"].gradient_error) == ("baseline", 0.0)
    for name in names.split(","):
        assert rows[name].status == "ok", rows[name].reason
        assert rows[name].gain_low <= rows[name].gain <= rows[name].gain_high
    assert not list(tmp_path.glob("orders-*"))
    assert ended.stderr.count("Written to") == 1
