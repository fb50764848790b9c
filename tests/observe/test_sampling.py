"""Lines under way: by samples of the thread that trains, and of loaders' forked workers."""

import os
import threading
import time
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from tests.observe.measuring import Net, measure
from trainstep.observe.sampling import EVERY_S, SampledLines
from trainstep.observe.session import Plan
from trainstep.observe.steps import Step
from trainstep.report.subjects import findings
from trainstep.report.subjects.run import slow_lines
from trainstep.report.verdict import judge
from trainstep.rows import LineRow
from trainstep.rows.records import of_kind
from trainstep.rows.run import LATE

PLAN = Plan(is_sampled=True)


class Drawn(Dataset):
    def __init__(self, slow_ms=0.0):
        self.slow_ms = slow_ms

    def __len__(self):
        return 24

    def __getitem__(self, index):
        if self.slow_ms:
            time.sleep(self.slow_ms / 1e3)
        return torch.randn(8)


def collate(samples):
    over = time.perf_counter() + 0.03
    while time.perf_counter() < over:
        words = sum(len(str(number)) for number in range(2000))  # WORDS
    return torch.stack(samples) + 0.0 * words


def trains(between=lambda model: None, before=lambda model: None, make=lambda: Net(nn.Linear(8, 8)), **loader):
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in DataLoader(loader.pop("data", Drawn()), batch_size=2, **loader):
        loss = model(batch).square().mean()
        before(model)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        between(model)


def at(text):
    """The line of this file with a text, as rows have it."""
    lines = Path(__file__).read_text().splitlines()
    return f"test_sampling.py:{next(number for number, line in enumerate(lines, 1) if text in line)}"


def confusion(model, seconds=0.03):
    counts, over = {}, time.perf_counter() + seconds
    while time.perf_counter() < over:
        counts = {str(number % 7): counts.get(str(number), 0) for number in range(2000)}  # COUNTS


def norms(model):
    over = time.perf_counter() + 0.03
    while time.perf_counter() < over:
        [float(parameter.detach().norm()) for _ in range(100) for parameter in model.parameters()]  # NORMS


@pytest.mark.parametrize(
    ("phase", "line", "options"),
    [
        ("other", "# COUNTS", {"between": confusion}),
        ("other", "# NORMS", {"between": norms}),
        ("data", "time.sleep(self.slow_ms /", {"data": Drawn(10.0)}),
        ("data", "# WORDS", {"collate_fn": collate}),
        ("workers", "time.sleep(self.slow_ms /", {"data": Drawn(20.0), "num_workers": 1}),
        ("workers", "# WORDS", {"collate_fn": collate, "num_workers": 1}),
    ],
)
def test_the_slow_line_of_a_phase_is_named(phase, line, options, tmp_path):
    rows = measure("sampled", tmp_path, PLAN, call=lambda: trains(**options))[1]
    own = [row for row in of_kind(rows, LineRow) if row.phase == phase]
    assert (own[0].line.removeprefix(LATE), own[0].share > 0.4) == (at(line), True), own
    (found,) = [each for each in slow_lines(rows) if each.id == ("script.lines" if phase == "other" else "data.lines")]
    assert at(line) in found.sentence


@pytest.mark.parametrize(("seconds", "width", "word"), [(0.1, 8, "PYTHON-BOUND"), (0.0, 2048, "COMPUTE-BOUND")])
def test_plain_python_before_backward_is_told_from_a_model_of_a_class_of_torch_s(seconds, width, word, tmp_path):
    def train():
        trains(before=lambda _: confusion(model, seconds), make=lambda: model)

    model = nn.Sequential(nn.Linear(8, width), nn.Linear(width, width))
    rows = measure("sampled", tmp_path, PLAN, call=train)[1]
    said = {each.word: each.says for each in judge(rows, findings(rows))[0]}
    assert said.keys() & {"PYTHON-BOUND", "COMPUTE-BOUND"} == {word}
    assert (at("# COUNTS") in said[word]) is (word == "PYTHON-BOUND")


def test_a_sampler_leaves_nothing_of_its_own():
    """Not while a process forks, and no thread that Python's list of threads has."""

    def threads():
        return len(os.listdir("/proc/self/task")), threading.active_count()

    before, lines = threads(), SampledLines()
    for _ in range(3):
        lines.sampler.begin()
        lines.sampler.begin()
        assert threads()[1] == before[1]
        lines.sampler.end()
        lines.sampler.end()
        assert threads() == before


def code(name, file):
    return compile(f"def {name}(): pass", file, "exec").co_consts[0]


TORCHS = (code("forward", nn.Linear.__init__.__code__.co_filename), 1)


@pytest.mark.parametrize(
    ("due", "at_s", "expected"),
    [
        (1.5, 1.5, ("other", "here")),
        (1.5, 2.5, (f"{LATE}other", "call")),  # it could run once the next phase gave the interpreter up
        (1.5, 3.5, (f"{LATE}other", "")),  # and two later nothing is known of the line
        (0.5, 1.2, (f"{LATE}other", "here")),
    ],
)
def test_a_sample_that_comes_late_belongs_to_the_phase_in_which_it_was_due(due, at_s, expected):
    stack = (
        (code("inner", "/x/net.py"), 5),
        TORCHS,
        (code("call", "/x/train.py"), 7),
        (code("main", "/x/train.py"), 9),
    )
    lines, step = SampledLines(), Step(phases=["other", "forward", "backward"], marks=[(s, None) for s in (1, 2, 3, 4)])
    stack = stack if at_s == due + 1 else ((code("here", "/x/train.py"), 8), *stack)
    lines._last = due - EVERY_S
    for _at in (at_s, 4.5):
        lines._taken.append((False, None, None, _at, stack, None))
    assert [(phase, place.function) for phase, place in lines.of_step(step)] == [expected]
    assert len(lines._taken) == 1, "it is of the next step"


@pytest.mark.parametrize(
    ("waited_s", "inner", "forwards", "is_python"),
    [
        (0.0055, (), 0, True),
        (0.0045, (), 0, False),  # an operator of torch's gave the interpreter up
        (0.0055, (TORCHS,), 0, False),
        (0.0055, (), 1, False),  # forward ends with the model's call
    ],
)
def test_plain_python_waits_to_be_asked_for_the_interpreter(waited_s, inner, forwards, is_python):
    step = Step(phases=["forward", "backward"], marks=[(s, None) for s in (1, 2, 3)], forwards=forwards)
    lines = SampledLines()
    lines._last = 1.5 - EVERY_S
    lines._taken.append((False, None, None, 1.5 + waited_s, (*inner, (code("main", "/x/train.py"), 9)), None))
    assert [phase.removeprefix(LATE) for phase, _ in lines.of_step(step)] == ["forward", *["python"] * is_python]
