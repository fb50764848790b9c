"""Exchanges by messages: what arrives where, whatever else is under way; who announces first; errors; and ends."""

import gc
import gzip
import json
import subprocess
import sys
import threading
import time
import weakref
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from trainstep.measure.profile.chrome import read_chrome_trace
from trainstep.measure.profile.ranges import profiler_of_steps
from trainstep.parallel import hosts, messages, over_gloo
from trainstep.parallel.announced import Record, noted
from trainstep.parallel.messages import THREADS, exchange
from trainstep.parallel.rollcall import is_of_a_collective
from trainstep.parallel.slices import flat, slice_of
from trainstep.parallel.started import members, started

pytestmark = pytest.mark.distributed

SIZES = [(1, 8), (5, 4), (3, 64), (2, 70_000)]
"""Of tensors, of which the last alone is large."""
LARGE = [(300_000, 4), (400_000, 4), (2, 300_000)]
"""Each a message of its own, to each of up to four ranks, whatever its dtype."""
_sum = partial(over_gloo.reduce_scatter, is_mean=False)


def _tensors(rank, dtype, sizes):
    generator = torch.Generator().manual_seed(rank)
    made = [torch.randint(-60, 60, size, generator=generator).to(dtype) for size in sizes]
    return [each.t().contiguous().t() if number % 2 else each for number, each in enumerate(made)]


def _at_once(process, dtype, sizes):
    """Gathers, sums and all-to-alls of many lists, all started before any is waited for, and waited for backwards."""
    rank, size = process.rank, process.world_size
    gathered, summed = _tensors(rank, dtype, sizes), _tensors(rank, dtype, sizes)
    send = torch.arange(size * 3).view(size, 3) + 100 * rank
    receive = torch.zeros_like(send)
    calls = []
    for one, other in zip(gathered, summed, strict=True):
        calls.append(over_gloo.all_gather([one], [slice_of(one, rank, size)], process.group, staged=False))
        calls.append(_sum([other], [slice_of(other, rank, size)], process.group, staged=False))
    calls.append(over_gloo.all_to_all(receive, send, process.group, staged=False))
    together, also = _tensors(rank, dtype, sizes), _tensors(rank, dtype, sizes)
    for call, tensors in ((over_gloo.all_gather, together), (_sum, also)):
        slices = [slice_of(each, rank, size) for each in tensors]
        calls.append(call(tensors, slices, process.group, staged=False))
    for call in reversed(calls):
        call.wait()
    sums = [[slice_of(each, rank, size).clone() for each in tensors] for tensors in (summed, also)]
    return gathered, together, *sums, receive


