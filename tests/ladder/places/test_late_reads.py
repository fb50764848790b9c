"""Numbers that are read late are the same numbers, wherever and however they are used."""

import builtins
import copy
import io
import json
import math
import numbers
import os
import pickle
import sqlite3
import statistics
import weakref
from collections import OrderedDict
from typing import ClassVar

import numpy
import pytest
import torch

from trainstep.ladder.places import late_reads
from trainstep.ladder.places.late_reads import AT_ONCE, LATE, Later, LateReads


class Reading:
    """A number of a device that is done when a test says so, or when it is waited for."""

    made: ClassVar[list] = []

    def __init__(self, tensor):
        self.value, self.done, self.waited = float(tensor.detach()), False, 0
        self.made.append(self)

    def is_done(self):
        return self.done

    def number(self):
        self.waited += not self.done
        self.done = True
        return self.value


def installed(monkeypatch, is_meant=lambda tensor: True, reading=Reading, note=lambda line, how: None):
    """Late reads until the end of the test, and the readings that it makes."""
    monkeypatch.setattr(torch.Tensor, "item", torch.Tensor.item)
    monkeypatch.setattr(builtins, "print", builtins.print)
    monkeypatch.setattr("atexit.register", lambda call: None)
    monkeypatch.setattr(torch.Tensor, "__setitem__", torch.Tensor.__setitem__)
    made = [(torch, name) for name in ("tensor", "as_tensor", "full", "full_like", "where", "save")]
    for owner, name in (*made, (json.JSONEncoder, "default")):
        monkeypatch.setattr(owner, name, getattr(owner, name))
    monkeypatch.setattr(Reading, "made", [])
    late = LateReads(note, is_meant, reading)
    late.install()
    return late, Reading.made


@pytest.fixture
def reads(monkeypatch):
    """Every tensor of this file is as if on a GPU; what is noted, and the readings."""
    monkeypatch.setattr("os.register_at_fork", lambda **calls: None)
    notes = {}
    late, made = installed(monkeypatch, note=notes.__setitem__)
    return notes, made, late


def at(place, values, value):
    """The values with another one in a place, as a list."""
    values[place] = value
    return values.tolist()


class Unlike(dict):
    """Some type of a script's own."""


def saved(checkpoint):
    """As it is loaded."""
    file = io.BytesIO()
    torch.save(checkpoint, file)
    return torch.load(io.BytesIO(file.getvalue()), weights_only=True)


def loss(value=1.5):
    return torch.tensor(value)


def test_a_number_is_read_when_it_is_needed(reads):
    notes, made, _ = reads
    value = loss().item()
    assert isinstance(value, Later)
    assert not made[0].waited
    assert value > 1
    assert (made[0].waited, float(value)) == (1, 1.5)
    ((line, how),) = notes.items()
    assert line.startswith("test_late_reads.py:")
    assert how.startswith(AT_ONCE + "test_late_reads.py:")


def test_sums_and_means_wait_for_nothing(reads):
    notes, made, _ = reads
    total, values = 0.0, []
    for step in range(5000):
        value = loss(float(step)).item()
        total += value
        values.append(value)
        if len(made) >= 3:
            made[-3].done = True  # the device is a little behind
    mean = round(total / 5000, 2)
    assert isinstance(mean, Later)
    assert not any(each.waited for each in made)
    assert set(notes.values()) == {LATE}
    assert (float(mean), sum(each.waited for each in made)) == (2499.5, 2)
    ((_, how),) = notes.items()
    assert how.startswith(AT_ONCE), "in the end"


def test_a_device_that_is_far_behind_is_waited_for(reads):
    """Better than to run out of stack."""
    total = 0.0
    for _ in range(500):
        total += loss(1.0).item()
    assert total == 500
    assert sum(each.waited for each in reads[1]) == 500


