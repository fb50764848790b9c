"""How long a run of a script for its ladder may take, and that nothing of one that is ended goes on."""

import math
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.bench.sweep.test_sweep import is_alive
from tests.observe.measuring import SCRIPTS, alone
from trainstep.ladder import ranks, single
from trainstep.ladder.ranks import Interrupted
from trainstep.ladder.scripts import ScriptRunner
from trainstep.ladder.single import Script
from trainstep.ladder.trial.shown import MOST_CALLS
from trainstep.observe import supervise
from trainstep.observe.copying import Copies


def test_a_change_that_makes_the_script_wait_for_ever_is_ended_with_its_children(tmp_path, monkeypatch):
    file, told = tmp_path / "waiting.py", tmp_path / "told"
    file.write_text(
        "import os, pathlib, signal, sys, time\n"
        f"told = pathlib.Path({str(told)!r})\n"
        "child = os.fork()\n"
        "if not child: time.sleep(600)\n"
        "told.write_text(f'{child}\\n')\n"
        "signal.signal(signal.SIGTERM, lambda *_: told.open('a').write('asked\\n'))\n"
        "print('I wait')\nsys.stdout.flush()\n"
        "for _ in range(600): time.sleep(1)\n"
    )
    monkeypatch.setattr(single, "LEAST_S", 3.0)
    monkeypatch.setattr(supervise, "GRACE_S", 2.0)
    script = Script(alone([str(file)]), tmp_path / "runs", 4)
    script.own_s = 0.5
    taken = script.run("it waits")
    assert taken.failure.startswith("it was ended after 5 s; as it is, the script takes 0 s (its last words: I wait")
    assert taken.captured is None
    child, *asked = told.read_text().split()
    assert asked == ["asked"], "once, and then killed"
    deadline = time.monotonic() + 5.0
    while is_alive(int(child)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not is_alive(int(child))


@pytest.mark.skipif("PYTEST_XDIST_WORKER" in os.environ, reason="a worker of xdist has threads that take the signal")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_script_that_handles_a_signal_is_stopped_as_a_ladder(number, tmp_path):
    """It ends with 0, as Lightning's trainer does: what it did until then is no baseline."""
    file = tmp_path / "handles.py"
    handler = f"signal.signal({int(number)}, lambda *_: sys.exit(0))"
    file.write_text(f"import os, signal, sys, time\n{handler}\nprint('begun', flush=True)\ntime.sleep(60)\n")
    script = Script(alone([str(file)]), tmp_path / "runs", 4)

    wait = f"until grep -qs begun {tmp_path}/runs/*/output.txt; do sleep 0.05; done"
    with subprocess.Popen(["sh", "-c", f"{wait}; kill -{int(number)} {os.getpid()}"]), pytest.raises(Interrupted):
        script.run("it")


@pytest.mark.parametrize(
    ("written", "told"),
    [
        ("ValueError: https://me:secret@host", "its last words: ValueError;"),
        ("pkg.errors.Lost: secret", "pkg.errors.Lost;"),
        ("I wait", "I wait;"),
        ("torch.OutOfMemoryError: CUDA out of memory. secret", "torch.OutOfMemoryError: out of memory;"),
        ("RuntimeError: secret DefaultCPUAllocator: you tried to allocate 9 bytes.", "RuntimeError: out of memory;"),
    ],
)
def test_last_words_give_no_text_of_an_exception(written, told, tmp_path):
    (tmp_path / "output.txt").write_text(f"a line\n{written}\n")
    words = single._last_words(tmp_path / "output.txt")
    assert told in words
    assert "secret" not in words


def test_later_runs_may_take_ten_times_the_first_and_those_under_roundings_any_time(tmp_path, monkeypatch):
    limits = []

    def took_a_second(*_, limit_s, **__):
        limits.append(limit_s)
        now.append(now[-1] + 100.0)
        return 0

    now = [0.0]
    monkeypatch.setattr(ranks, "run_script", took_a_second)
    monkeypatch.setattr(single.time, "monotonic", lambda: now[-1])
    script = Script(alone([str(SCRIPTS / "climbing.py")]), tmp_path, 4)
    for rounding in (None, None, ("fp32", 0), None):
        script.run("it", rounding=rounding)
    assert limits == [math.inf, 1000.0, math.inf, 1000.0]
    script.own_s = 3.0
    script.run("it")
    assert limits[-1] == 120.0, "two minutes at least"


def test_roundings_are_drawn_in_evaluation_while_outputs_are_kept_and_in_every_training_call(tmp_path):
    file = tmp_path / "generates.py"
    file.write_text(
        "import torch\n"
        "model, x = torch.nn.Linear(64, 64), torch.ones(8, 64)\n"
        "optimizer = torch.optim.SGD(model.parameters(), 0.1)\n"
        "for number in range(3):\n"
        "    loss = model(x).square().mean()\n"
        "    print(number, loss.item().hex())\n"
        f"    for call in range({MOST_CALLS + 3} if not number else 0):\n"
        "        with torch.no_grad(): print('eval', call, model.eval()(x).double().sum().item().hex())\n"
        "    model.train()\n"
        "    loss.backward()\n"
        "    optimizer.step() if number else None\n"
    )
    script = Script(alone([str(file)]), tmp_path / "runs", 3)
    runs = [script.run("it"), script.run("rounded", rounding=("fp32", 0))]
    plain, rounded = (Path(run.folder, "output.txt").read_text().splitlines() for run in runs)
    differ = [line for line, own in zip(plain, rounded, strict=True) if line != own]
    assert [line for line in differ if line.startswith("eval")][-1].startswith(f"eval {MOST_CALLS - 1} ")
    assert sum(line.startswith("eval") for line in differ) > 0.8 * MOST_CALLS
    assert differ[-1].startswith(("1 ", "2 ")), "what is trained later is rounded too"


@pytest.mark.parametrize("is_copied", [False, True])
@pytest.mark.parametrize("words", [["train.py", "5"], ["-m", "train", "5"]])
def test_patched_sources_run_in_the_place_of_the_files(words, is_copied, tmp_path, monkeypatch):
    """Of the script as of a module that it imports; the files stay as they are."""
    monkeypatch.chdir(tmp_path)
    texts = {"train.py": "import helper\nprint('old')\n", "helper.py": "word = 'old'\n"}
    for name, text in texts.items():
        Path(name).write_text(text)
    told = "import sys, threading\nprint('größer', helper.word, __name__, sys.argv[1:], __file__)\nsys.exit(3)\n"
    sources = {"train.py": f"# coding: latin-1\r\nimport helper\r\n{told}", "helper.py": "word = 'new'\n"}
    copies = Copies(tmp_path / "runs", tmp_path / "runs/large") if is_copied else None
    script = Script(alone(words), tmp_path / "runs", 4, copies)
    taken = script.run("it", sources={str(tmp_path / name): text for name, text in sources.items()}, is_judged=False)
    place = taken.folder / "copy" if is_copied else tmp_path
    assert (taken.folder / "output.txt").read_text() == f"größer new __main__ ['5'] {place / 'train.py'}\n"
    assert taken.code == 3
    assert {name: Path(name).read_text() for name in texts} == texts


LOADED_AHEAD = """
import torch
from torch.utils.data import DataLoader, Dataset

class Slow(Dataset):
    def __len__(self): return 64
    def __getitem__(self, place):
        import time
        time.sleep({seconds})
        return torch.ones(2) * place

model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
for place, batch in enumerate(DataLoader(Slow(), batch_size=1, num_workers=2, prefetch_factor={ahead})):
    if place == 2:
        import time
        time.sleep(2 * {seconds} * {ahead})  # as where copies are made: meanwhile all that may be is fetched
    optimizer.zero_grad()
    model(batch).sum().backward()
    optimizer.step()
"""


@pytest.mark.parametrize(("ahead", "is_enough"), [(2, True), (16, False)])
def test_a_short_run_does_not_live_on_what_workers_fetched_ahead(tmp_path, ahead, is_enough):
    """Two workers load a batch in 100 ms each; four that were ready would make 17 steps as fast as 13, of 38 ms."""
    file = tmp_path / "ahead.py"
    file.write_text(LOADED_AHEAD.format(seconds=0.1, ahead=ahead))
    taken = Script(alone([str(file)]), tmp_path / "runs", 20).run("it", is_judged=False)
    assert len(taken.step_ms) == 17
    if is_enough:
        assert taken.failure == ""
        assert taken.from_stock == pytest.approx(4 / 17, abs=1.1 / 17)
        assert sum(taken.step_ms) / taken.ms_per_step == pytest.approx(13, abs=1.1), "steps that it is the mean of"
        assert taken.ms_per_step > 45, "less a tenth of what two workers take"
    else:
        assert taken.failure.startswith("loaders' workers had ")
        assert taken.failure.endswith("take more updates than 20 (--steps)")


EPOCHS = """
import sys
import torch
from torch.utils.data import DataLoader

model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
loader = DataLoader(torch.ones(6, 1))
for epoch in range(int(sys.argv[1])):
    for batch in loader:
        optimizer.zero_grad()
        model(batch).sum().backward()
        optimizer.step()
"""


@pytest.mark.parametrize(("updates", "epochs", "is_first"), [(5, 2, True), (8, 2, False), (8, 1, False)])
def test_a_run_that_is_stopped_before_a_second_epoch_saw_none(tmp_path, updates, epochs, is_first):
    """One that ran to its end has no second epoch."""
    file = tmp_path / "epochs.py"
    file.write_text(EPOCHS)
    script = Script(alone([str(file), str(epochs)]), tmp_path / "runs", updates)
    taken = script.run("it")
    assert taken.is_in_first_epoch is is_first
    values = ScriptRunner(script)._tried([], taken, None, ()).values
    assert (values["updates"], values["in_first_epoch"]) == (min(updates, 6 * epochs), is_first)
