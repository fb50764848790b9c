"""Gloo carries packed copies: each rank gets the right values from many calls at once, and an error in time."""

import gzip
import json
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Backend, BackendConfig

from trainstep.base.errors import UsageError
from trainstep.measure.profile.chrome import read_chrome_trace
from trainstep.measure.profile.ranges import profiler_of_steps
from trainstep.parallel import gloo
from trainstep.parallel.collectives import all_to_all, broadcast
from trainstep.parallel.gloo import host_waits
from trainstep.parallel.slices import flat, slice_of

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
SIZES = [(1, 8), (5, 4), (0, 4), (3, 64), (2, 300_000)]
"""Of tensors: one is empty, and of the last, more is added up than fits a stretch."""
_sum = partial(gloo.reduce_scatter, is_mean=False)


class StandIn:
    """A group as far as the choice asks it, by the argument of `init_process_group`."""

    def __init__(self, backend):
        self._backends = BackendConfig(Backend(backend)).get_device_backend_map()
        self._device_types = [torch.device(each) for each in self._backends]
        self.asked = []

    def _get_backend(self, device):
        self.asked.append(device.type)
        return self

    def name(self):
        return self._backends[self.asked[-1]]


@pytest.mark.parametrize(
    ("backend", "device", "waits"),
    [
        ("gloo", CPU, True),
        ("gloo", GPU, True),
        ("nccl", GPU, False),
        ("cpu:gloo,cuda:nccl", CPU, True),
        ("cpu:gloo,cuda:nccl", GPU, False),
        ("cpu:gloo,cuda:gloo", GPU, True),
    ],
)
def test_the_host_waits_over_gloo_and_each_group_is_asked_once(backend, device, waits):
    group = StandIn(backend)
    assert [host_waits(group, torch.device(device.type, 0)) for _ in range(2)] == [waits] * 2
    assert group.asked == [device.type, *(["cpu"] if waits else [])]


def _refused(process):
    found = []
    for backend, device in (("cpu:gloo", GPU), ("cuda:gloo", GPU), ("fake", CPU)):
        group = dist.new_group(backend=backend)
        with pytest.raises(UsageError) as caught:
            host_waits(group, device)
        found.append(str(caught.value))
    return found


@pytest.mark.distributed
def test_an_unknown_backend_is_an_error_that_names_the_known_ones(two):
    for no_backend, no_copies, unknown in two.run(_refused):
        assert "no backend for cuda tensors (it has cpu:gloo)" in no_backend
        assert "no backend for cpu tensors (it has cuda:gloo)" in no_copies
        assert "has fake for cpu tensors" in unknown
        for message in (no_backend, no_copies, unknown):
            assert "gloo for cpu tensors, nccl for cuda tensors, gloo for cuda tensors" in message


def _tensors(rank, dtype):
    generator = torch.Generator().manual_seed(rank)
    made = [torch.randint(-60, 60, size, generator=generator).to(dtype) for size in SIZES]
    return [each.t().contiguous().t() if number % 2 else each for number, each in enumerate(made)]


def _at_once(process, dtype):
    """Gathers, sums and all-to-alls of many lists, all started before any is waited for, and waited for backwards."""
    rank, size, group = process.rank, process.world_size, process.group
    gathered, summed = _tensors(rank, dtype), _tensors(rank, dtype)
    send = (torch.arange(size * 3).view(size, 3) + 10 * rank).to(dtype)
    receive = torch.zeros_like(send)
    calls = []
    for one, other in zip(gathered, summed, strict=True):
        calls.append(gloo.all_gather([one], [slice_of(one, rank, size)], group))
        calls.append(_sum([other], [slice_of(other, rank, size)], group))
    calls.append(gloo.all_to_all(receive, send, group))
    together, also = _tensors(rank, dtype), _tensors(rank, dtype)
    for call, tensors in ((gloo.all_gather, together), (_sum, also)):
        calls.append(call(tensors, [slice_of(each, rank, size) for each in tensors], group))
    reduced = _tensors(rank, dtype)
    calls.append(gloo.all_reduce([flat(each) for each in reduced], group, is_mean=False))
    for call in reversed(calls):
        call.wait()
    sums = [[slice_of(each, rank, size).clone() for each in tensors] for tensors in (summed, also, reduced)]
    return gathered, together, *sums, receive