@pytest.mark.parametrize(
    "use",
    [
        *(float, int, bool, hash, repr, str, math.exp, math.isnan, abs, round),
        *(lambda x: x + 1, lambda x: 1 - x, lambda x: 3 / x, lambda x: x**2, lambda x: -x, lambda x: x % 1),
        *(lambda x: x == 1.5, lambda x: x < 2, lambda x: x <= 2, lambda x: x != 1.5, lambda x: min(x, 2)),
        *("{:.3f}".format, "%.2f".__mod__, lambda x: f"{x}", lambda x: round(x, 1), lambda x: sum([x, x]) / 2),
        lambda x: pickle.loads(pickle.dumps(x)),
        lambda x: (x * torch.ones(2)).tolist(),
        lambda x: (torch.ones(2) * x).tolist(),
        lambda x: at(1, torch.zeros(2), x),  # as nanoGPT has it
        lambda x: at(1, numpy.zeros(2), x),
        lambda x: torch.full((2,), x).tolist() + torch.full_like(torch.ones(2), fill_value=x).tolist(),
        lambda x: torch.where(torch.tensor([True, False]), x, 0.0).tolist(),
        lambda x: (torch.tensor(x) + torch.tensor([[x, 2.0], [x, 3.0]])).tolist(),
        lambda x: torch.as_tensor({"a": [x]}["a"], dtype=torch.float64).tolist(),
        lambda x: torch.nn.utils.clip_grad_norm_([torch.nn.Parameter(torch.ones(2))], x).tolist(),
        lambda x: numpy.mean([x, 2.0, x]).item(),
        lambda x: numpy.array([x, 2.0]).dtype.kind,
        lambda x: json.dumps({"loss": [x]}),
        lambda x: copy.deepcopy([x])[0] + 1,
        lambda x: isinstance(x, numbers.Real) and not isinstance(x, (int, torch.Tensor)) and numpy.isscalar(x),
        lambda x: json.dumps({"loss": [x]}, indent=1),
        lambda x: (numpy.ones(2, numpy.float32) * x).dtype.name,
        lambda x: (numpy.float32(0.1) + x).dtype.name,
        lambda x: numpy.add(numpy.ones(2), x, out=numpy.zeros(2)).tolist(),
        lambda x: math.trunc(x) + math.floor(x) + math.ceil(x),
        lambda x: x.is_integer(),
        lambda x: hasattr(x, "detach"),
        lambda x: (*divmod(x, 1), *divmod(7, x), *divmod(x, x)),
        lambda x: sqlite3.connect(":memory:").execute("select ?", (x,)).fetchone()[0],
        lambda x: saved({"loss": x, "history": OrderedDict(losses=[(1, x)])}),
    ],
)
@pytest.mark.parametrize("is_done", [False, True])
def test_whatever_is_done_with_it_gives_what_it_gave(use, is_done, reads):
    value = loss().item()
    reads[1][0].done = is_done
    found, expected = use(value), use(1.5)
    found = found.now() if isinstance(found, Later) else found
    assert (found, type(found)) == (expected, type(expected))


def test_what_asks_for_its_type_refuses_it(reads):
    with pytest.raises(TypeError, match="Later"):
        statistics.mean([loss().item(), 2.0])
    with pytest.raises(TypeError, match="Later"):
        torch.ones(2).fill_(loss().item())


def test_what_was_refused_before_is_refused(reads):
    with pytest.raises(TypeError, match="set is not JSON serializable"):
        json.dumps({1})
    with pytest.raises(RuntimeError, match="dtype of set"):
        torch.tensor({1})
    with pytest.raises(AttributeError, match="no attribute 'detach'"):
        loss().item().detach()


def test_a_checkpoint_of_anything_else_is_saved_as_it_is(reads):
    shared, kept = [1.0], {"own": Unlike()}
    kept["a"] = kept["b"] = shared
    file = io.BytesIO()
    torch.save(kept, file)
    found = torch.load(io.BytesIO(file.getvalue()), weights_only=False)
    assert found["a"] is found["b"]
    assert isinstance(found["own"], Unlike)


