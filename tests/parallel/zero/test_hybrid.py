"""The sharded optimizer over a mesh: state and work divided within replicas, gradients averaged over all ranks."""

import pytest
import torch
import torch.distributed.checkpoint as dcp

from tests.parallel.meshes import mesh_of
from tests.parallel.mistakes import check, told
from tests.parallel.training import (
    OPTIMIZERS,
    build,
    differing,
    loss_of,
    reference,
    shares,
    state,
    step_of,
    train_steps,
)
from tests.parallel.zero.test_optimizer import wrap
from trainstep.measure.collectives import recorded_collectives
from trainstep.parallel import DistributedDataParallel, ShardedOptimizer

pytestmark = pytest.mark.distributed

NAMES = ["Plain", "Tied", "Uneven", "Transposed", "Unused"]


def _wrap(process, name, shape, scattered, **settings):
    return wrap(process, name, *OPTIMIZERS["AdamW"], scattered, shape=shape, **settings)


def _train(process, shape, scattered, how, **settings):
    found = {}
    for name in NAMES:
        ddp, optimizer = _wrap(process, name, shape, scattered, **settings)
        trained = train_steps(process, ddp, optimizer, **how)
        found[name] = trained, sum(value.numel() for values in optimizer.state.values() for value in values.values())
    return found


def _train_by(process, shape, scattered, transport):
    return _train(process, shape, scattered, {}, transport=transport)


@pytest.mark.parametrize(
    ("scattered", "transport"), [(False, "collectives"), (True, "collectives"), (True, "peer-copies")]
)
@pytest.mark.parametrize("shape", [(2, 2), (4, 1), (1, 4)], ids=str)
def test_every_shape_trains_as_one_process(four, shape, scattered, transport):
    by_rank = four.run(_train_by, shape, scattered, transport)
    for name in NAMES:
        expected = reference(name, "AdamW", 4)
        assert not any(differing(found[name][0], by_rank[0][name][0]) for found in by_rank), name
        assert not differing(by_rank[0][name][0], expected, relative=2e-5), name
    held = [found["Plain"][1] for found in by_rank]
    whole = sum(parameter.numel() for parameter in build("Plain").parameters())
    assert all(2 * whole / shape[1] <= each <= 2.2 * whole / shape[1] for each in held), "of a replica's ranks"


@pytest.mark.parametrize("scattered", [False, True], ids=["all-reduce", "reduce-scatter"])
def test_late_ranks_change_nothing(four, scattered):
    expected = four.run(_train, (2, 2), scattered, {})[0]
    for found in four.run(_train, (2, 2), scattered, {"delays": 1}):
        for name in NAMES:
            assert not differing(found[name][0], expected[name][0]), name


def _norms(process, scattered):
    """Before and after clipping."""
    ddp, optimizer = _wrap(process, "Plain", (2, 2), scattered, seed=0)
    step_of(process, ddp, optimizer, 0, update=False)
    return [optimizer.clip_grad_norm_(most).item() for most in (0.05, 1e6)]


@pytest.mark.parametrize("scattered", [False, True], ids=["all-reduce", "reduce-scatter"])
def test_the_norm_is_that_of_one_replica_and_clipping_counts_every_element_once(four, scattered):
    model = build("Plain")
    for share in shares(4, 0):
        (loss_of(model, share) / 4).backward()
    expected = torch.nn.utils.get_total_norm([parameter.grad for parameter in model.parameters()]).item()
    norms = four.run(_norms, scattered)
    assert norms[0] == pytest.approx([expected, 0.05], rel=1e-4)
    assert norms == norms[:1] * 4


def _accumulated(process):
    """Rounds without synchronisation, and rounds that are finished each."""
    ddp, optimizer = _wrap(process, "Plain", (2, 2), True, seed=0)
    step_of(process, ddp, optimizer, 0, accumulate=3)
    found = [state(ddp.module)]
    ddp, optimizer = _wrap(process, "Plain", (2, 2), True, seed=0)
    for micro in range(3):
        loss_of(ddp, shares(4, micro)[process.rank]).backward()
        ddp.finish_gradient_synchronization()
    optimizer.step()
    return [*found, state(ddp.module)]


def test_gradients_accumulate(four):
    expected = reference("Plain", "AdamW", 4, steps=1, accumulate=3)
    for both in four.run(_accumulated):
        assert not any(differing(found, expected, relative=2e-5) for found in both)


