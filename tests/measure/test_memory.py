import contextlib

import pytest
import torch
from torch import nn

from trainstep.measure.memory import LiveStorages, parameter_bytes, step_memory

MIB = 2**20


def test_live_bytes_rise_and_fall_with_tensors():
    with LiveStorages() as live:
        a = torch.zeros(MIB // 4)
        assert live.bytes == MIB
        b = a.view(2, -1)  # a view owns nothing
        assert live.bytes == MIB
        c = a + 1
        assert live.bytes == 2 * MIB
        del a, c
        assert live.bytes == MIB  # b keeps a's storage
        del b
        assert live.bytes == 0
        assert live.peak == 2 * MIB


def test_in_place_operations_add_nothing():
    with LiveStorages() as live:
        a = torch.zeros(MIB // 4)
        a.add_(1).mul_(2)
        assert (live.bytes, live.peak) == (MIB, MIB)


def test_each_storage_has_the_states_it_lived_in():
    """States are counted by the storages made and released; a found storage was there in the first."""
    resident, hidden = torch.zeros(4), torch.zeros(8)
    lives = []
    with LiveStorages([resident], lambda life, storage: lives.append((life, storage.nbytes()))) as live:
        made = resident + 1  # 1
        hidden.mul_(2)
        torch.empty(0)  # no bytes, no storage
        del made  # 2
        kept = resident.clone()  # 3
        del hidden  # 4
    assert live.events == 4
    assert live.bytes == resident.nbytes + kept.nbytes
    assert live.found_bytes == 0, "it is gone"
    assert [(life.start, life.end, life.is_found) for life, _ in lives] == [
        (0, None, False), (1, 2, False), (0, 4, True), (3, None, False),
    ]  # fmt: skip
    assert [life.bytes for life, _ in lives] == [size for _, size in lives] == [16, 16, 32, 16]
    del kept
    assert live.events == 4, "what happens afterwards is not counted"


def test_phases_of_a_cpu_step_have_the_peaks_that_arithmetic_gives():
    """y = x·w with x saved: forward adds y; backward adds the gradients while x, y and w live."""
    x = torch.randn(256, 1024)
    w = nn.Parameter(torch.randn(1024, 2048))

    def step(phase):
        with phase("forward"):
            y = x @ w
        with phase("backward"):
            y.backward(torch.ones_like(y))

    peaks = step_memory(step, torch.device("cpu"), [x, w])
    resident = 1 * MIB + 8 * MIB
    y_bytes, gradient_bytes = 2 * MIB, 8 * MIB
    assert peaks.before == resident
    assert peaks.by_phase["forward"] == resident + y_bytes
    assert peaks.by_phase["backward"] == resident + 2 * y_bytes + gradient_bytes
    assert peaks.peak == peaks.by_phase["backward"]
    assert peaks.after == {"forward": resident + y_bytes, "backward": resident + y_bytes + gradient_bytes}


def test_what_nobody_named_and_outlives_the_step_was_at_rest():
    """An optimizer around other optimizers shows no state of its own; a temporary made elsewhere is not at rest."""
    hidden = torch.zeros(MIB)

    def step(phase):
        with phase("forward"):
            made = torch.ones(2 * MIB)
        with phase("optimizer"):
            hidden.mul_(0.9).add_(made[:MIB])

    peaks = step_memory(step, torch.device("cpu"), [])
    assert peaks.before == 4 * MIB
    assert peaks.by_phase == {"forward": 12 * MIB, "optimizer": 12 * MIB}
    assert peaks.peak == 12 * MIB


def test_a_sparse_gradient_is_its_indices_and_values():
    weight = nn.Parameter(torch.zeros(1000, 64))
    ids = torch.arange(16)

    def step(phase):
        with phase("backward"):
            nn.functional.embedding(ids, weight, sparse=True).backward(torch.ones(16, 64))

    peaks = step_memory(step, torch.device("cpu"), [weight, ids])
    assert weight.grad.layout == torch.sparse_coo
    assert peaks.after["backward"] - peaks.before == 16 * 64 * 4 + 16 * 8


def test_parameters_tied_are_counted_once():
    module = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
    module[1].weight = module[0].weight
    assert parameter_bytes(module) == 8 * 8 * 4


@pytest.mark.gpu
def test_gpu_peaks_are_those_of_live_tensors():
    kept = []

    def step(phase):
        with phase("grow"):
            kept.append(torch.empty(64 * MIB, dtype=torch.uint8, device="cuda"))
        with phase("spike"), contextlib.suppress(NameError):
            spike = torch.empty(128 * MIB, dtype=torch.uint8, device="cuda")
            del spike

    peaks = step_memory(step, torch.device("cuda"), [])
    assert peaks.by_phase["grow"] - peaks.before == 64 * MIB
    assert peaks.by_phase["spike"] - peaks.before == 192 * MIB
    assert peaks.peak == peaks.by_phase["spike"]
