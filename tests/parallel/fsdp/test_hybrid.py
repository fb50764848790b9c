"""Hybrid sharding: replicas of a model, each sharded over a row of ranks, train as one process does."""

import collections
import contextlib
import functools
import platform
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from tests.parallel.fsdp.test_schedule import BLOCK, CONFIG, EDGE, GAINS, LAYERS, PARAMETERS
from tests.parallel.fsdp.training import CASES, assert_same, error, gradients_of, sharded_net
from tests.parallel.meshes import mesh_of
from tests.parallel.mistakes import check, message, told
from tests.parallel.nets import OPTIMIZERS, batch, build, loss_of, train_alone
from trainstep.measure.collectives import recorded_collectives
from trainstep.parallel import FullyShardedDataParallel
from trainstep.parallel.fsdp import gradients as fsdp_gradients
from trainstep.parallel.ranks import DIMENSIONS
from trainstep.parallel.transport import by_collectives
from trainstep.step.model.transformer import build_transformer, cross_entropy

pytestmark = pytest.mark.distributed

SHAPES = [(2, 2), (4, 1), (1, 4)]


def train(process, shape, case, steps=4, **settings):
    """Parameters after some steps, and each step's loss and gradients."""
    options, how, dtype = CASES[case]
    sharded = sharded_net(options, dtype, shape, **settings)
    optimizer = OPTIMIZERS[how](sharded.parameters())
    losses, gradients = [], []
    for step in range(steps):
        loss = loss_of(sharded, batch(step).chunk(process.world_size)[process.rank])
        loss.backward()
        sharded.finish_gradient_synchronization()
        losses.append(loss.item())
        gradients.append(gradients_of(sharded))
        optimizer.step()
        optimizer.zero_grad()
    return sharded.gather_full_parameters(), losses, gradients


def _train_cases(process, shape, cases):
    return [train(process, shape, case) for case in cases]


def in_pairs(gradients):
    """The mean of four ranks, first of the two of a row."""
    first, second = ((a[0] / 2 + b[0] / 2) / 2 for a, b in (gradients[:2], gradients[2:]))
    return first + second


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_shape_trains_as_one_process(four, shape):
    """Losses, gradients and parameters within the error budget, since four ranks are added up in another order; between
    replicas, and where two ranks are added up at a time, to the bit."""
    names = ["adamw", "tied", "frozen", "unused", "bfloat16", "float16"]
    by_rank = four.run(_train_cases, shape, names)
    for number, name in enumerate(names):
        options, how, dtype = CASES[name]
        losses, gradients = [], []

        def note(module, losses=losses, gradients=gradients):
            with torch.no_grad():
                losses.append([loss_of(module, share).item() for share in batch(len(losses)).chunk(4)])
            gradients.append({name: parameter.grad for name, parameter in module.named_parameters()})

        expected = train_alone(options, how, 4, ranks=4, dtype=dtype, change=note, combine=in_pairs)
        found = by_rank[0][number][0]
        oracle = train_alone(options, how, 4, ranks=1, trained=torch.float64)
        budget = 2 * error(expected, oracle) + torch.finfo(torch.float32).eps
        assert 0 < error(found, oracle) <= budget, name
        for rank, (parameters, own_losses, own_gradients) in enumerate(ranks[number] for ranks in by_rank):
            assert_same(parameters, found, name)
            rounding = 1e-5 if dtype is None else torch.finfo(dtype).eps
            assert own_losses == pytest.approx([each[rank] for each in losses], rel=rounding), name
            for key, (rows, gradient) in own_gradients[0].items():
                whole = gradients[0][key]
                if whole is None or gradient is None:
                    assert whole is gradient is None, key
                elif shape == (2, 2) and whole.dim() > 1:
                    assert torch.equal(gradient, whole[rows]), f"{name}: {key} on rank {rank}"
                else:
                    assert error({key: gradient}, {key: whole[rows]}) < 1e-5 or not whole[rows].any(), key
            above = by_rank[rank % shape[1]][number][2]  # the same shards, in the first replica
            for ours, theirs in zip(own_gradients, above, strict=True):
                assert_same(*({key: g for key, (_, g) in each.items() if g is not None} for each in (ours, theirs)))


