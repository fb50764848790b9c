"""Scripts of training libraries under the hooks of `trainstep run`, unmodified; and the callbacks for two of them."""

import runpy

import pytest

import trainstep
from tests.observe.measuring import measure
from trainstep.rows import ScriptRow, WaitRow
from trainstep.rows.records import of_kind

pytestmark = pytest.mark.realworld
SCRIPTS = __file__.rpartition("/")[0] + "/scripts/"


def script(name, folder, *arguments):
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("sys.argv", [name, *map(str, arguments)])
        return measure(name, folder, call=lambda: runpy.run_path(SCRIPTS + name, run_name="__main__"))


def the_step(rows):
    (row,) = of_kind(rows, ScriptRow)
    return row


def test_the_trainer_of_transformers(tmp_path):
    pytest.importorskip("transformers")
    _, rows = script("trainer.py", tmp_path, tmp_path / "outputs")
    row = the_step(rows)
    assert (row.steps_seen, row.forwards, row.backwards, row.evaluated) == (14, 2, 2, 1)
    assert {"data", "forward", "loss", "backward", "optimizer", "other"} <= set(row.times)
    lines = {wait.line.partition(":")[0] for wait in of_kind(rows, WaitRow)}
    assert "transformers/trainer.py" in lines, "its log reads the loss every step"
    assert all(wait.from_line.startswith("trainer.py:") for wait in of_kind(rows, WaitRow) if "trainer.py" in wait.line)


def test_lightning(tmp_path):
    pytest.importorskip("lightning")
    row = the_step(script("lightning_fit.py", tmp_path, tmp_path / "outputs")[1])
    assert (row.steps_seen, row.forwards, row.backwards) == (16, None, 1), "its two parts are torch's own nn.Sequential"
    assert row.times["optimizer"].median < row.times["step"].median / 2, "the closure is no update"


@pytest.mark.parametrize(("name", "package"), [
    ("lstm", "torch"),
    ("resnet", "transformers"),
    ("timm_vit", "timm"),  # in no extra: it needs torchvision, which beside a torch for CPUs breaks every Trainer
    ("timm_resnet", "timm"),
])  # fmt: skip
def test_a_plain_loop(tmp_path, name, package):
    pytest.importorskip(package)
    row = the_step(script("loop.py", tmp_path, name, 12)[1])
    assert (row.steps_seen, row.forwards, row.backwards) == (12, 1, 1)
    assert {"data", "forward", "backward", "optimizer"} <= set(row.times)


def test_accelerate(tmp_path):
    pytest.importorskip("accelerate")
    row = the_step(script("accelerated.py", tmp_path)[1])
    assert (row.steps_seen, row.forwards, row.backwards, row.skipped) == (12, None, 2, 0), (
        "its model is an nn.Sequential"
    )


def test_the_callback_for_transformers(tmp_path):
    pytest.importorskip("transformers")
    callback = trainstep.trainer_callback(tmp_path / "watch", profiled_steps=0, memory=False)
    runpy.run_path(SCRIPTS + "trainer.py")["training"](str(tmp_path / "outputs"), [callback]).train()
    assert the_step(callback.watch.rows).steps_seen == 14
    assert (tmp_path / "watch" / "report.html").exists()


def test_the_callback_for_lightning(tmp_path):
    pytest.importorskip("lightning")
    callback = trainstep.lightning_callback(tmp_path / "watch", profiled_steps=0, memory=False)
    runpy.run_path(SCRIPTS + "lightning_fit.py")["fit"](str(tmp_path / "outputs"), [callback])
    assert the_step(callback.watch.rows).steps_seen == 16
