"""Hooks that only a GPU would call, called with stand-ins for its tensors."""

import warnings
from types import SimpleNamespace

import pytest
import torch

from trainstep.observe.beyond import Beyond
from trainstep.observe.border import Entry
from trainstep.observe.hooks import Hooks
from trainstep.observe.instruments import synchronisations
from trainstep.observe.lines import Lines
from trainstep.observe.steps import COPIES, DATA, FORWARD, StepFinder


@pytest.fixture
def hooks():
    """In the middle of a step on a GPU."""
    steps, places = [], {}
    finder = StepFinder(lambda: 0.0, steps.append)
    hooks = Hooks(finder, Lines(lambda number, place, call: places.update({number: (place, call)})))
    hooks.on_gpu = True
    finder.enter(FORWARD)
    finder.leave()
    hooks.places, hooks.steps = places, steps
    return hooks


def tensor(*, is_cuda):
    return SimpleNamespace(is_cuda=is_cuda, where=[])


def ended(hooks):
    hooks.border.drain()
    hooks.finder.optimizer_begins(1)
    hooks.finder.optimizer_ended(1, "SGD")
    hooks.finder.settle()
    return hooks.steps[-1]


def test_copies_to_the_device_are_a_phase(hooks):
    seen = []

    def to(each, device):
        seen.append(hooks.finder.current)
        return tensor(is_cuda=True)

    moving = Beyond(hooks).moving
    moving("to", to)(tensor(is_cuda=False), "cuda")
    assert seen == [COPIES]
    moving("copy_", to)(tensor(is_cuda=True), tensor(is_cuda=False))
    moving("copy_", to)(tensor(is_cuda=True), tensor(is_cuda=True))
    assert seen == [COPIES, COPIES, "loss"], "a copy on the device is computing"
    assert ended(hooks).waits == {}


def test_copies_to_the_host_are_waits_with_their_line(hooks):
    to = Beyond(hooks).moving("to", lambda each, device, **options: tensor(is_cuda=False))
    to(tensor(is_cuda=True), "cpu")
    to(tensor(is_cuda=True), "cpu", non_blocking=True)
    ((number, (calls, _)),) = ended(hooks).waits.items()
    place, call = hooks.places[number]
    assert (place.file, place.function, call, calls) == (
        __file__,
        "test_copies_to_the_host_are_waits_with_their_line",
        "to",
        1,
    )


class OnDevice:
    """A tensor of a device that has the methods that are observed."""

    def __init__(self, *, is_cuda):
        self.is_cuda = is_cuda

    def item(self):
        return 1.0

    def __repr__(self):
        return f"tensor({self.item()})"


@pytest.fixture
def observed(hooks):
    for name in ("item", "__repr__"):
        hooks.border.method(OnDevice, name, hooks._reads(name))
    yield hooks
    hooks.remove()
    assert not isinstance(vars(OnDevice)["item"], Entry)


def test_reads_of_tensors_on_the_host_are_no_waits(observed):
    assert OnDevice(is_cuda=False).item() == 1.0
    OnDevice(is_cuda=True).item()
    assert [calls for calls, _ in ended(observed).waits.values()] == [1]


def test_without_a_gpu_what_a_dataset_reads_would_be_no_wait_on_one(observed):
    observed.on_gpu = False
    observed.finder.enter(DATA)
    OnDevice(is_cuda=False).item()
    observed.finder.leave()
    assert not observed.places
    OnDevice(is_cuda=False).item()
    assert [calls for calls, _ in ended(observed).waits.values()] == [1]


def test_a_read_within_a_read_is_one(observed):
    assert repr(OnDevice(is_cuda=True)) == "tensor(1.0)"
    ((number, (calls, _)),) = ended(observed).waits.items()
    assert (observed.places[number][1], calls) == ("print", 1)


def test_a_read_that_was_only_looked_up_hides_no_later_one(observed):
    read = OnDevice(is_cuda=True).item
    observed.begins(FORWARD)
    observed.finder.leave()
    OnDevice(is_cuda=True).item()
    assert read() == 1.0
    assert [calls for calls, _ in ended(observed).waits.values()] == [1]


def test_other_synchronisations_are_found_by_cuda_s_own_warnings(hooks, monkeypatch, recwarn):
    modes = [0]
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: modes[-1])
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    lines, known = [], [False]
    with synchronisations(hooks.lines, lines.append, lambda: known[0]):
        for _ in range(2):  # Python shows a warning of a line once, and this is to be told each time
            warnings.warn("called a synchronizing CUDA operation (Triggered internally at ...)", stacklevel=1)
        known[0] = True
        warnings.warn("called a synchronizing CUDA operation", stacklevel=1)
    assert modes == [0, "warn", 0]
    assert len(lines) == 2
    assert hooks.places[lines[0]][0].file == __file__
    assert not [each for each in recwarn if "synchronizing" in str(each.message)], "nothing of it is shown"
    assert not [each for each in warnings.filters if each[1] is not None and "synchronizing" in each[1].pattern]
