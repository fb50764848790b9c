"""Copies between the memories of one host do what the collectives do, and are refused where they cannot be made."""

import os
import time
from unittest import mock

import pytest
import torch

from tests.parallel.fsdp.training import CASES, assert_same, train
from tests.parallel.nets import build, train_alone
from trainstep.base.errors import UsageError
from trainstep.parallel import FullyShardedDataParallel
from trainstep.parallel.fsdp.shards import cut_rows
from trainstep.parallel.transport import by_copies
from trainstep.parallel.transport.by_collectives import Layout
from trainstep.parallel.transport.by_copies import PeerCopies, choose_transport
from trainstep.parallel.transport.peer_memory import PeerMemory, obstacle_to_sharing

pytestmark = pytest.mark.distributed


def _left_behind(before):
    """Files of shared memory that were not there before, and stay; other tests' are there while these start."""
    left, end = set(os.listdir("/dev/shm")) - before, time.monotonic() + 30
    while left & set(os.listdir("/dev/shm")) and time.monotonic() < end:
        time.sleep(0.1)
    return left & set(os.listdir("/dev/shm"))


def _meet(process):
    memory = PeerMemory(1000, process.group, process.device)
    memory.buffers[process.rank].fill_(process.rank + 1)
    memory.barrier()
    return [buffer.unique().tolist() for buffer in memory.buffers]


def test_every_rank_sees_every_buffer(four):
    before = set(os.listdir("/dev/shm"))
    assert four.run(_meet) == [[[1], [2], [3], [4]]] * 4
    assert not _left_behind(before)


def _held(process):
    sizes = {"collectives": None, "peer-copies": None}
    for name in sizes:
        sharded = FullyShardedDataParallel(build(inner=1024), compute_dtype=torch.bfloat16, transport=name)
        groups = sharded._schedule.groups
        sizes[name] = sharded.uncounted_bytes
    largest = max(group.full_bytes for group in groups)
    return sizes, largest


def test_buffers_are_as_large_as_the_largest_group_needs(two):
    for sizes, largest in two.run(_held):
        assert sizes["collectives"] == 0
        # half of a group's parameters, and all of its gradients, in bfloat16 and with their padding
        assert sizes["peer-copies"] == pytest.approx(1.5 * largest, rel=0.05)


def _laid_out(process, room):
    """What two gathers bring whose outboxes were filled with other values than the tensors have."""
    with mock.patch.multiple(by_copies, OUTBOX_BYTES=room, INBOX_BYTES=room):
        copies = PeerCopies(process.group, process.device, slice_bytes=8192, exchange_bytes=256)
    whole = [torch.zeros(process.world_size * size, dtype=torch.uint8) for size in (300, 5)]
    outbox = copies.outbox_of(whole)
    if outbox is None:
        return None
    gather = copies.gather_of(whole, laid_out=True)
    for call in range(2):
        for number, slot in enumerate(outbox):
            slot.fill_(100 * call + 10 * process.rank + number)
        gather()
    return [slot.numel() for slot in outbox], [each.view(process.world_size, -1) for each in whole]


def test_a_gather_takes_what_was_laid_out_for_it(four):
    for rank, (sizes, whole) in enumerate(four.run(_laid_out, 8192)):
        assert sizes == [300, 5]
        for number, rows in enumerate(whole):
            expected = [0 if other == rank else 100 + 10 * other + number for other in range(4)]
            assert [row.unique().tolist() for row in rows] == [[each] for each in expected]
    assert four.run(_laid_out, 256) == [None] * 4, "in rounds there is no such place"