def recorded(process, shape, dtype, transport="auto"):
    """The collectives of the second step, and the order in which means begin and are waited for."""
    torch.manual_seed(0)
    settings = {"compute_dtype": dtype, "mesh": mesh_of(*shape), "transport": transport}
    sharded = FullyShardedDataParallel(build_transformer(CONFIG), **settings)
    tokens, order = batch(0, vocabulary=24).chunk(4)[process.rank], []
    originals = {"within": fsdp_gradients.reduce_scatter_mean, "between": by_collectives.all_reduce_mean}

    class Noted:
        def __init__(self, what, *arguments):
            number = sum((each[0], each[-1]) == (what, "begins") for each in order)
            self.work, self.what = originals[what](*arguments), (what, number)
            order.append((*self.what, "begins"))

        def wait(self):
            order.append((*self.what, "is awaited"))
            self.work.wait()

    fsdp_gradients.reduce_scatter_mean, by_collectives.all_reduce_mean = (
        functools.partial(Noted, what) for what in originals
    )
    try:
        for _ in range(2):
            order.clear()
            with recorded_collectives() as calls:
                cross_entropy(sharded(tokens[:, :-1]), tokens[:, 1:]).backward()
                sharded.finish_gradient_synchronization()
            sharded.zero_grad()
    finally:
        fsdp_gradients.reduce_scatter_mean, by_collectives.all_reduce_mean = originals.values()
    # the agreement's calls are smaller
    return [(call.name, call.bytes, call.ranks) for call in calls if call.bytes > 64], order