@pytest.mark.parametrize("sizes", [SIZES, LARGE], ids=["small and large", "large"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
@pytest.mark.parametrize("workers", ["two", "four"])
def test_everything_arrives_in_its_place(request, workers, dtype, sizes):
    workers = request.getfixturevalue(workers)
    n = workers.world_size
    inputs = [_tensors(rank, dtype, sizes) for rank in range(n)]
    for rank, (gathered, together, summed, also, received) in enumerate(workers.run(_at_once, dtype, sizes)):
        for number in range(len(sizes)):
            whole = torch.cat([slice_of(inputs[each][number], each, n) for each in range(n)])
            assert torch.equal(flat(gathered[number]), whole)
            assert torch.equal(flat(together[number]), whole)
            total = torch.stack([slice_of(inputs[each][number], rank, n) for each in range(n)]).sum(0, dtype=dtype)
            assert torch.equal(summed[number], total)
            assert torch.equal(also[number], total)
        assert received.tolist() == [[100 * other + 3 * rank + each for each in range(3)] for other in range(n)]


def _rounded(process):
    values = torch.full((process.world_size * 40_000,), 1.0 if process.rank == 0 else 2**-9).bfloat16()
    mine = slice_of(values, process.rank, process.world_size)
    _sum([values], [mine], process.group, staged=False).wait()
    return mine.float().unique().tolist()


def test_a_sum_of_16_bit_numbers_is_rounded_once(four):
    once = torch.tensor(1 + 3 * 2**-9).bfloat16().item()
    assert once > 1, "rounded after each addend it would be 1"
    assert four.run(_rounded) == [[once]] * 4


@pytest.mark.parametrize("elements", [1, 300_000], ids=["packed", "in place"])
@pytest.mark.parametrize("pair", [(65_504.0, 54_496.0), (2.0**-23, 0.0)], ids=["largest", "smallest"])
def test_a_mean_of_16_bit_numbers_stays_in_range(four, pair, elements):
    """Neither their sum, which is too large, nor a quarter of each, which is too small, is a number of that type."""
    assert four.run(_mean_of, pair, elements) == [[sum(pair) / 2]] * 4


def _mean_of(process, pair, elements):
    values = torch.full((process.world_size * elements,), pair[process.rank % 2], dtype=torch.float16)
    mine = slice_of(values, process.rank, process.world_size)
    over_gloo.reduce_scatter([values], [mine], process.group, is_mean=True, staged=False).wait()
    return mine.double().unique().tolist()


def _calls(process):
    """The order in which a rank gives Gloo its messages."""
    backend = process.group._get_backend(torch.device("cpu"))
    order = []

    class Watching:
        def __getattr__(self, name):
            def call(tensors, other, tag):
                order.append((name, tensors[0].numel()))
                return getattr(backend, name)(tensors, other, tag)

            return call

    tensors = [torch.zeros(2, 50_000), torch.zeros(2, 60_000)]
    started = messages.Exchange(Record("", 12345, "all_gather", 0.0))
    other, parts = 1 - process.rank, [each[process.rank] for each in tensors]
    receives = [(other, each[other]) for each in tensors]
    started.carry_out(Watching(), receives, [(other, each) for each in parts])
    started.wait()
    return order


def test_receives_are_announced_before_anything_is_sent(two):
    for order in two.run(_calls):
        assert order == [("recv", 50_000), ("recv", 60_000), ("send", 50_000), ("send", 60_000)]


def _record(process):
    store = dist.distributed_c10d._get_default_store()
    into, what = torch.zeros(3), torch.full((3,), float(process.rank))
    other = 1 - process.rank
    if process.rank == 1:
        store.wait(["messages/go"])
    call = exchange("all_to_all", process.group, receives=[(other, into)], sends=[(other, what)])
    under_way = [each for each in started() if each.group.startswith("messages")][-1]
    if process.rank == 0:
        store.set("messages/go", "")
    call.wait()
    over = [each for each in started() if each.group.startswith("messages")][-1]
    found = (under_way.name, under_way.is_over), (over.name, over.is_over), over.number
    return *found, members(over.group), into.tolist()


def test_what_is_under_way_can_be_asked_for(two):
    """By who finds out which rank has not come to what."""
    (under_way, over, number, ranks, got), (_, _, other_number, _, other) = two.run(_record)
    assert under_way == ("all_to_all", False), "the other rank had not started"
    assert over == ("all_to_all", True)
    assert number == other_number
    assert ranks == [0, 1]
    assert got == [1.0] * 3
    assert other == [0.0] * 3


def _kept(process):
    """Whether memory is let go of when its exchange is over; the threads of a group, before and after its end."""
    group, other, what = dist.new_group(list(range(process.world_size))), 1 - process.rank, torch.ones(4)
    before, kept = _threads(), weakref.ref(what)
    exchange("all_to_all", group, receives=[(other, torch.zeros(4))], sends=[(other, what)]).wait()
    threads = _threads() - before
    del what
    _until(lambda: kept() is None)
    dist.destroy_process_group(group)
    del group
    gc.collect()
    _until(lambda: _threads() == before)
    return kept() is None, threads, _threads() - before


def _threads():
    return sum(each.name.startswith("messages") for each in threading.enumerate())


def _until(holds):
    deadline = time.monotonic() + 10
    while not holds() and time.monotonic() < deadline:
        time.sleep(0.01)


def test_memory_is_let_go_of_and_threads_end(two):
    assert two.run(_kept) == [(True, THREADS, 0)] * 2


def _hosts(process, name):
    """`name`: what the last rank takes its host for."""
    saved = hosts.this_host
    if process.rank == process.world_size - 1:
        hosts.this_host = lambda: (name or saved()[0], saved()[1])
    try:
        group = dist.new_group(list(range(process.world_size)))
        near = hosts.are_on_one_host(group)
    finally:
        hosts.this_host = saved
    tensor = torch.full((process.world_size, 50_000), float(process.rank))
    before = list(noted())
    over_gloo.all_gather([tensor], [tensor[process.rank]], group, staged=False).wait()
    return near, len([each for each in noted() if each not in before]), tensor[:, 7].tolist()


@pytest.mark.parametrize(("name", "near"), [("", True), ("elsewhere", False)])
def test_of_several_hosts_more_than_two_ranks_take_gloo_s_ring(four, name, near):
    assert four.run(_hosts, name) == [(near, int(near), [0.0, 1.0, 2.0, 3.0])] * 4


def _alone(process):
    """A rank that comes alone; the other one leaves it waiting."""
    group = dist.new_group(list(range(process.world_size)), timeout=timedelta(seconds=1))
    said, memory = "", torch.zeros(100_000)
    kept = weakref.ref(memory)
    if process.rank == 0:
        call = exchange("all_gather", group, receives=[(1, memory)], sends=[(1, torch.ones(100_000))])
        try:
            call.wait()
        except RuntimeError as error:
            said = str(error)
        record = noted()[-1]
        assert (record.name, record.is_over) == ("all_gather", True)
        del call
    del memory
    gc.collect()
    _until(lambda: kept() is None)
    dist.barrier(group=process.group)
    return said, kept() is None


def test_a_rank_that_does_not_come_is_an_error_in_time(two):
    (said, let_go), _ = two.run(_alone)
    assert is_of_a_collective(RuntimeError(said)), said
    assert let_go, "nothing that is asked about later keeps the memory of what failed"


def _profiled(process, folder):
    rank, tensors = process.rank, [torch.zeros(2, 1_000_000) for _ in range(4)]
    path = Path(folder) / f"{rank}.json.gz"
    with profiler_of_steps(2, path, on_gpu=False, shapes=False) as profiler:
        for _ in range(4):
            over_gloo.all_gather(tensors, [each[rank] for each in tensors], process.group, staged=False).wait()
            profiler.step()
    with gzip.open(path) as file:
        events = json.load(file)["traceEvents"]
    work = [each for each in read_chrome_trace(path).work if each.kind == "collective"]
    inner = [each for each in events if each.get("name") in ("gloo:recv", "gloo:send")]
    told = sum(each.get("name") == "trainstep_exchanges::all_gather" for each in events)
    spanned = sum(each.duration for each in work) / sum(each["dur"] for each in inner if each["name"] == "gloo:recv")
    return [each.name for each in work], len(inner), told, spanned


def test_a_profile_has_an_exchange_as_one_collective(two, tmp_path):
    for names, messages_of_all, told, spanned in two.run(_profiled, str(tmp_path)):
        assert names == ["gloo:all_gather"] * 2, "of the steps that are recorded"
        assert messages_of_all == 2 * 8
        assert told == 2
        assert spanned > 1 / 4, "all four receives, which run at once, and not the first alone"


ENDS = """
import sys, torch, torch.distributed as dist
from trainstep.parallel import over_gloo
dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=int(sys.argv[2]), world_size=2)
rank, memory = int(sys.argv[2]), torch.ones(200_000)
for _ in range(20):
    over_gloo.all_gather([memory], [memory[rank * 100_000 :][:100_000]], dist.group.WORLD, staged=False).wait()
"""


@pytest.mark.thorough
def test_processes_end_in_order(tmp_path):
    """Threads that outlived Python took most of these processes down in their last moment."""
    for number in range(4):
        words = [sys.executable, "-c", ENDS, str(tmp_path / f"store-{number}")]
        ranks = [subprocess.Popen([*words, str(rank)], stderr=subprocess.PIPE) for rank in range(2)]
        told = [(each.communicate(timeout=60)[1], each.returncode) for each in ranks]
        assert [code for _, code in told] == [0, 0], told
