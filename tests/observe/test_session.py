"""Scripts of several shapes under the hooks: what their steps are, and that torch is left as it was."""

import statistics
import time
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.dataloader import _BaseDataLoaderIter

from tests.observe.measuring import DEEP, SCRIPTS, Net, line_of, measure, run_command
from trainstep.observe.beyond import COLLECTIVES
from trainstep.observe.border import READS
from trainstep.observe.hooks import TIMED, Hooks
from trainstep.observe.loaders import Loaders
from trainstep.observe.log import LogWriter, log_path, read_log
from trainstep.observe.session import JOINED, Plan, Session
from trainstep.rows import RecompilationRow, ScriptRow, WaitRow
from trainstep.rows.records import of_kind


def the_step(rows):
    (row,) = of_kind(rows, ScriptRow)
    return row


def test_a_plain_loop_has_all_its_phases(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["plain.py", "20", "32"])
    log, rows = measure("plain.py", tmp_path, DEEP)
    row = the_step(rows)
    assert (row.status, row.steps_seen, row.left_out, row.n) == ("ok", 20, 3, 17)
    assert set(row.times) == {"data", "forward", "loss", "backward", "optimizer", "other", "step", "own"}
    for step in log.steps[1:]:
        assert all(ms >= 0 for ms in step.host)
    samples = {phase: sum(values) for phase, values in row.samples.items()}
    parts = sum(ms for phase, ms in samples.items() if phase not in ("step", "own"))
    assert parts == pytest.approx(samples["step"], rel=1e-3)
    assert (row.forwards, row.backwards, row.optimizers, row.waits) == (1, 1, ("AdamW",), 0)


def test_samples_of_a_step_are_those_that_its_batches_were_drawn_of(tmp_path):
    """Also where the last one is short, however they are collated, and without those of an evaluation."""
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.ones(20, 4)

    def train(**options):
        for batch in DataLoader(data, collate_fn=lambda rows: torch.stack(rows).sum(0, keepdim=True), **options):
            model(batch).sum().backward()
            optimizer.step()

    log, rows = measure("own", tmp_path / "a", call=lambda: train(batch_size=8))
    assert [step.samples for step in log.steps] == [8, 8, 4]
    assert the_step(rows).samples_per_step == 6, "of the two that are timed"
    batches = [[0], [1], [2, 3, 4], [5, 6, 7], [8]]
    log, rows = measure("own", tmp_path / "b", call=lambda: train(batch_sampler=batches))
    assert [step.samples for step in log.steps] == [1, 1, 3, 3, 1]
    assert the_step(rows).samples_per_step == 2, "the median of the last four"

    def evaluate_too():
        for _ in range(3):
            model.eval()
            with torch.no_grad():
                for batch in DataLoader(data, batch_size=20):
                    model(batch)
            model.train()
            train(batch_size=20)

    assert the_step(measure("own", tmp_path / "c", call=evaluate_too)[1]).samples_per_step is None
    assert the_step(measure("accumulation.py", tmp_path / "d")[1]).samples_per_step is None, "it has no loader"


def test_batches_that_workers_fetch_ahead_are_counted_when_they_come():
    class Iterator:
        pass

    loaders, iterator = Loaders(lambda: None), Iterator()
    for index in ([0, 1, 2], (3, 4), 5, "a name"):
        loaders.drew(iterator, index)
    assert [loaders.took(iterator) for _ in range(5)] == [3, 2, 1, 1, 0]


def test_accumulation_and_two_optimizers_of_one_step(tmp_path):
    row = the_step(measure("accumulation.py", tmp_path, DEEP)[1])
    assert (row.steps_seen, row.forwards, row.backwards, row.optimizers) == (12, 4, 4, ("SGD", "AdamW"))


def two_layers(kind=Net):
    return kind(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1))


