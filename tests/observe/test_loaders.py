"""What is said of the loaders that a script took batches from, and of how long it waited for them."""

import time
from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from trainstep.observe.lines import Place
from trainstep.observe.loaders import Loaders, begins_again, main_loader
from trainstep.observe.steps import Step, phase_shares


def test_the_loader_that_most_batches_came_from_is_the_one_that_is_named():
    found = [
        {"line": "train.py:3", "workers": 0, "is_pinned": False, "batches": 2},
        {"line": "train.py:9", "workers": 2, "is_pinned": True, "batches": 30},
    ]
    assert main_loader(found) == "train.py:9, 2 workers, memory pinned"
    assert main_loader(found[:1]) == "train.py:3, no workers, memory not pinned"
    assert main_loader([]) is None


@pytest.mark.parametrize(
    ("method", "words"),
    [("spawn", " started by spawn"), ("forkserver", " started by forkserver"), ("fork", ""), (None, "")],
)
def test_workers_that_are_not_forked_are_told_apart(method, words):
    loaders, loader = Loaders(lambda: None), DataLoader(TensorDataset(torch.arange(6)), num_workers=1)

    class Iterator:
        _workers = (SimpleNamespace(_popen=SimpleNamespace(method=method)),)

    loaders.begins(loader, Iterator(), Place("train.py", 3, "main"))
    assert main_loader(loaders.found()) == f"train.py:3, 1 worker{words}, memory not pinned"


def test_shares_of_a_run_are_the_devices_where_there_is_one():
    steps = [
        Step(phases=["data", "other"], host=[99.0, 0.0]),
        Step(phases=["data", "other"], host=[5.0, 5.0], device=[1.0, 9.0], starved_ms=4.0),
        Step(phases=["data", "other"], host=[5.0, 5.0]),
    ]
    assert phase_shares(steps) == {"data": 0.3, "other": 0.7, "launches": 0.2}
    assert phase_shares(steps[:1]) == {}


@pytest.mark.parametrize(("workers", "most"), [(0, 0), (1, 2), (2, 4)])
def test_batches_that_lie_ready_are_those_that_workers_loaded_and_nobody_took(workers, most):
    loaders, loader = Loaders(lambda: None), DataLoader(TensorDataset(torch.arange(6)), num_workers=workers)
    assert loaders.stock() == (0, 0)
    iterator = iter(loader)
    loaders.begins(loader, iterator, Place("train.py", 3, "main"))
    found = []
    for _ in range(6):
        deadline, left = time.monotonic() + 30.0, min(most, 6 - len(found))
        assert loaders.stock()[1] == left, "what is not there yet is asked for"
        while loaders.stock()[0] < left and time.monotonic() < deadline:
            time.sleep(0.01)
        assert loaders.stock() == (left, left)
        found.append(int(next(iterator)[0]))
    assert found == list(range(6))
    assert next(iterator, None) is None
    assert loaders.stock() == (0, 0), "its workers have ended"


def test_an_epoch_is_a_beginning_of_the_loader_that_most_batches_came_from():
    loaders = Loaders(lambda: None)
    assert not begins_again(loaders.found())
    most, other = (DataLoader(TensorDataset(torch.arange(size))) for size in (8, 1))

    def epoch(loader, line):
        iterator = iter(loader)
        loaders.begins(loader, iterator, Place("train.py", line, "main"))
        for _ in iterator:
            loaders.took(iterator)

    epoch(most, 3)
    epoch(other, 9)
    epoch(other, 9)
    assert not begins_again(loaders.found()), "those of an evaluation do not count"
    epoch(most, 3)
    assert begins_again(loaders.found())
