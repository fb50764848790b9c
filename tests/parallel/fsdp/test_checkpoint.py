"""Sharded checkpoints: written by two ranks, read by four, by one and by a plain model."""

import warnings
from functools import partial

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.tensor import DTensor

from tests.parallel.fsdp.training import take_steps
from tests.parallel.meshes import mesh_of
from tests.parallel.mistakes import check, told
from tests.parallel.nets import OPTIMIZERS, batch, build, loss_of
from tests.workers import WorkerError, Workers
from trainstep.base.errors import UsageError
from trainstep.parallel import FullyShardedDataParallel, load_checkpoint, save_checkpoint

pytestmark = pytest.mark.distributed

OPTIONS = {"tied": True, "frozen": False, "unused": True}


def _grouped(parameters):
    """Two parameter groups, as people make them: decay for matrices only. Shards keep their dimensions."""
    parameters = list(parameters)
    return torch.optim.AdamW(
        [
            {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": 0.1},
            {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0, "lr": 0.02},
        ],
        lr=0.01,
    )


class Counting(nn.Linear):
    """Has state beside its tensors, of each kind."""

    def __init__(self, kind):
        super().__init__(4, 4)
        self.extra = kind

    def get_extra_state(self):
        return self.extra

    def set_extra_state(self, state):
        self.extra = state


def _extra_states(process, folder):
    saved = [{"calls": 7, "seen": torch.tensor([7.0])}, torch.tensor([7.0]), 7]
    fresh = [{"calls": 0, "seen": torch.tensor([0.0])}, torch.tensor([0.0]), 0]
    first = FullyShardedDataParallel(nn.Sequential(*map(Counting, saved)))
    found = []
    for number in range(2):
        second = FullyShardedDataParallel(nn.Sequential(*map(Counting, fresh)))
        if number == 0:
            second.load_state_dict(first.state_dict())
        else:
            save_checkpoint(folder, first)
            load_checkpoint(folder, second)
        found.append([inner.extra for inner in second.module])
    plain = FullyShardedDataParallel(nn.Sequential(*(nn.Linear(4, 4) for _ in fresh)))
    save_checkpoint(folder / "plain", plain)
    with pytest.raises(UsageError, match=r"holds another model: it has no 0\._extra_state"):
        load_checkpoint(folder / "plain", second)
    return [[repr(each) for each in extras] for extras in (saved, *found)]


def test_extra_states_come_back(two, tmp_path):
    for saved, *found in two.run(_extra_states, tmp_path / "saved"):
        assert found == [saved, saved]


def _full_state(sharded, optimizer):
    """Parameters, and the optimizer's state by parameter name, in full."""
    state = {}
    for handle, values in optimizer.state.items():
        for key, value in values.items():
            if value.shape == handle.plain.shape and handle.rows is not None:
                saved = sharded.state_dict()[handle.parameter_name]
                settings = {"shape": saved.shape, "stride": saved.stride()}
                value = DTensor.from_local(value, saved.device_mesh, saved.placements, **settings).full_tensor()
            state[f"{handle.parameter_name}.{key}"] = value.clone()
    return sharded.gather_full_parameters(), state, [group["lr"] for group in optimizer.param_groups]


def _sharded(process, replicas, seed=0):
    """Over all ranks, or with so many replicas."""
    mesh = mesh_of(replicas, process.world_size // replicas) if replicas > 1 else None
    return FullyShardedDataParallel(build(seed=seed, **OPTIONS), mesh=mesh)


def _save(process, folder, replicas=1):
    sharded = _sharded(process, replicas)
    optimizer = _grouped(sharded.parameters())
    take_steps(process, sharded, optimizer, (0, 1))
    optimizer.param_groups[1]["lr"] = 0.005
    save_checkpoint(folder, sharded, optimizer)
    saved = _full_state(sharded, optimizer)
    return saved, take_steps(process, sharded, optimizer, (2, 3))


def _load(process, folder, resume, save_to=None, replicas=1):
    sharded = _sharded(process, replicas, seed=7)
    optimizer = _grouped(sharded.parameters())
    load_checkpoint(folder, sharded, optimizer)
    loaded = _full_state(sharded, optimizer)
    if save_to is not None:
        save_checkpoint(save_to, sharded, optimizer)
    return loaded, take_steps(process, sharded, optimizer, range(2, 2 + resume))


def assert_same_state(found, expected):
    for ours, theirs in zip(found[:2], expected[:2], strict=True):
        assert ours.keys() == theirs.keys()
        assert ours
        for name in ours:
            assert torch.equal(ours[name], theirs[name]), name
    assert found[2] == expected[2]


def test_checkpoints_go_between_replicas_other_numbers_of_ranks_and_a_plain_model(two, four, tmp_path):
    """Replicas write each shard once; other numbers of ranks read it, and what others wrote is read by each replica."""
    (saved, continued), *others = four.run(_save, tmp_path / "hybrid", 2)
    by_two, _ = two.run(_load, tmp_path / "hybrid", 0, tmp_path / "two")[1]
    by_four, _ = four.run(_load, tmp_path / "two", 0, tmp_path / "four")[3]
    with Workers(1) as one:
        by_one, _ = one.run(_load, tmp_path / "four", 0)[0]
    again, resumed = zip(*four.run(_load, tmp_path / "two", 2, None, 2), strict=True)
    for found in (*(other for other, _ in others), by_two, by_four, by_one, *again):
        assert_same_state(found, saved)
    for found in resumed:
        assert all(torch.equal(found[name], continued[name]) for name in continued), "resumed as if never stopped"
    written = {
        each: sum(path.stat().st_size for path in (tmp_path / each).glob("*.distcp")) for each in ("hybrid", "two")
    }
    assert written["hybrid"] < 1.5 * written["two"]
    for folder in ("hybrid", "four"):
        plain = build(seed=9, **OPTIONS)
        dcp.load({"model": plain.state_dict()}, checkpoint_id=str(tmp_path / folder), no_dist=True)
        assert all(torch.equal(parameter, saved[0][name]) for name, parameter in plain.named_parameters())
        assert plain.head.weight is plain.embedding.weight


def _state_dicts(process):
    """Through memory: from a plain model, and from another sharded one."""
    plain = build(seed=5, **OPTIONS)
    plain.scale.fill_(3.0)
    sharded = FullyShardedDataParallel(build(**OPTIONS), compute_dtype=torch.bfloat16)
    loss_of(sharded, batch(0))  # the last groups are gathered now
    sharded.load_state_dict(plain.state_dict())
    first = sharded.gather_full_parameters()
    other = FullyShardedDataParallel(build(**OPTIONS))
    other.load_state_dict(sharded.state_dict())
    with torch.no_grad():
        same = torch.equal(other(batch(1)[:, :-1]), plain(batch(1)[:, :-1]))
    equal = all(torch.equal(first[name], value) for name, value in plain.named_parameters())
    wrongs = {
        "the state does not fit: missing are none; unknown are extra": {"extra": torch.zeros(1)},
        "head.weight has shape (2, 2); expected (23, 12)": {"head.weight": torch.zeros(2, 2)},
    }
    load = {said: partial(sharded.load_state_dict, plain.state_dict() | wrong) for said, wrong in wrongs.items()}
    return equal, same, list(sharded.state_dict()) == list(plain.state_dict()), told(load)


def test_state_dicts(two):
    for *right, messages in two.run(_state_dicts):
        assert right == [True, True, True]
        check([messages])


def _misuse(process, folder):
    sharded = FullyShardedDataParallel(build(**OPTIONS))
    optimizer = _grouped(sharded.parameters())
    save_checkpoint(folder / "no-optimizer", sharded)
    take_steps(process, sharded, optimizer, (0,))
    save_checkpoint(folder / "grouped", sharded, optimizer)
    foreign = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=1.0)
    ungrouped = OPTIMIZERS["adamw"](sharded.parameters())
    return told(
        {
            "holds no checkpoint": lambda: load_checkpoint(folder / "nothing", sharded),
            "holds no optimizer's state": lambda: load_checkpoint(folder / "no-optimizer", sharded, optimizer),
            "has 2 parameter groups of [14, 19] parameters, this one 1 of [33]": lambda: load_checkpoint(
                folder / "grouped", sharded, ungrouped
            ),
            "not this module's": lambda: save_checkpoint(folder / "foreign", sharded, foreign),
        }
    )


def test_checkpoints_that_do_not_fit(two, tmp_path):
    check(two.run(_misuse, tmp_path))


def _load_damaged(process, folder):
    sharded = FullyShardedDataParallel(build(**OPTIONS))
    path = folder / "__1_0.distcp"
    if process.rank == 0:
        content = path.read_bytes()
        path.write_bytes(content[:-900] + bytes([content[-900] ^ 4]) + content[-899:])
    with pytest.raises(UsageError) as damaged:
        load_checkpoint(folder, sharded)
    if process.rank == 0:
        (folder / "checksums.json").unlink()  # as of an earlier version
    process.group.barrier().wait()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        load_checkpoint(folder, sharded)
    return str(damaged.value), [str(each.message) for each in said if "checksums" in str(each.message)]


def test_a_flipped_bit_is_noticed_and_a_checkpoint_without_checksums_is_said(two, tmp_path):
    two.run(_save, tmp_path / "two")
    (damaged, said), (elsewhere, nothing) = two.run(_load_damaged, tmp_path / "two")
    assert "is damaged: the content of __1_0.distcp is not what was written" in damaged
    assert elsewhere == damaged
    assert len(said) == 1
    assert "has no checksums.json, so damage to it goes unnoticed" in said[0]
    assert nothing == [], "one rank says it"


def _other_model(process, folder):
    load_checkpoint(folder, FullyShardedDataParallel(build(width=16)))


def test_a_checkpoint_of_another_model(two, tmp_path):
    two.run(_save, tmp_path / "two")
    with pytest.raises(WorkerError, match=r"its position has shape \(8, 12\), this one's \(8, 16\)"):
        two.run(_other_model, tmp_path / "two")
