"""The sharded optimizer over a mesh: state and work divided within replicas, gradients averaged over all ranks."""

import pytest
import torch
import torch.distributed.checkpoint as dcp

from tests.parallel.meshes import mesh_of
from tests.parallel.training import (
    EXCHANGE_MB,
    OPTIMIZERS,
    STEPS,
    build,
    delay,
    differing,
    loss_of,
    reference,
    shares,
    state,
)
from trainstep.base.errors import UsageError
from trainstep.measure.collectives import recorded_collectives
from trainstep.parallel import DistributedDataParallel, ShardedOptimizer

pytestmark = pytest.mark.distributed

NAMES = ["Plain", "Tied", "Uneven", "Transposed", "Unused"]


def _wrap(process, name, shape, scattered, seed=None, **settings):
    model = build(name, seed=process.rank if seed is None else seed).to(process.device)
    mesh = mesh_of(*shape, device=process.device.type) if shape else None
    settings |= {"bucket_mb": 600e-6, "allow_unused": name == "Unused"}
    ddp = DistributedDataParallel(model, mesh=mesh, **settings)
    optimizer_cls, options = OPTIMIZERS["AdamW"]
    ours = {"ddp": ddp} if scattered else {"mesh": mesh}
    return ddp, ShardedOptimizer(ddp.parameters(), optimizer_cls, exchange_mb=EXCHANGE_MB, **ours, **options)


def _step(process, ddp, optimizer, step, clip=None):
    optimizer.zero_grad()
    loss_of(ddp, shares(process.world_size, step)[process.rank]).backward()
    ddp.finish_gradient_synchronization()
    if clip is not None:
        optimizer.clip_grad_norm_(clip)
    optimizer.step()


def _train(process, shape, scattered, late=None, clip=None):
    found = {}
    for name in NAMES:
        ddp, optimizer = _wrap(process, name, shape, scattered)
        if late is not None:
            delay(ddp.module, seed=10 * late + process.rank, longest=0.002)
        for step in range(STEPS):
            _step(process, ddp, optimizer, step, clip)
        held = sum(value.numel() for values in optimizer.state.values() for value in values.values())
        found[name] = state(ddp.module), held
    return found


@pytest.mark.parametrize("scattered", [False, True], ids=["all-reduce", "reduce-scatter"])
@pytest.mark.parametrize("shape", [(2, 2), (4, 1), (1, 4)], ids=str)
def test_every_shape_trains_as_one_process(four, shape, scattered):
    by_rank = four.run(_train, shape, scattered)
    for name in NAMES:
        expected = reference(name, "AdamW", 4)
        assert not any(differing(found[name][0], by_rank[0][name][0]) for found in by_rank), name
        assert not differing(by_rank[0][name][0], expected, relative=2e-5), name
    held = [found["Plain"][1] for found in by_rank]
    whole = sum(parameter.numel() for parameter in build("Plain").parameters())
    assert all(2 * whole / shape[1] <= each <= 2.2 * whole / shape[1] for each in held), "of a replica's ranks"


@pytest.mark.parametrize("scattered", [False, True], ids=["all-reduce", "reduce-scatter"])
def test_late_ranks_change_nothing(four, scattered):
    expected = four.run(_train, (2, 2), scattered)[0]
    for found in four.run(_train, (2, 2), scattered, 1):
        for name in NAMES:
            assert not differing(found[name][0], expected[name][0]), name


def test_clipping_counts_every_element_once(four):
    for scattered in (False, True):
        for found in four.run(_train, (2, 2), scattered, None, 0.05):
            for name in ("Plain", "Uneven"):
                expected = reference(name, "AdamW", 4, clip=0.05)
                assert not differing(found[name][0], expected, relative=2e-5), name


def _norm(process):
    ddp, optimizer = _wrap(process, "Plain", (2, 2), True, seed=0)
    loss_of(ddp, shares(4, 0)[process.rank]).backward()
    ddp.finish_gradient_synchronization()
    return optimizer.clip_grad_norm_(1e6).item()


def test_the_norm_is_that_of_one_replica(four):
    model = build("Plain")
    for share in shares(4, 0):
        (loss_of(model, share) / 4).backward()
    expected = torch.nn.utils.get_total_norm([parameter.grad for parameter in model.parameters()]).item()
    norms = four.run(_norm)
    assert norms == pytest.approx([expected] * 4, rel=1e-5)
    assert len(set(norms)) == 1


def _accumulated(process):
    """Rounds that are finished each, and rounds without synchronisation."""
    found = []
    for apart in (True, False):
        ddp, optimizer = _wrap(process, "Plain", (2, 2), True, seed=0)
        optimizer.zero_grad()
        for micro in range(3):
            x = shares(4, micro)[process.rank]
            if apart and micro < 2:
                with ddp.no_sync():
                    loss_of(ddp, x).backward()
                continue
            loss_of(ddp, x).backward()
            ddp.finish_gradient_synchronization()
        optimizer.step()
        found.append(state(ddp.module))
    return found


def test_gradients_accumulate(four):
    expected = reference("Plain", "AdamW", 4, steps=1, accumulate=3)
    for both in four.run(_accumulated):
        assert not any(differing(found, expected, relative=2e-5) for found in both)


def _calls(process):
    ddp, optimizer = _wrap(process, "Plain", (2, 2), True, seed=0, reduce_dtype=torch.bfloat16)
    for step in range(2):
        with recorded_collectives() as calls:
            _step(process, ddp, optimizer, step)
    sums = {}
    for call in calls:
        key = call.name, call.ranks, call.dtype
        sums[key] = sums.get(key, 0) + call.bytes
    order = [(call.name, call.ranks) for call in calls]
    return sums, sum(each.numel() for each in ddp.parameters()), order


def test_what_goes_within_replicas_and_between_them(four):
    """Between replicas a slice, as narrow as the rest of the way; weights are gathered within replicas alone."""
    for sums, count, order in four.run(_calls):
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
    attempts = {
        "process_group and mesh were both given": lambda: DistributedDataParallel(
            build("Plain"), mesh=mesh, process_group=process.group
        ),
        "mesh is not that of ddp": lambda: ShardedOptimizer(ddp.parameters(), torch.optim.SGD, ddp=ddp, mesh=other),
        "mesh is not that of ddp; give it": lambda: ShardedOptimizer(
            flat.parameters(), torch.optim.SGD, ddp=flat, mesh=mesh
        ),
        "rank 2 has mesh = ('cpu', [[0], [1], [2], [3]])": lambda: DistributedDataParallel(build("Plain"), mesh=ranks),
        "ShardedOptimizer of SGD: the ranks disagree: rank 2 has mesh": lambda: ShardedOptimizer(
            flat.parameters(), torch.optim.SGD, mesh=ranks
        ),
    }
    found = []
    for expected, attempt in attempts.items():
        with pytest.raises(UsageError) as error:
            attempt()
        found.append((expected, str(error.value)))
    return found


def test_every_mistake_is_named(four):
    for found in four.run(_mistakes):
        for expected, message in found:
            assert expected in message
