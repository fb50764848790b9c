"""The rungs that need a GPU, on a script that trains there."""

import pytest
import torch

from tests.ladder.forked import forked_runs  # noqa: F401
from tests.ladder.given import ladder_of
from tests.observe.measuring import SCRIPTS, alone
from trainstep.ladder.change import all_changes
from trainstep.ladder.single import Script

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU, and torch finds none"),
    pytest.mark.usefixtures("forked_runs"),
]


def on_gpu(folder, sizes, batch=2):
    """A script of these sizes."""
    text, file = (SCRIPTS / "climbing.py").read_text(), folder / "train.py"
    for old, new in (
        ("WIDTH, HEADS, BLOCKS, LENGTH = 16, 2, 4, 12", f"WIDTH, HEADS, BLOCKS, LENGTH = {sizes}"),
        ("model = Model()", "model = Model().cuda()"),
        ("batch_size=2", f"batch_size={batch}"),
        ("    logits =", "    tokens = tokens.to('cuda')\n    logits ="),
    ):
        assert old in text
        text = text.replace(old, new)
    file.write_text(text)
    return Script(alone([str(file)]), folder / "runs", 10)


def test_what_needs_a_gpu_is_right_on_one(tmp_path):
    rungs = [
        rung for rung in all_changes("script") if rung.name in ("TF32 matmuls", "our FlashAttention", "pinned memory")
    ]
    ladder = ladder_of(on_gpu(tmp_path, "128, 2, 4, 128"), rungs, rounds=1)
    rows = {row.change: row for row in ladder.climb()}
    assert ladder.runner.settings["on_gpu"]
    assert {name: row.reason for name, row in rows.items() if row.status != "ok"} == {}


KEEPS = {
    "the output before": """
    before, last = globals().get('last'), logits
    if before is not None: before.sum().item()
""",
    "each third one, late": """
    seen = [*globals().get('seen', []), logits]
    if len(seen) % 3 == 0: seen[-3].sum().item()
""",
}
"""What a script reads after the next call of its model, whose graph writes to the same memory."""


@pytest.mark.parametrize("what", ["nothing", *KEEPS, "three lengths"])
def test_cuda_graphs_are_right_or_rejected_with_torchs_sentence(what, tmp_path):
    graphs = [each for each in all_changes("script") if each.name == "compiled model with CUDA graphs"]
    script = on_gpu(tmp_path, "128, 2, 4, 128")
    text = (tmp_path / "train.py").read_text() + KEEPS.get(what, "")
    if what == "three lengths":
        text = text.replace("for (tokens,) in DataLoader(", "for number, (tokens,) in enumerate(DataLoader(")
        text = text.replace("shuffle=True):", "shuffle=True)):\n    tokens = tokens[:, number % 3 :]")
    (tmp_path / "train.py").write_text(text)
    row = {row.change: row for row in ladder_of(script, graphs, rounds=1).climb()}[graphs[0].name]
    assert row.status == ("failed" if what in KEEPS else "ok"), row.reason
    assert "To prevent overwriting, clone the tensor" in (row.reason or "") or what not in KEEPS
