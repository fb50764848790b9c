"""The rungs that need a GPU, on a script that trains there."""

import pytest
import torch

from tests.run.measuring import SCRIPTS, alone
from trainstep.run.ladder import Ladder
from trainstep.run.rungs import RUNGS
from trainstep.run.single import Script

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU, and torch finds none"),
]


def test_what_needs_a_gpu_is_right_on_one(tmp_path):
    file = tmp_path / "train.py"
    text = (SCRIPTS / "climbing.py").read_text()
    text = text.replace("WIDTH, HEADS, BLOCKS, LENGTH = 16, 2, 4, 12", "WIDTH, HEADS, BLOCKS, LENGTH = 128, 2, 4, 128")
    text = text.replace("model = Model()", "model = Model().cuda()")
    file.write_text(text.replace("    logits =", "    tokens = tokens.to('cuda')\n    logits ="))
    rungs = [rung for rung in RUNGS if rung.name in ("TF32 matmuls", "our FlashAttention", "pinned memory")]
    ladder = Ladder(Script(alone([str(file)]), tmp_path / "runs", 10), rungs, rounds=1)
    rows = {row.rung: row for row in ladder.climb()}
    assert ladder.settings["on_gpu"]
    assert {name: row.reason for name, row in rows.items() if row.status != "ok"} == {}
