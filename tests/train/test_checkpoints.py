"""A checkpoint is complete or not there, and the newest ones stay."""

import pytest
import torch
import torch.distributed as dist

from tests.train.runs import names
from trainstep.errors import UsageError
from trainstep.parallel.process import join_group_or_alone
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
    (writer.folder / ".step-00000008.writing").write_text("in the way")
    writer.save(8, {"weight": torch.ones(3)}, {})
    with pytest.raises(
        UsageError, match=r"step-00000008 could not be written: .*; the last complete one is step-\d+4\."
    ):
        writer.wait()
    assert writer.last == 4
    assert "step-00000008" not in names(tmp_path)
    assert open_checkpoint(writer.folder, 4).step == 4
