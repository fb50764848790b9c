"""What a run leaves for its judge lies in memory, and on disk where that has no room."""

import os
from pathlib import Path

import pytest
import torch

from trainstep.base import hardware
from trainstep.ladder.trial.capture import TensorFile, read
from trainstep.ladder.trial.in_memory import in_memory, make_room

WEIGHTS = torch.arange(1000.0)

needs_memory_files = pytest.mark.skipif(
    not hasattr(os, "memfd_create"), reason="this system has no files that are in memory alone"
)


def save(path):
    make_room(path, WEIGHTS.nbytes)
    file = TensorFile(path)
    file.add("all", {"w": WEIGHTS.shape})["w"].copy_(WEIGHTS)
    file.finish({})


def weights_in(path):
    return read(path)[0]["all"]["w"]


@needs_memory_files
def test_what_was_read_stays_when_its_file_is_gone(tmp_path):
    before = len(os.listdir("/proc/self/fd"))
    with in_memory(tmp_path / "run", ["one", "two"]):
        pid = os.fork()
        if not pid:  # another process writes
            save(tmp_path / "run/one")
            os._exit(0)
        assert os.waitpid(pid, 0)[1] == 0
        assert (tmp_path / "run/one").is_symlink()
        found = weights_in(tmp_path / "run/one")
    assert torch.equal(found, WEIGHTS)
    assert os.listdir(tmp_path / "run") == []
    assert len(os.listdir("/proc/self/fd")) <= before, "nothing holds it any more"


@needs_memory_files
@pytest.mark.parametrize("why", ["no room", "no room for all ranks", "no links"])
def test_else_it_is_on_disk(tmp_path, monkeypatch, why):
    if why == "no links":

        def refuse(*_):
            raise OSError

        monkeypatch.setattr(Path, "symlink_to", refuse)
    else:
        ranks = 2 if why.endswith("ranks") else 1
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
        monkeypatch.setattr("trainstep.ladder.trial.in_memory.free_host_bytes", lambda: 8000 * ranks - 1)
    with in_memory(tmp_path, ["one"]):
        save(tmp_path / "one")
    assert torch.equal(weights_in(tmp_path / "one"), WEIGHTS)


def test_a_file_without_a_link_is_written_as_any_other(tmp_path):
    save(tmp_path / "one")
    assert torch.equal(weights_in(tmp_path / "one"), WEIGHTS)


@pytest.mark.parametrize(
    ("limit", "used", "expected"), [("max", "0", None), ("9000", "2000", 7000), ("9000", "9500", 0)]
)
def test_a_containers_limit_counts(tmp_path, monkeypatch, limit, used, expected):
    (tmp_path / "memory.max").write_text(f"{limit}\n")
    (tmp_path / "memory.current").write_text(f"{used}\n")
    monkeypatch.setattr(hardware, "CGROUP", tmp_path)
    found = hardware.free_host_bytes()
    assert found == expected if expected is not None else found > 2**20