@pytest.mark.parametrize("is_own", [True, False])
def test_the_border_tells_forward_from_loss_where_a_model_has_a_class_of_its_own(tmp_path, is_own):
    model = two_layers(Net if is_own else nn.Sequential)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train():
        for x in DataLoader(torch.randn(48, 16), batch_size=4):
            loss = model(x).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    log, rows = measure("own", tmp_path, call=train)
    row = the_step(rows)
    expected = {"data", "other", "forward", "backward", "optimizer", "step", "own"} | ({"loss"} if is_own else set())
    assert (set(row.times), row.forwards, row.backwards) == (expected, 1 if is_own else None, 1)
    assert (JOINED in log.notes) is not is_own
    assert log.facts["peak_bytes"] > 2**20


def test_a_mode_of_the_script_s_sees_its_own_calls_alone(tmp_path):
    model, seen = two_layers(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    class Mode(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            seen.append(getattr(func, "__name__", str(func)))
            return func(*args, **kwargs or {})

    def train():
        seen.clear()
        with Mode():
            for _ in range(3):
                loss = model(torch.ones(4, 16)).square().mean()
                loss.backward()
                optimizer.step()
                loss.item()
        return list(seen)

    plain, under = train(), []
    measure("own", tmp_path, call=lambda: under.extend(train()))
    assert under == plain


def test_gradients_that_a_script_asks_for_are_a_step_s_backward_pass_only_where_it_has_no_other(tmp_path):
    model = two_layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train(is_penalty):
        for _ in range(6):
            loss = model(torch.randn(4, 16)).square().mean()
            gradients = torch.autograd.grad(loss, list(model.parameters()), create_graph=is_penalty)
            if is_penalty:
                (loss + sum(each.square().sum() for each in gradients)).backward()
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter.grad = gradient.detach()
            optimizer.step()
            optimizer.zero_grad()

    for is_penalty in (False, True):
        row = the_step(measure("own", tmp_path / str(is_penalty), call=partial(train, is_penalty))[1])
        assert (row.steps_seen, row.backwards) == (6, 1)
        assert row.times["backward"].median > 0


def test_a_gan_has_two_kinds_of_steps(tmp_path):
    rows = of_kind(measure("gan.py", tmp_path, DEEP)[1], ScriptRow)
    assert {row.updates: (row.steps_seen, row.forwards, row.backwards) for row in rows} == {
        "Adam": (12, 3, 2),
        "Adam 2": (12, 1, 1),
    }


def test_steps_with_an_evaluation_are_not_timed_among_the_others(tmp_path):
    log, rows = measure("evaluation.py", tmp_path, DEEP)
    row = the_step(rows)
    assert [step.evaluations for step in log.steps if step.evaluations] == [5, 5, 5]
    assert (row.steps_seen, row.left_out, row.evaluated, row.n) == (16, 3, 3, 10)
    assert sorted([*row.series["number"], *row.series["apart"]]) == [*range(1, 17)], "each step is drawn"
    assert row.series["apart_why"] == ["left out"] * 3 + ["evaluated"] * 3
    assert "evaluation" not in row.times


def test_skipped_updates_are_steps_that_are_not_timed(tmp_path):
    log, rows = measure("scaler.py", tmp_path, DEEP)
    assert [step.number for step in log.steps if step.is_skipped] == [3, 7]
    assert (the_step(rows).steps_seen, the_step(rows).skipped) == (12, 1)  # the third is among those left out


def test_reads_of_a_line_are_counted_alone_after_the_first(tmp_path, monkeypatch):
    timed, wait = [], Hooks._wait
    monkeypatch.setattr(Hooks, "_wait", lambda *arguments: timed.append(arguments[2]) or wait(*arguments))
    weight = nn.Parameter(torch.ones(50))
    optimizer = torch.optim.SGD([weight], lr=0.1)

    def train():
        for _ in range(12):
            weight.square().sum().backward()
            optimizer.step()
            sum(each.item() for each in weight.detach())
            _ = [float(each) for each in weight.detach()]

    log, rows = measure("reads", tmp_path, call=train)
    calls = {row.call: row.calls_per_step for row in of_kind(rows, WaitRow)}
    assert (calls, len(timed) < 3 * TIMED) == ({"item": 50, "float": 50}, True)
    assert all(step.hooks_ms > 0 for step in log.steps)


def test_reads_are_told_with_their_line(tmp_path, capsys):
    rows = measure("reads.py", tmp_path)[1]
    found = {row.call: row for row in of_kind(rows, WaitRow)}
    assert set(found) == {"item", "print"}, "neither Adam's own reads nor places in a list are any on a GPU"
    assert found["item"].line == line_of("reads.py", "READ")
    assert found["print"].line == line_of("reads.py", "PRINT")
    assert found["item"].calls == 11  # the last one is after the last step
    assert found["print"].calls == 4
    assert capsys.readouterr().out.count("tensor(") == 4


def test_a_starving_loader_and_a_model_that_is_called_inside_another_module(tmp_path):
    row = the_step(measure("starving.py", tmp_path)[1])
    assert row.times["data"].median > 0.5 * row.step_ms
    assert row.times["forward"].median > 0


def test_closures_of_optimizers(tmp_path):
    rows = {row.updates: row for row in of_kind(measure("closure.py", tmp_path)[1], ScriptRow)}
    assert (rows["SGD"].steps_seen, rows["SGD"].backwards) == (6, 1)
    assert rows["LBFGS"].steps_seen == 6
    assert rows["LBFGS"].backwards >= 1
    assert rows["SGD"].times["forward"].median > 0


def test_recompilations_with_their_reason(tmp_path):
    """In a process of its own, as dynamo counts all that a process compiles."""
    ended, rows = run_command(tmp_path, SCRIPTS / "compiled.py")
    log = read_log(log_path(tmp_path, 0))
    assert ended.returncode == 0, ended.stderr
    (again,) = of_kind(rows, RecompilationRow)
    assert (again.line, again.compilations, again.last_step) == (line_of("compiled.py", "AGAIN"), 5, 5)
    assert "size" in again.why
    assert the_step(rows).times["forward"].median > 0
    assert len(log.recompilations) == 6, "the layers are compiled once: the hooks change nothing of that"


def test_models_that_are_copied_and_pickled_know_nothing_of_it(tmp_path):
    assert the_step(measure("saving.py", tmp_path)[1]).steps_seen == 3


@pytest.mark.parametrize("plan", [Plan(), DEEP], ids=["default", "deep"])
def test_torch_is_left_as_it_was(tmp_path, plan):
    def changed():
        spread = {name: vars(torch.distributed.ProcessGroup).get(name) for name in COLLECTIVES}
        tensor = {name: vars(torch.Tensor).get(name) for name in (*READS, "backward", "to", "cuda", "copy_")}
        optimizer = {name: vars(torch.optim.Optimizer).get(name) for name in ("step", "zero_grad")}
        others = [
            torch.autograd._engine_run_backward,
            DataLoader.__iter__,
            vars(_BaseDataLoaderIter)["_next_index"],
            torch.amp.GradScaler.step,
        ]
        return tensor, spread, optimizer, others, vars(nn.Linear).get("__call__"), vars(nn.Sequential).get("__call__")

    before = changed()
    measure("accumulation.py", tmp_path, plan)
    assert changed() == before


def test_it_stops_after_the_steps_that_were_asked_for(tmp_path):
    with pytest.raises(SystemExit):
        measure("accumulation.py", tmp_path, Plan(steps=5))
    log = read_log(log_path(tmp_path, 0))
    assert len(log.steps) == 5
    assert log.ended["how"] == "steps"


def taking_steps(steps, width=512, batch=128):
    """A model that is trained by steps of some milliseconds; each call takes one and returns its borders, by hand."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1))
    optimizer = torch.optim.AdamW(model.parameters())
    data = TensorDataset(torch.randn(batch * steps, width), torch.randn(batch * steps, 1))
    batches = iter(DataLoader(data, batch_size=batch))

    def take(now):
        at = [now()]
        x, y = next(batches)
        at.append(now())
        outputs = model(x)
        at.append(now())
        loss = nn.functional.mse_loss(outputs, y)
        at.append(now())
        loss.backward()
        at.append(now())
        optimizer.step()
        optimizer.zero_grad()
        at.append(now())
        return at

    return take


def test_phases_are_those_that_the_same_script_notes_by_hand(tmp_path):
    """Both at once, step by step. On a busy machine some other process runs between our mark and the hooks' own, which
    happens to some steps; what is counted in a wrong phase is so in all of them.
    """
    marks = []

    def train():
        take = taking_steps(30, width=1024)  # by hand the hooks of a step's end count as optimizer, two tenths of a ms
        marks.extend(take(time.perf_counter) for _ in range(30))

    row = the_step(measure("loop", tmp_path, DEEP, call=train)[1])
    assert row.left_out == 3
    spans = {("data",): (0, 1), ("forward",): (1, 2), ("loss", "backward"): (2, 4), ("optimizer",): (4, 5)}
    for phases, (start, end) in spans.items():  # backward begins where the engine does, some Python later than by hand
        by_hand = [(each[end] - each[start]) * 1e3 for each in marks[3:]]
        ours = [sum(each) for each in zip(*(row.samples[phase] for phase in phases), strict=True)]
        noise_ms = 0.3 if "data" in phases else 0.05  # the step before is written while the loader is asked
        alike = [own == pytest.approx(ms, rel=0.1, abs=noise_ms) for own, ms in zip(ours, by_hand, strict=True)]
        assert sum(alike) >= 9, (phases, ours, by_hand)


def test_measuring_costs_little(tmp_path):
    """Under two hundredths of a step of a few tens of milliseconds, and the report says how much."""
    take = taking_steps(12, width=1024, batch=256)
    borders = [take(time.perf_counter) for _ in range(12)]
    realistic_ms = statistics.median((each[-1] - each[0]) * 1e3 for each in borders)
    runs = [the_step(measure("accumulation.py", tmp_path / str(number))[1]).hooks_ms for number in range(3)]
    costs = [ms for ms in runs if ms is not None]  # a busy machine may hide it in a run, hardly in three
    assert 0 < min(costs) < 0.02 * realistic_ms, (runs, realistic_ms)


class Device:
    """A device that takes its time: it does what it is given half as fast as the host gives it, and is asked in vain
    whether it is done until it was synchronised."""

    def __init__(self):
        self.made, self.is_synchronised = 0, False

    def synchronize(self):
        self.is_synchronised = True

    def record(self):
        self.made += 1
        return SimpleNamespace(at=2.0 * self.made, query=lambda: self.is_synchronised)

    def elapsed_ms(self, start, end):
        return end.at - start.at


def test_phases_of_a_device_are_read_once_it_has_passed_them(tmp_path):
    """Every border between phases is 2 ms of this device's after the one before, whatever the host's clock says."""
    log = LogWriter(log_path(tmp_path, 0))
    session = Session(Plan(), log)
    device = session._clock = Device()
    session.finder.mark = lambda: (time.perf_counter(), device.record())
    for _ in range(8):
        for phase in ("forward", "backward"):
            session.finder.enter(phase)
            session.finder.leave()
        session.finder.optimizer_begins(1)
        session.finder.optimizer_ended(1, "SGD")
    assert read_log(log_path(tmp_path, 0)).steps == [], "nothing waits for the device"
    session.finish()
    steps = read_log(log_path(tmp_path, 0)).steps
    assert len(steps) == 8
    # The first step begins with forward, every other one where the update before it ended.
    assert steps[0].ms == {"forward": 2.0, "loss": 2.0, "backward": 2.0, "other": 2.0, "optimizer": 2.0}
    assert steps[5].ms == {"other": 4.0, "forward": 2.0, "loss": 2.0, "backward": 2.0, "optimizer": 2.0}
    assert steps[5].ahead_ms > steps[2].ahead_ms > 5, "the host runs ahead"
