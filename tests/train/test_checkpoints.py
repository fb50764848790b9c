"""A checkpoint is complete or not there, and the newest ones stay."""

import collections
import dataclasses
import io
import os
import pickle
import random
import re
import time
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from tests.train.runs import config, names, on_rank
from tests.workers import Workers
from trainstep.base.errors import UsageError
from trainstep.parallel.checkpoint_files import load_files, read_metadata
from trainstep.parallel.process import join_group_or_alone
from trainstep.train import loop
from trainstep.train.checkpoints import CheckpointWriter, open_checkpoint


@pytest.fixture
def writer(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    with join_group_or_alone("cpu"):
        writer = CheckpointWriter(tmp_path / "checkpoints", keep=2, group=dist.new_group(backend="gloo"), last=None)
        yield writer
        writer.close()


def test_the_newest_are_kept_and_say_what_they_are(writer, tmp_path):
    for step in (1, 2, 3):
        writer.save(step, {"weight": torch.full((3,), float(step))}, {"tokens": 10 * step})
        assert f"step-{step:08d}" not in names(tmp_path), "it has its name when it is complete"
    writer.wait()
    assert names(tmp_path) == ["step-00000002", "step-00000003"]
    assert writer.last == 3
    assert open_checkpoint(writer.folder, 3).note["tokens"] == 30


def test_one_that_cannot_be_written_says_so_and_leaves_the_one_before(writer, tmp_path):
    writer.save(4, {"weight": torch.ones(3)}, {})
    writer.wait()
    writer._hidden(8).write_text("in the way")
    writer.save(8, {"weight": torch.ones(3)}, {})
    with pytest.raises(
        UsageError, match=r"step-00000008 could not be written: .*; the last complete one is step-\d+4\."
    ):
        writer.wait()
    assert writer.last == 4
    assert "step-00000008" not in names(tmp_path)
    assert open_checkpoint(writer.folder, 4).step == 4


def test_every_flipped_bit_is_noticed_and_its_file_named(writer, tmp_path):
    writer.save(4, {"weight": torch.arange(30.0), "rate": 0.1, "betas": (0.9, 0.95)}, {"tokens": 1234})
    writer.wait()
    folder = writer.folder / "step-00000004"
    files, dice = sorted(folder.iterdir()), random.Random(5)
    assert {path.name for path in files} >= {".metadata", "__0_0.distcp", "checkpoint.json"}
    for path in [*files, *dice.choices(files, k=57)]:
        content = path.read_bytes()
        place, flip = dice.randrange(len(content)), 1 << dice.randrange(8)
        path.write_bytes(content[:place] + bytes([content[place] ^ flip]) + content[place + 1 :])
        with pytest.raises(UsageError, match=rf"step-00000004 is damaged: .*{re.escape(path.name)}"):
            open_checkpoint(writer.folder, 4)
        path.write_bytes(content)
    open_checkpoint(writer.folder, 4)


class _Planted:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


def _plant(folder, where, found):
    """Let the checkpoint in `folder` make the folder `found` when it is unpickled, and its sums fit."""
    if where == ".metadata":
        metadata = pickle.loads((folder / ".metadata").read_bytes())
        metadata.planner_data["planted"] = _Planted(str(found))
        (folder / ".metadata").write_bytes(pickle.dumps(metadata))
        return
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    (index,) = (each for each in metadata.storage_data if each.fqn == "rate")
    planted = io.BytesIO()
    torch.save(_Planted(str(found)), planted)
    info = metadata.storage_data[index]
    (folder / "planted.distcp").write_bytes(planted.getvalue())
    metadata.storage_data[index] = dataclasses.replace(
        info, relative_path="planted.distcp", offset=0, length=len(planted.getvalue())
    )
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


@pytest.mark.parametrize("where", [".metadata", "a value"])
def test_what_is_planted_in_a_checkpoint_is_not_run(tmp_path, where):
    found, folder = tmp_path / "it-was-run", tmp_path / "checkpoint"
    dcp.save({"weight": torch.ones(3), "rate": 0.1}, checkpoint_id=str(folder), no_dist=True)
    _plant(folder, where, found)
    with join_group_or_alone("cpu") as process, pytest.raises((UsageError, CheckpointException), match="mkdir"):
        load_files(folder, {"weight": torch.zeros(3), "rate": 0.0}, process.group)
    assert not found.exists()


def test_plain_values_of_every_kind_are_read(tmp_path):
    state = {"rate": 0.1, "betas": (0.9, 0.95), "names": ["a", {"b": None}], "flag": True,
             "counts": collections.OrderedDict(a=1), "weight": torch.ones(3, dtype=torch.bfloat16)}  # fmt: skip
    dcp.save(state, checkpoint_id=str(tmp_path / "checkpoint"), no_dist=True)
    empty = {"rate": 0, "betas": (0, 0), "names": ["", {"b": 1}], "flag": False,
             "counts": collections.OrderedDict(a=0), "weight": torch.zeros(3, dtype=torch.bfloat16)}  # fmt: skip
    with join_group_or_alone("cpu") as process:
        load_files(tmp_path / "checkpoint", empty, process.group)
    assert torch.equal(empty.pop("weight"), state.pop("weight"))
    assert empty == state


def test_metadata_that_points_outside_of_its_folder_is_refused(tmp_path):
    dcp.save({"weight": torch.ones(3)}, checkpoint_id=str(tmp_path / "checkpoint"), no_dist=True)
    path = tmp_path / "checkpoint" / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    ((index, info),) = metadata.storage_data.items()
    metadata.storage_data[index] = dataclasses.replace(info, relative_path="../other.distcp")
    path.write_bytes(pickle.dumps(metadata))
    with pytest.raises(UsageError, match=r"points to '\.\./other\.distcp', outside of its folder"):
        read_metadata(tmp_path / "checkpoint")


def test_the_group_of_the_checkpoints_waits_as_long_as_is_asked(tmp_path):
    """A rank that hangs while it writes: the others give up when they are told to."""
    with (
        mock.patch.object(loop, "CheckpointWriter", side_effect=KeyError) as writer,
        join_group_or_alone("cpu", timeout_s=21.0) as process,
    ):
        with pytest.raises(KeyError):
            on_rank(process, config(), tmp_path / "run")
        backend = writer.call_args.kwargs["group"]._get_backend(torch.device("cpu"))
        assert backend.options._timeout.total_seconds() == 21.0


def _one_hangs(process, folder):
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=2))
    writer = CheckpointWriter(folder, keep=1, group=group, last=None)
    write, gave_up = FileSystemWriter.write_data, folder / "gave up"

    def hangs(*arguments):
        deadline = time.monotonic() + 20  # then it writes after all, and nobody is told of an error
        while process.rank == 1 and not gave_up.exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        return write(*arguments)

    with mock.patch.object(FileSystemWriter, "write_data", hangs):
        writer.save(4, {"weight": torch.ones(3)}, {})
        with pytest.raises(UsageError) as stopped:
            writer.wait()
    if process.rank == 0:
        gave_up.touch()
    return str(stopped.value)


@pytest.mark.distributed
def test_a_rank_that_hangs_while_it_writes_is_not_waited_for_longer_than_is_asked(tmp_path):
    with Workers(2) as workers:
        message, _ = workers.run(_one_hangs, tmp_path)
    assert "step-00000004 could not be written" in message
    assert list(tmp_path.glob("step-*")) == []
