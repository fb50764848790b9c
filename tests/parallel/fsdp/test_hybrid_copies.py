"""Hybrid sharding by copies: within the rows of hosts, or among all ranks of one host."""

import platform
from unittest import mock

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from tests.parallel.fsdp.test_hybrid import SHAPES, gradients_of, recorded, train
from tests.parallel.fsdp.test_misuse import _message
from tests.parallel.fsdp.test_schedule import BLOCK, EDGE, GAINS, LAYERS, PARAMETERS
from tests.parallel.fsdp.training import assert_same, error
from tests.parallel.meshes import mesh_of
from tests.parallel.nets import batch, build, loss_of
from trainstep.measure.collectives import recorded_collectives
from trainstep.parallel import FullyShardedDataParallel
from trainstep.parallel.ranks import AMONG_ALL
from trainstep.parallel.transport import by_copies

pytestmark = pytest.mark.distributed


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES[:2], ids=str)
def test_copies_exchange_gradients_among_all_ranks_and_share_the_means_of_rows(four, shape, dtype):
    calls, _ = four.run(recorded, shape, dtype, "peer-copies")[1]
    width, (replicas, ranks) = 4 if dtype is None else 2, shape
    gradients = [EDGE, *[BLOCK] * LAYERS, EDGE]
    exchanges = [call for call in calls if call[0] == "all-to-all"]
    assert exchanges == [("all-to-all", width * each, 4) for each in gradients]
    shared = [call for call, before in zip(calls[1:], calls, strict=False) if before in exchanges]
    assert [name for name, *_ in shared] == ["all-gather"] * len(gradients)
    for (_, size, among), each in zip(shared, gradients, strict=True):
        assert among == replicas
        assert 4 * each / ranks <= size <= 4 * each / ranks + 64 * 16, "rows begin at multiples of 16 elements"
    assert [call for call in calls if call[0] not in ("all-to-all", "all-gather")] == [
        ("all-reduce", 4 * (GAINS + PARAMETERS), 4)
    ]


def _by_copies(process):
    """With rows of ranks of one host, and the rows on two: copies stay within a row."""
    node = platform.node
    platform.node = lambda: f"host {process.rank // 2}"
    try:
        found = [train(process, (2, 2), "bfloat16", transport=each)[0] for each in ("peer-copies", "collectives")]
        sharded = FullyShardedDataParallel(build(), mesh=mesh_of(2, 2), transport="peer-copies")
        assert (sharded.transport, sharded.transport_between) == ("peer-copies", "collectives")
        return found, _message(lambda: train(process, (1, 4), "bfloat16", transport="peer-copies"))
    finally:
        platform.node = node


def test_copies_are_made_within_a_host_and_collectives_between_them(four):
    for (copies, collectives), refused in four.run(_by_copies):
        assert_same(copies, collectives)
        assert "the ranks are on 2 hosts" in refused


COPIED = ("tied", "bfloat16", "unused", "frozen")


def _among_all(process, shape, room):
    found = {}
    with mock.patch.multiple(by_copies, OUTBOX_BYTES=room, INBOX_BYTES=room):
        for name, transport, laid_out in (
            ("copies", "peer-copies", shape),
            ("one replica", "peer-copies", (1, 4)),
            ("collectives", "collectives", shape),
        ):
            found[name] = [train(process, laid_out, case, steps=2, transport=transport)[0] for case in COPIED]
        sharded = FullyShardedDataParallel(build(), mesh=mesh_of(*shape), transport="peer-copies")
    return found, sharded.transport_between


@pytest.mark.parametrize(("shape", "room"), [((2, 2), 1024), ((4, 1), 1024), ((2, 2), 2**28)], ids=str)
def test_where_a_host_has_the_replicas_copies_add_up_as_in_one_replica(four, shape, room):
    """What one replica of four ranks exchanges as well, to the bit. In buffers large enough, and in rounds."""
    (first, _), *others = by_rank = four.run(_among_all, shape, room)
    for found, between in by_rank:
        assert between == AMONG_ALL
        for number, case in enumerate(COPIED):
            one = found["copies"][number]
            assert error(one, found["collectives"][number]) < 1e-6, case
            assert error(one, found["one replica"][number]) < 1e-6, case
            if case == "bfloat16":
                assert_same(one, found["one replica"][number], case)
    for found, _ in others:
        for one, other in zip(found["copies"], first["copies"], strict=True):
            assert_same(one, other)


def _one_row_cannot(process):
    """Rank 3 is on another host than rank 2, in whose row it is; ranks 0 and 1 could make copies."""
    node = platform.node
    platform.node = lambda: "elsewhere" if process.rank == 3 else node()
    try:
        return _message(lambda: FullyShardedDataParallel(build(), mesh=mesh_of(2, 2), transport="peer-copies"))
    finally:
        platform.node = node


def test_every_replica_hears_of_one_that_cannot_make_copies(four):
    assert all("the ranks are on 2 hosts" in said for said in four.run(_one_row_cannot))


def _three_rows(process, room):
    mesh = DeviceMesh("cpu", [[3], [1], [2]], mesh_dim_names=("replicate", "shard"))
    if process.rank == 0:
        return None
    with mock.patch.multiple(by_copies, OUTBOX_BYTES=room, INBOX_BYTES=room):
        sharded = FullyShardedDataParallel(build(), mesh=mesh, transport="peer-copies")
    with recorded_collectives() as calls:
        loss_of(sharded, batch(0).chunk(4)[process.rank]).backward()
        sharded.finish_gradient_synchronization()
    exchanges = {call.ranks for call in calls if call.name in ("all-to-all", "all-gather") and call.bytes > 64}
    return sharded.transport_between, exchanges, {name: found for name, (_, found) in gradients_of(sharded).items()}


@pytest.mark.parametrize("room", [1024, 2**28])
def test_copies_among_three_rows_that_divide_nothing_evenly(four, room):
    """Of some of all ranks, in an order of the mesh's own."""
    _, *found = four.run(_three_rows, room)
    modules = [build() for _ in range(3)]
    for module, share in zip(modules, batch(0).chunk(4)[1:], strict=True):
        loss_of(module, share).backward()
    expected = {name: sum(m.get_parameter(name).grad for m in modules) / 3 for name, _ in modules[0].named_parameters()}
    for between, exchanged_by, gradients in found:
        assert (between, exchanged_by) == (AMONG_ALL, {3})
        assert error(gradients, expected) < 1e-6
        assert_same(gradients, found[0][2])