@pytest.mark.parametrize("transport", ["collectives", "peer-copies"])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_collective_and_its_bytes(four, shape, dtype, transport):
    """Between replicas go shards, in float32; within them what would go without replicas. Copies are counted, too."""
    calls, _ = four.run(recorded, shape, dtype, transport)[1]
    width, (replicas, ranks) = 4 if dtype is None else 2, shape
    sizes = collections.defaultdict(list)
    for name, size, _ in calls:
        sizes[name].append(size)
    gradients = [EDGE, *[BLOCK] * LAYERS, EDGE]  # in the order of backward
    flat = 4 * (GAINS + PARAMETERS)
    own = [4 * -(-each // ranks) for each in gradients] if replicas > 1 else []
    assert sizes.pop("all-reduce") == [*own, flat]
    if ranks > 1:
        kept = BLOCK + EDGE  # from forward to backward
        assert sum(sizes.pop("all-gather")) == width * (2 * sum(gradients) - kept)
        assert sizes.pop("reduce-scatter" if dtype is None else "all-to-all") == [width * each for each in gradients]
    assert not sizes, "and nothing else"


def test_gradients_travel_between_replicas_beside_the_backward_of_two_more_groups(four):
    _, order = four.run(recorded, (2, 2), None)[0]
    when = {event: place for place, event in enumerate(order)}
    for number in range(LAYERS):
        begins, ends = (when["between", number, each] for each in ("begins", "is awaited"))
        assert when["within", number, "is awaited"] < begins < when["within", number + 1, "begins"] < ends
        assert ends < when["between", number + 1, "begins"] < when["within", number + 2, "begins"], "one at a time"


def _step_with(process, change):
    sharded = FullyShardedDataParallel(build(), mesh=mesh_of(2, 2))
    if process.rank >= 2:
        change(sharded.module)
    loss_of(sharded, batch(0).chunk(4)[process.rank]).backward()
    sharded.finish_gradient_synchronization()


def _in_another_order(module):
    first, second, *others = module.blocks
    module.blocks = nn.ModuleList([second, first, *others])


def _replicas_differ(process):
    second = process.rank >= 2
    return [
        message(lambda: FullyShardedDataParallel(build(inner=19 + second), mesh=mesh_of(2, 2))),
        message(lambda: FullyShardedDataParallel(build(), mesh=mesh_of(2, 2), prefetch=1 + second)),
        message(lambda: FullyShardedDataParallel(build(), mesh=_mesh_by_rank(second))),
        message(lambda: _step_with(process, _in_another_order)),
    ]


def _mesh_by_rank(second):
    """The groups of both meshes on every rank, as making them takes all; the second replica means another one."""
    rows, columns = mesh_of(2, 2), mesh_of(4, 1)
    return columns if second else rows


def test_replicas_that_differ_are_noticed_as_ranks_of_one_are(four):
    by_rank = four.run(_replicas_differ)
    assert all(said == by_rank[0] for said in by_rank)
    width, prefetch, mesh, order = by_rank[0]
    assert "rank 2 has blocks.0.up.weight (float32 (20, 12)) as parameter 4, rank 0" in width
    assert "rank 2 has prefetch = 2 as setting, rank 0 prefetch = 1" in prefetch
    assert "rank 2 has mesh = ('cpu', [[0], [1], [2], [3]])" in mesh
    assert "rank 0 comes to gather blocks.0, rank 1 comes to gather blocks.0, rank 2 comes to gather blocks.1" in order


def _some_of_all(process):
    """Ranks 1 to 3 as one row; rank 0, which makes the mesh with them, is not in it. Then ranks 1 to 2 as two rows."""
    found = []
    for ranks in ([[1, 2, 3]], [[1], [2]]):
        mesh = DeviceMesh("cpu", ranks, mesh_dim_names=("replicate", "shard"))
        if process.rank not in mesh.mesh.flatten().tolist():
            found.append(message(functools.partial(FullyShardedDataParallel, build(), mesh=mesh)))
            continue
        sharded = FullyShardedDataParallel(build(), mesh=mesh)
        loss_of(sharded, batch(0).chunk(4)[process.rank]).backward()
        sharded.finish_gradient_synchronization()
        sharded.clip_grad_norm_(1e6)
        gradients = gradients_of(sharded)
        found.append((sharded.process_group.size(), {name: gradients[name] for name in ("position", "norm.bias")}))
    return found


def test_a_mesh_may_have_some_of_all_ranks(four):
    outside, *inside = four.run(_some_of_all)
    assert "mesh has the ranks [[1, 2, 3]], and this process is rank 0; only its members may use it" in outside[0]
    assert "[[1], [2]]" in outside[1]
    shares = batch(0).chunk(4)
    modules = [build() for _ in shares]
    for module, share in zip(modules, shares, strict=True):
        loss_of(module, share).backward()
    for rank, (row, column) in zip((1, 2), inside, strict=False):
        for (size, gradients), members in ((row, (1, 2, 3)), (column, (1, 2))):
            assert size == len(members)
            for name, (rows, found) in gradients.items():
                expected = sum(modules[each].get_parameter(name).grad for each in members) / len(members)
                assert error({name: found}, {name: expected[rows]}) < 1e-6, (rank, name)


def _cut_from_another(process):
    """A mesh cut from one of three dimensions, as frameworks make them: here the first of two pipeline stages."""
    mesh = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("pp", "dp_replicate", "dp_shard"))
    sharded = FullyShardedDataParallel(build(), mesh=mesh["dp_replicate", "dp_shard"])
    one = FullyShardedDataParallel(build(), mesh=mesh["dp_shard"])
    return [(each.process_group.size(), each.sharded_parameters()[0].shard.shape) for each in (sharded, one)]


def test_a_mesh_may_be_a_part_of_another_and_of_one_dimension_its_group(four):
    for hybrid, one in four.run(_cut_from_another):
        assert hybrid == (4, (4, 12)), "half of the rows of position"
        assert one == (2, (4, 12))


def _mistakes(process):
    mesh, named = mesh_of(2, 2), functools.partial(DeviceMesh, "cpu", [[0, 1], [2, 3]], _init_backend=False)
    attempts = {
        "process_group and mesh were both given": {"process_group": process.group, "mesh": mesh},
        "mesh is a list; expected a DeviceMesh": {"mesh": [[0, 1], [2, 3]]},
        'mesh has the dimensions "shard", "replicate"; expected one': {"mesh": named(mesh_dim_names=DIMENSIONS[::-1])},
        'mesh has the dimensions "dp", "tp"; expected one': {"mesh": named(mesh_dim_names=("dp", "tp"))},
        "mesh has the dimensions of shape (1, 2, 2); expected": {
            "mesh": DeviceMesh("cpu", [[[0, 1], [2, 3]]], _init_backend=False)
        },
        "mesh has no process groups": {"mesh": named()},
        "mesh has 6 ranks, up to rank 5, and there are 4 (0 to 3)": {
            "mesh": DeviceMesh("cpu", [[0, 1, 2], [3, 4, 5]], _init_backend=False)
        },
        "mesh has the row [3, 1]; expected ranks in ascending order within a row": {
            "mesh": DeviceMesh("cpu", [[3, 1], [0, 2]], mesh_dim_names=DIMENSIONS, _init_backend=False)
        },
        "the module would train on meta": {"mesh": mesh, "device": "meta"},
    }
    return told({each: functools.partial(FullyShardedDataParallel, build(), **how) for each, how in attempts.items()})


def test_every_mistake_is_named(four):
    check(four.run(_mistakes))


@contextlib.contextmanager
def _on_host(name):
    with mock.patch.object(platform, "node", return_value=name):
        yield


def _by_copies(process):
    """With rows of ranks of one host, and the rows on two, copies stay within a row. Then rank 3 is on another host
    than rank 2, in whose row it is; ranks 0 and 1 could make copies."""
    with _on_host(f"host {process.rank // 2}"):
        found = [train(process, (2, 2), "bfloat16", transport=each)[0] for each in ("peer-copies", "collectives")]
        sharded = sharded_net({}, shape=(2, 2), transport="peer-copies")
        assert (sharded.transport, sharded.transport_between) == ("peer-copies", "collectives")
        refused = message(lambda: sharded_net({}, shape=(1, 4), transport="peer-copies"))
    with _on_host("elsewhere" if process.rank == 3 else "here"):
        return found, [refused, message(lambda: sharded_net({}, shape=(2, 2), transport="peer-copies"))]


def test_copies_are_made_within_a_host_and_collectives_between_them_and_all_hear_where_they_cannot(four):
    for (copies, collectives), refused in four.run(_by_copies):
        assert_same(copies, collectives)
        assert all('on 2 hosts; use "auto" or "collectives"' in said for said in refused)
