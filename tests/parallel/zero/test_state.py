"""ShardedOptimizer's state dicts and checkpoints: between world sizes, and to and from the undivided optimizer."""

import functools

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from tests.parallel.training import EXCHANGE_MB, SignDescent, build, differing, loss_of, shares, state
from trainstep.parallel import DistributedDataParallel, ShardedOptimizer

pytestmark = pytest.mark.distributed

CHECKPOINTED = {
    "slices": ("Plain", torch.optim.AdamW, {"lr": 0.01}, True),
    "uneven": ("Uneven", torch.optim.AdamW, {"lr": 0.01}, False),
    "transposed": ("Transposed", torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}, True),
    "mixed": ("Mixed", torch.optim.AdamW, {"lr": 0.01}, True),
    "unused": ("Unused", torch.optim.AdamW, {"lr": 0.01}, False),
    "whole": ("Plain", torch.optim.Adafactor, {"lr": 0.01}, False),
    "unknown": ("Plain", SignDescent, {}, False),
}


def _wrap(process, case):
    name, optimizer_cls, options, scattered = CHECKPOINTED[case]
    model = build(name).to(process.device)
    ddp = DistributedDataParallel(model, process_group=process.group, allow_unused=name == "Unused")
    groups = [
        {"params": [p for p in ddp.parameters() if p.dim() > 1]},
        {"params": [p for p in ddp.parameters() if p.dim() <= 1], "lr": 0.005},
    ]
    shared = {"process_group": process.group, "ddp": ddp if scattered else None, "exchange_mb": EXCHANGE_MB}
    return ddp, ShardedOptimizer(groups, optimizer_cls, **shared, **options)


def _same_batch_step(ddp, optimizer, step):
    """A step whose mean gradient is the same at every world size, to the bit."""
    optimizer.zero_grad()
    loss_of(ddp, shares(2, step)[1]).backward()
    ddp.finish_gradient_synchronization()
    optimizer.step()


def _continue(process, case, path, steps, loading, saving):
    """Load what was saved, at whatever world size; train on; save."""
    ddp, optimizer = _wrap(process, case)
    if loading == "checkpoint":
        dcp.load({"model": ddp, "optimizer": optimizer}, checkpoint_id=str(path), process_group=process.group)
    elif loading == "full":
        saved = torch.load(path / "full.pt")
        ddp.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
    for step in steps:
        _same_batch_step(ddp, optimizer, step)
    full = optimizer.full_state_dict()
    assert bool(full) == (process.rank == 0)
    if saving == "checkpoint":
        dcp.save({"model": ddp, "optimizer": optimizer}, checkpoint_id=str(path), process_group=process.group)
    elif saving == "full" and process.rank == 0:
        torch.save({"model": ddp.state_dict(), "optimizer": full}, path / "full.pt")
    dist.barrier(group=process.group)
    return state(ddp.module), full


def _undivided(case, steps, device="cpu"):
    name, optimizer_cls, options, _ = CHECKPOINTED[case]
    model = build(name).to(device)
    groups = [
        {"params": [p for p in model.parameters() if p.dim() > 1]},
        {"params": [p for p in model.parameters() if p.dim() <= 1], "lr": 0.005},
    ]
    optimizer = optimizer_cls(groups, **options)
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, shares(2, step)[1]).backward()
        optimizer.step()
    return state(model), optimizer.state_dict()


def _assert_same_state(ours, theirs):
    assert ours["state"].keys() == theirs["state"].keys()
    for number, values in theirs["state"].items():
        assert ours["state"][number].keys() == values.keys()
        for key, value in values.items():
            found = ours["state"][number][key]
            assert found.shape == value.shape, (number, key)
            assert torch.allclose(found, value, rtol=1e-6, atol=1e-9), (number, key)
    hyper = [{key: value for key, value in group.items() if key != "initial_lr"} for group in theirs["param_groups"]]
    assert ours["param_groups"] == hyper


@pytest.mark.parametrize("how", ["checkpoint", "full"])
@pytest.mark.parametrize("case", CHECKPOINTED)
def test_state_goes_from_two_ranks_to_four_to_one(two, four, tmp_path, case, how):
    two.run(_continue, case, tmp_path, range(2), None, how)
    four.run(_continue, case, tmp_path, range(2, 4), how, how)
    trained, full = _alone(two, case, tmp_path, range(4, 6), how)
    expected, expected_state = _undivided(case, range(6))
    assert not differing(trained, expected, relative=1e-6)
    _assert_same_state(full, expected_state)


@functools.cache
def _groups_of_one():
    return [dist.new_group([rank]) for rank in range(2)]


def _alone_on_first(process, case, path, steps, how):
    """As `_continue` at world size 1, on the first rank."""
    alone = type(process)(0, 1, process.device, _groups_of_one()[process.rank])
    if process.rank:
        return None
    return _continue(alone, case, path, steps, how, None)


def _alone(two, case, path, steps, how):
    return two.run(_alone_on_first, case, path, steps, how)[0]


def _interchange(process, theirs):
    """A plain optimizer's state dict goes into ours, and ours into a plain one."""
    ddp, optimizer = _wrap(process, "slices")
    ddp.module.load_state_dict(theirs[0])
    optimizer.load_state_dict(theirs[1])
    _same_batch_step(ddp, optimizer, 2)
    full = optimizer.full_state_dict()
    return state(ddp.module), full


def test_state_dicts_are_those_of_the_undivided_optimizer(two):
    (trained, full), (_, nothing) = two.run(_interchange, _undivided("slices", range(2)))
    assert nothing == {}
    expected, expected_state = _undivided("slices", range(3))
    assert not differing(trained, expected, relative=1e-6)
    _assert_same_state(full, expected_state)
    plain = torch.optim.AdamW(
        [
            {"params": [p for p in build("Plain").parameters() if p.dim() > 1]},
            {"params": [p for p in build("Plain").parameters() if p.dim() <= 1]},
        ]
    )
    plain.load_state_dict(full)
    _assert_same_state(plain.state_dict(), full)


def _fresh(process, path):
    """Saved before the first step, loaded, then trained: as if it had never been saved."""
    ddp, optimizer = _wrap(process, "slices")
    assert optimizer.full_state_dict().get("state", {}) == {}
    dcp.save({"optimizer": optimizer}, checkpoint_id=str(path), process_group=process.group)
    assert not optimizer.state, "saving leaves no state behind"
    dcp.load({"optimizer": optimizer}, checkpoint_id=str(path), process_group=process.group)
    for step in range(2):
        _same_batch_step(ddp, optimizer, step)
    return state(ddp.module)


def test_a_checkpoint_before_the_first_step_changes_nothing(two, tmp_path):
    for trained in two.run(_fresh, tmp_path):
        assert not differing(trained, _undivided("slices", range(2))[0], relative=1e-6)