@pytest.mark.distributed
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
@pytest.mark.parametrize("workers", ["two", "four"])
def test_everything_arrives_in_its_place(request, workers, dtype):
    workers = request.getfixturevalue(workers)
    n = workers.world_size
    inputs = [_tensors(rank, dtype) for rank in range(n)]
    for rank, (gathered, together, *sums, received) in enumerate(workers.run(_at_once, dtype)):
        for number in range(len(SIZES)):
            whole = torch.cat([slice_of(inputs[each][number], each, n) for each in range(n)])
            assert torch.equal(flat(gathered[number]), whole)
            assert torch.equal(flat(together[number]), whole)
            total = torch.stack([slice_of(inputs[each][number], rank, n) for each in range(n)]).sum(0, dtype=dtype)
            assert all(torch.equal(each[number], total) for each in sums)
        assert received.tolist() == [[10 * other + 3 * rank + each for each in range(3)] for other in range(n)]


def _scattered(process, by_rank, is_mean):
    """This rank's numbers of a reduce-scatter of equal ones, which are `by_rank`."""
    values = torch.full((process.world_size * 300_000,), by_rank[process.rank], dtype=torch.float16)
    mine = slice_of(values, process.rank, process.world_size)
    gloo.reduce_scatter([values], [mine], process.group, is_mean=is_mean).wait()
    return mine.double().unique().tolist()


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("by_rank", "is_mean", "expected"),
    [
        ((1.0, 2**-12, 2**-12, 2**-12), False, 1 + 2**-10),  # rounded after each addend it would be 1
        ((65_504.0, 54_496.0) * 2, True, 60_000.0),  # their sum is too large for that type
        ((2.0**-23, 0.0) * 2, True, 2.0**-24),  # a quarter of each is too small
    ],
    ids=["rounded once", "largest", "smallest"],
)
def test_sums_and_means_of_16_bit_numbers_are_rounded_once_and_stay_in_range(four, by_rank, is_mean, expected):
    assert four.run(_scattered, by_rank, is_mean) == [[expected]] * 4


def _sent(process, device):
    """Results of `broadcast` and `all_to_all` on this rank, before and after the wait."""
    rank, ranks = process.rank, process.world_size
    number = torch.tensor([rank + 1j, -rank], device=device)
    is_last = torch.tensor([[rank == ranks - 1]] * 3, device=device)
    copied = torch.full((2, 3), float(rank), device=device).t()
    for tensor in (number, is_last):
        broadcast(tensor, ranks - 1, process.group).wait()
    gloo.broadcast(copied, ranks - 1, process.group).wait()  # by copies, as of a GPU
    assert copied.unique().tolist() == [ranks - 1]
    send = torch.arange(ranks * 3, dtype=torch.bfloat16, device=device).view(ranks, 3) + 10 * rank
    receive = torch.zeros_like(send)
    call = all_to_all(receive, send, process.group)
    before = receive.tolist()
    call.wait()
    again = receive.tolist()
    receive.zero_()
    call.wait()
    assert not receive.any(), "waited for once, nothing is copied a second time"
    return number.tolist(), is_last.tolist(), before, again


def check_sent(by_rank):
    ranks = len(by_rank)
    for rank, (number, is_last, before, received) in enumerate(by_rank):
        assert number == [ranks - 1 + 1j, 1 - ranks]
        assert is_last == [[True]] * 3
        assert received == [[10 * other + 3 * rank + each for each in range(3)] for other in range(ranks)]
        assert before == [[0] * 3] * ranks, "nothing comes back before it is waited for"


@pytest.mark.distributed
def test_broadcast_and_all_to_all(four):
    check_sent(four.run(_sent, CPU))


def _profiled(process, folder):
    rank, tensors = process.rank, [torch.zeros(2, 1_000_000) for _ in range(4)]
    path = Path(folder) / f"{rank}.json.gz"
    with profiler_of_steps(2, path, on_gpu=False, shapes=False) as profiler:
        for _ in range(4):
            gloo.all_gather(tensors, [each[rank] for each in tensors], process.group).wait()
            profiler.step()
    with gzip.open(path) as file:
        events = json.load(file)["traceEvents"]
    work = [each.name for each in read_chrome_trace(path).work if each.kind == "collective"]
    return work, sum(each.get("name") == "trainstep_exchanges::all_gather" for each in events)


@pytest.mark.distributed
def test_a_profile_has_a_list_as_one_collective(two, tmp_path):
    assert two.run(_profiled, str(tmp_path)) == [(["gloo:all_gather"] * 2, 2)] * 2, "of the steps that are recorded"