def _in_turns(process, room):
    """Averages and exchanges by one transport, where barriers depend on what came before, and what they should be."""
    ranks = process.world_size
    with mock.patch.multiple(by_copies, OUTBOX_BYTES=room, INBOX_BYTES=room):
        copies = PeerCopies(process.group, process.device, slice_bytes=8192, exchange_bytes=8192)
    shapes = [(2 * ranks, 65), (7, 3)]
    slices = [cut_rows(torch.Size(shape), 0, ranks)[1].numel() // ranks for shape in shapes]
    layout = Layout([rows * columns for rows, columns in shapes], slices, ranks)
    average, scatter = (copies.average_of(layout, scattered=each) for each in (False, True))
    exchange_of, found = copies.exchange_of(layout), []
    for call, what in enumerate(["average", "exchange", "average", "average", "scatter", "average", "exchange"]):
        draws = [torch.Generator().manual_seed(100 * call + rank) for rank in range(ranks)]
        given = [[torch.randn(shape, generator=draw) for shape in shapes] for draw in draws]
        means = [torch.stack(each).mean(0) for each in zip(*given, strict=True)]
        own = [(piece, slice(piece.place, piece.place + piece.elements)) for piece in layout.pieces(process.rank)]
        mine = given[process.rank]
        if what == "exchange":
            row = torch.zeros(layout.size)
            exchange_of(mine, row)[0]()
            mine = [row[place] for _, place in own]
        else:
            (average if what == "average" else scatter)(mine)()
        if what != "average":
            slices = [slice(piece.offset, piece.offset + piece.elements) for piece, _ in own]
            means = [mean.view(-1)[part] for mean, part in zip(means, slices, strict=False)]
            mine = (
                mine if what == "exchange" else [each.view(-1)[part] for each, part in zip(mine, slices, strict=False)]
            )
        found.append((what, mine, means))
    return found


@pytest.mark.parametrize("room", [8192, 256])
def test_averages_and_exchanges_take_turns(four, room):
    for by_call in four.run(_in_turns, room):
        for what, found, means in by_call:
            assert found, what
            for value, mean in zip(found, means, strict=True):
                assert torch.allclose(value, mean, rtol=0, atol=1e-6), what


def _train_by_copies(process, names, room=2**28):
    found = []
    for name in names:
        options, how, dtype = CASES[name]
        with mock.patch.multiple(by_copies, OUTBOX_BYTES=room, INBOX_BYTES=room):
            found.append(train(process, options, how, 4, dtype, transport="peer-copies"))
    return found


@pytest.mark.parametrize("room", [2**28, 512])
def test_two_ranks_train_as_one_process_bit_for_bit(two, room):
    names = ["frozen", "bfloat16", "float16"]
    for name, found in zip(names, two.run(_train_by_copies, names, room)[1], strict=True):
        options, how, dtype = CASES[name]
        assert_same(found, train_alone(options, how, 4, ranks=2, dtype=dtype), name)


def test_four_ranks_train_as_one_process_bit_for_bit(four):
    (found,) = four.run(_train_by_copies, ["bfloat16"])[2]
    assert_same(found, train_alone({}, "adamw", 4, ranks=4, dtype=torch.bfloat16))


def _choose(process, asked):
    return choose_transport(
        asked, process.group, process.device, slice_bytes=1, exchange_bytes=1, everyone=process.group
    ).name


def _obstacle(process):
    return obstacle_to_sharing(process.group, process.device)


def test_collectives_are_chosen_for_cpus_unless_copies_are_asked_for(two):
    assert two.run(_choose, "auto") == ["collectives"] * 2
    assert two.run(_choose, "peer-copies") == ["peer-copies"] * 2
    assert two.run(_obstacle) == [None, None]


def _one_rank_cannot(process):
    """What is said when rank 1 has no room in shared memory, or cannot map what another rank has; and if they still
    understand each other."""
    said = []
    for module, name in ((os, "posix_fallocate"), (torch, "from_file")):
        works = getattr(module, name)

        def refuse(*_, name=name, **__):
            raise OSError(28, f"no room for {name}")

        if process.rank == 1:
            setattr(module, name, refuse)
        try:
            _choose(process, "peer-copies")
        except UsageError as error:
            said.append(str(error))
        finally:
            setattr(module, name, works)
        total = torch.ones(1)
        torch.distributed.all_reduce(total, group=process.group)
        said.append(total.item())
    return said


def test_all_ranks_hear_of_one_that_cannot_share(two):
    before = set(os.listdir("/dev/shm"))
    for no_room, sum_after, unmapped, sum_in_the_end in two.run(_one_rank_cannot):
        assert "rank 1: [Errno 28] no room for posix_fallocate" in no_room
        assert "rank 1: [Errno 28] no room for from_file" in unmapped
        assert (sum_after, sum_in_the_end) == (2, 2)
    assert not _left_behind(before)
