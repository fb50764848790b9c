"""Checkpoints and state dicts of torch's FSDP2: ours loads theirs, theirs loads ours, and training goes on alike."""

from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from tests.parallel.fsdp.training import assert_same, error, take_steps
from tests.parallel.meshes import mesh_of
from tests.parallel.nets import OPTIMIZERS, build
from trainstep.parallel import FullyShardedDataParallel, load_checkpoint, save_checkpoint
from trainstep.parallel.fsdp.shards import ShardedParameter

pytestmark = pytest.mark.distributed


def _mesh(process, replicas):
    return mesh_of(*([] if replicas == 1 else [replicas]), process.world_size // replicas)


def _ours(process, replicas, seed):
    module = FullyShardedDataParallel(build(seed=seed), mesh=_mesh(process, replicas))
    return module, OPTIMIZERS["adamw"](module.parameters())


def _theirs(process, replicas, seed):
    module, mesh = build(seed=seed), _mesh(process, replicas)
    for part in (*module.blocks, module):
        fully_shard(part, mesh=mesh)
    return module, OPTIMIZERS["adamw"](module.parameters())


def _full(module):
    if isinstance(module, FullyShardedDataParallel):
        return module.gather_full_parameters()
    return {name: parameter.full_tensor().detach() for name, parameter in module.named_parameters()}


def _save(process, replicas, folder):
    """Both after two steps, and what they are after a third."""
    found = {}
    for name, make in (("ours", _ours), ("theirs", _theirs)):
        module, optimizer = make(process, replicas, seed=0)
        take_steps(process, module, optimizer, (0, 1))
        if name == "ours":
            save_checkpoint(folder / name, module, optimizer)
        else:
            weights, state = get_state_dict(module, optimizer)
            dcp.save({"model": weights, "optimizer": state}, checkpoint_id=str(folder / name))
        saved = _full(module)
        take_steps(process, module, optimizer, (2,))
        found[name] = saved, _full(module)
    return found


def _load(process, replicas, folder):
    """Ours from theirs, and theirs from ours; and each after a third step."""
    ours, optimizer = _ours(process, replicas, seed=3)
    load_checkpoint(folder / "theirs", ours, optimizer)
    found = {"theirs": [_full(ours)]}
    take_steps(process, ours, optimizer, (2,))
    found["theirs"].append(_full(ours))
    theirs, optimizer = _theirs(process, replicas, seed=4)
    weights, state = get_state_dict(theirs, optimizer)
    dcp.load({"model": weights, "optimizer": state}, checkpoint_id=str(folder / "ours"))
    set_state_dict(theirs, optimizer, model_state_dict=weights, optim_state_dict=state)
    found["ours"] = [_full(theirs)]
    take_steps(process, theirs, optimizer, (2,))
    found["ours"].append(_full(theirs))
    return found


@pytest.mark.filterwarnings("ignore:.*has no checksums.json")
@pytest.mark.parametrize("replicas", [1, 2])
def test_each_loads_what_the_other_wrote_on_other_numbers_of_ranks(two, four, tmp_path, replicas):
    by_two = two.run(_save, 1, tmp_path)[0]
    on = {1: two, 2: four}[replicas]
    for found in on.run(_load, replicas, tmp_path):
        for name, (saved, after) in by_two.items():
            loaded, went_on = found[name]
            assert_same(loaded, saved, name)
            assert error(went_on, after) < 1e-6, "the optimizer's state too"
            assert error(went_on, saved) > 1e-3


def _in_memory(process, replicas):
    """Each from the other's state dict, and ours from that of another mesh, beside what was to be loaded."""
    found = []
    pairs = [(_theirs, _ours), (_ours, _theirs)]
    if replicas > 1:
        pairs += [(lambda process, _, seed: _ours(process, 1, seed), _ours)]
        pairs += [(_ours, lambda process, _, seed: _ours(process, 1, seed))]
    for one, other in pairs:
        (source, _), (target, _) = one(process, replicas, seed=1), other(process, replicas, seed=2)
        expected = _full(source)
        target.load_state_dict(source.state_dict())
        found.append((_full(target), expected))
    kinds = {name: type(value) for name, value in _ours(process, replicas, 0)[0].state_dict().items()}
    return found, kinds


@pytest.mark.parametrize("replicas", [1, 2])
def test_state_dicts_are_the_others(two, four, replicas):
    for found, kinds in {1: two, 2: four}[replicas].run(_in_memory, replicas):
        for values, expected in found:
            assert_same(values, expected)
        assert {kind for name, kind in kinds.items() if name != "scale"} == {DTensor}, "what is replicated, too"


def _order_of_loads(process):
    """Ranks load in one order, whatever order each one's sets have: what a DTensor needs is collective."""
    sharded, _ = _ours(process, 1, seed=0)
    given = sharded.state_dict()
    load = mock.patch.object(ShardedParameter, "load", autospec=True, side_effect=ShardedParameter.load)
    with load as noted:
        sharded.load_state_dict(dict(reversed(given.items())) if process.rank else given)
    return [call.args[0].name for call in noted.call_args_list]


def test_ranks_load_parameters_in_one_order(two):
    names = [name for name, _ in build().named_parameters()]
    assert two.run(_order_of_loads) == [names] * 2


def _scalar(process):
    module = torch.nn.Linear(3, 3)
    module.gain = torch.nn.Parameter(torch.tensor(2.0))
    sharded = FullyShardedDataParallel(module)
    sharded.load_state_dict(sharded.state_dict() | {"gain": torch.tensor(5.0)})
    return sharded.gather_full_parameters()["gain"].item()


def test_a_parameter_without_dimensions_takes_a_plain_tensor(two):
    assert two.run(_scalar) == [5.0] * 2