def test_tensors_are_made_in_compiled_code_and_on_other_devices_as_before(reads):
    @torch.compile(fullgraph=True, backend="eager")
    def compiled(values):
        return values + torch.tensor([1.0, 2.0]) + torch.as_tensor(values)

    assert compiled(torch.ones(2)).tolist() == [3.0, 4.0]
    with torch.device("meta"):
        assert torch.tensor([1.0]).is_meta
    assert pickle.loads(pickle.dumps(torch.tensor))([1.0]).tolist() == [1.0], "as a loader's workers get it"
    assert torch.jit.script(scripted)(2.0).tolist() == [2.0]


def scripted(value: float):
    return torch.tensor([value])


def test_compiled_code_takes_it_as_before(reads):
    value = loss().item()
    assert isinstance(value, Later)
    compiled = torch.compile(lambda values, number: values * number + number, backend="eager")
    assert compiled(torch.ones(2), value).tolist() == [3.0, 3.0]


def test_what_waits_to_be_printed_is_as_it_was(reads, capsys):
    _, made, late = reads
    values, tensor = [1], torch.zeros(2)
    print("loss", loss().item())
    print(values, tensor)
    values.append(2)
    tensor += 1
    made[0].done = True
    late.print_all()
    assert capsys.readouterr().out == "loss 1.5\n[1] tensor([0., 0.])\n"


def test_other_reads_are_as_they_were(reads):
    assert torch.tensor(3).item() == 3
    assert torch.tensor([2.0, 3.0]).tolist() == [2.0, 3.0]
    assert type(torch.tensor(True).item()) is bool
    with pytest.raises(RuntimeError):
        torch.ones(2).item()
    assert reads[1] == []


def test_prints_keep_their_order_and_wait_for_nothing(reads, capsys):
    _, made, late = reads
    print("first")
    print("loss", loss().item())
    print("then")
    assert capsys.readouterr().out == "first\n"
    made[0].done = True
    print("last", loss(2.5).item(), sep=": ")
    assert capsys.readouterr().out == "loss 1.5\nthen\n"
    late.print_all()
    assert capsys.readouterr().out == "last: 2.5\n"
    assert [each.waited for each in made] == [0, 1]


def test_a_process_that_is_forked_knows_all_numbers_and_has_nothing_to_print(monkeypatch, capsys):
    at_fork = []
    monkeypatch.setattr("os.register_at_fork", lambda **calls: at_fork.append(calls["before"]))
    late, made = installed(monkeypatch)
    kept, forgotten = loss(2.5).item(), loss(3.5).item()
    print("loss", loss().item())
    nobodys = weakref.ref(made.pop(1))
    del forgotten
    assert nobodys() is None, "what nobody wants is not waited for"
    (before,) = at_fork
    before()
    assert capsys.readouterr().out == "loss 1.5\n"
    assert [each.done for each in made] == [True, True]
    late.print_all()
    assert (kept, capsys.readouterr().out) == (2.5, "")


@pytest.mark.gpu
def test_a_forked_process_can_read_what_was_read_late(monkeypatch):
    at_fork = []
    monkeypatch.setattr("os.register_at_fork", lambda **calls: at_fork.append(calls["before"]))
    installed(monkeypatch, lambda tensor: tensor.is_cuda, late_reads.Reading)
    torch.cuda._sleep(10**8)
    later = (torch.ones((), device="cuda") * 3).item()
    at_fork[0]()
    child = os.fork()
    if not child:
        os._exit(0 if later.is_there() and later + 1 == 4 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.gpu
def test_a_gpu_is_not_waited_for(monkeypatch):
    """It is given a second of work before the number that is read, and is still at it afterwards."""
    monkeypatch.setattr("os.register_at_fork", lambda **calls: None)
    installed(monkeypatch, lambda tensor: tensor.is_cuda, late_reads.Reading)
    value = torch.ones((), device="cuda", requires_grad=True)
    torch.cuda._sleep(10**9)
    later = (value * 3).item()
    assert isinstance(later, Later)
    assert not later.is_there()
    assert later + 1 == 4
    assert later.is_there()
