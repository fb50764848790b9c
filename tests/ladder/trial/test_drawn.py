"""Batches that are drawn at random draw by their indices."""

import random

import numpy
import pytest
import torch
from torch.utils.data import DataLoader, Dataset
from torch.utils.data._utils.fetch import _MapDatasetFetcher

from trainstep.ladder.trial.drawn import draw_by_indices

OWN = numpy.random.default_rng(1)
"""As a script has it at its top."""


class Nested:
    def __init__(self):
        self.parts = [{"torch": torch.Generator()}, random.Random(2), numpy.random.RandomState(3)]
        own = numpy.random.default_rng(4)
        self.call = lambda: float(own.random())


DRAWS = {
    "nothing": lambda nested: 0.5,
    "torch": lambda nested: float(torch.rand(())),
    "Python": lambda nested: random.random(),
    "NumPy": lambda nested: float(numpy.random.rand()),
    "the module's": lambda nested: float(OWN.random()),
    "its own of torch": lambda nested: float(torch.rand((), generator=nested.parts[0]["torch"])),
    "its own of Python": lambda nested: nested.parts[1].random(),
    "a function's": lambda nested: nested.call(),
    "its own of NumPy": lambda nested: float(nested.parts[2].rand()),
}


class Data(Dataset):
    def __init__(self, draw):
        self.draw, self.nested = draw, Nested()

    def __len__(self):
        return 12

    def __getitem__(self, place):
        return place + self.draw(self.nested)


def states():
    own, shared = str(OWN.bit_generator.state), numpy.random.get_state()[1].tolist()
    return random.getstate(), torch.get_rng_state().tolist(), shared, own


@pytest.mark.parametrize("what", DRAWS)
def test_a_batch_is_the_same_wherever_it_is_loaded_and_takes_no_number_from_those_after(what, monkeypatch):
    told, before = [], states()
    monkeypatch.setattr(_MapDatasetFetcher, "fetch", _MapDatasetFetcher.fetch)
    draw_by_indices(0, lambda: told.append(what))
    data = Data(DRAWS[what])

    def loaded(**options):
        torch.manual_seed(0)
        return [batch.tolist() for batch in DataLoader(data, batch_size=2, **options)]

    own = loaded()
    assert bool(told) is (what != "nothing")
    assert len(set(torch.tensor(own).frac().flatten().tolist())) == (1 if what == "nothing" else 12)
    fetched = [batch.tolist() for batch in DataLoader(data, batch_sampler=[[8, 9], [0, 1]])]
    assert fetched == [own[4], own[0]], "in another order"
    assert loaded(num_workers=2) == own
    after = states()
    assert (after[0], after[2:]) == (before[0], before[2:])