def _calls(process, transport):
    """Bytes of a step by call, and its calls in order."""
    settings = {"seed": 0, "reduce_dtype": torch.bfloat16, "transport": transport}
    ddp, optimizer = _wrap(process, "Plain", (2, 2), True, **settings)
    for step in range(2):
        with recorded_collectives() as calls:
            step_of(process, ddp, optimizer, step)
    sums = {}
    for call in calls:
        key = call.name, call.ranks, call.dtype
        sums[key] = sums.get(key, 0) + call.bytes
    order = [(call.name, call.ranks) for call in calls]
    return sums, sum(each.numel() for each in ddp.parameters()), order


@pytest.mark.parametrize("transport", ["collectives", "peer-copies"])
def test_what_goes_within_replicas_and_between_them(four, transport):
    """Between replicas a slice, as narrow as the rest of the way; weights are gathered within replicas alone."""
    for sums, count, order in four.run(_calls, transport):
        between = [place for place, call in enumerate(order) if call == ("all-reduce", 2)]
        within = [place for place, call in enumerate(order) if call == ("reduce-scatter", 2)]
        assert len(between) == len(within) >= 2
        assert all(place < after for place, after in zip(between, within[1:], strict=False)), "not all in the end"
        sliced = sums["reduce-scatter", 2, torch.bfloat16] // 2
        assert sums["all-reduce", 2, torch.bfloat16] == 2 * sliced / 2
        assert sums["all-gather", 2, torch.float32] == 4 * sliced
        whole = sums.get(("all-reduce", 4, torch.bfloat16), 0) // 2
        assert sliced + whole == count
        assert sliced > 0.9 * count
        assert not {key for key in sums if key[0] in ("all-gather", "reduce-scatter") and key[1] == 4}


def _save(process, folder):
    ddp, optimizer = _wrap(process, "Uneven", (2, process.world_size // 2) if process.world_size > 2 else None, True)
    for step in range(2):
        _same_step(ddp, optimizer, step)
    dcp.save({"model": ddp, "optimizer": optimizer}, checkpoint_id=str(folder))
    full = optimizer.full_state_dict()
    assert bool(full) == (process.rank == 0)
    _same_step(ddp, optimizer, 2)
    return state(ddp.module)


def _same_step(ddp, optimizer, step):
    """Every rank's batch is the same, so that any number of ranks makes the same step."""
    optimizer.zero_grad()
    loss_of(ddp, shares(2, step)[1]).backward()
    ddp.finish_gradient_synchronization()
    optimizer.step()


def _load(process, folder):
    ddp, optimizer = _wrap(process, "Uneven", (2, process.world_size // 2) if process.world_size > 2 else None, True)
    dcp.load({"model": ddp, "optimizer": optimizer}, checkpoint_id=str(folder))
    _same_step(ddp, optimizer, 2)
    return state(ddp.module)


def test_checkpoints_go_from_replicas_to_two_ranks_and_back(two, four, tmp_path):
    expected = four.run(_save, tmp_path / "hybrid")[0]
    assert not differing(two.run(_load, tmp_path / "hybrid")[1], expected, relative=1e-6)
    expected = two.run(_save, tmp_path / "two")[0]
    assert not any(differing(found, expected, relative=1e-6) for found in four.run(_load, tmp_path / "two"))


def _mistakes(process):
    mesh, other = mesh_of(2, 2), mesh_of(4, 1)
    ddp, flat = (DistributedDataParallel(build("Plain", seed=0), mesh=each) for each in (mesh, None))
    ranks = [mesh, other][process.rank // 2]
    return told(
        {
            "process_group and mesh were both given": lambda: DistributedDataParallel(
                build("Plain"), mesh=mesh, process_group=process.group
            ),
            "mesh is not that of ddp": lambda: ShardedOptimizer(ddp.parameters(), torch.optim.SGD, ddp=ddp, mesh=other),
            "mesh is not that of ddp; give it": lambda: ShardedOptimizer(
                flat.parameters(), torch.optim.SGD, ddp=flat, mesh=mesh
            ),
            "rank 2 has mesh = ('cpu', [[0], [1], [2], [3]])": lambda: DistributedDataParallel(
                build("Plain"), mesh=ranks
            ),
            "ShardedOptimizer of SGD: the ranks disagree: rank 2 has mesh": lambda: ShardedOptimizer(
                flat.parameters(), torch.optim.SGD, mesh=ranks
            ),
        }
    )


def test_every_mistake_is_named(four):
    check(four.run(_mistakes))
