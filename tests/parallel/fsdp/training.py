"""A small model trained under FSDP, and how what comes out is held against training in one process."""

import contextlib
from unittest import mock

import torch

from tests.parallel.meshes import mesh_of
from tests.parallel.nets import OPTIMIZERS, batch, build, loss_of
from trainstep.parallel import FullyShardedDataParallel
from trainstep.parallel.fsdp.group import GatherGroup

CASES = {
    "plain": ({}, "sgd", None),
    "adamw": ({}, "adamw", None),
    "tied": ({"tied": True}, "adamw", None),
    "frozen": ({"frozen": True}, "adamw", None),
    "unused": ({"unused": True}, "adamw", None),
    "bfloat16": ({}, "adamw", torch.bfloat16),
    "float16": ({"tied": True, "unused": True}, "sgd", torch.float16),
    "float64": ({"frozen": True}, "sgd", torch.float64),
}


def descend(module, losses, optimizer=None):
    """Make a step of each loss of an iterator, which computes it then; the full parameters of a sharded module."""
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1) if optimizer is None else optimizer
    for loss in losses:
        loss.backward()
        if isinstance(module, FullyShardedDataParallel):
            module.finish_gradient_synchronization()
        optimizer.step()
        optimizer.zero_grad()
    return module.gather_full_parameters() if isinstance(module, FullyShardedDataParallel) else None


def take_steps(process, module, optimizer, steps):
    """Steps of these numbers on this rank's shares."""
    shares = (batch(step).chunk(process.world_size)[process.rank] for step in steps)
    return descend(module, (loss_of(module, share) for share in shares), optimizer)


def sharded_net(options, dtype=None, shape=None, **settings):
    """A net of these options, over all ranks or a mesh of this shape."""
    mesh = None if shape is None else mesh_of(*shape)
    return FullyShardedDataParallel(build(**options), compute_dtype=dtype, mesh=mesh, **settings)


def train(process, options, how, steps, dtype=None, prepare=None, **settings):
    """Parameters after some steps; `prepare` changes the module once it is sharded."""
    sharded = sharded_net(options, dtype, **settings)
    if prepare is not None:
        prepare(sharded.module)
    return take_steps(process, sharded, OPTIMIZERS[how](sharded.parameters()), range(steps))


def gradients_of(sharded):
    """Name → (this rank's rows, their gradient)."""
    found = {}
    for parameter in sharded.sharded_parameters():
        gradient, rows = parameter.shard.grad, parameter.rows or slice(None)
        found[parameter.name] = rows, None if gradient is None else gradient.clone()
    return found


def gradients_beside(sharded, plain):
    """(this rank's gradient, the same rows of the plain module's), of each parameter that has one there; the others
    have none here either."""
    for parameter in sharded.sharded_parameters():
        own, whole = parameter.shard.grad, plain.get_parameter(parameter.name).grad
        if whole is None:
            assert own is None
        else:
            yield own, whole if parameter.rows is None else whole[parameter.rows]


def train_cases(process, cases):
    return [train(process, options, how, 4, dtype) for options, how, dtype in cases]


@contextlib.contextmanager
def poisoned(device):
    """Gathered memory starts as NaN, so that a read before its time shows."""
    original = GatherGroup._copy_own

    def copy_own(group):
        torch.empty(0, dtype=torch.uint8, device=device).set_(group._storage).fill_(255)  # NaN in every dtype
        original(group)

    with mock.patch.object(GatherGroup, "_copy_own", copy_own):
        yield


def assert_same(found, expected, case=""):
    assert found.keys() >= expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype
        assert torch.equal(found[name], value), f"{case}: {name} differs by {(found[name] - value).abs().max():.2e}"


def error(found, expected):
    """‖found − expected‖ / ‖expected‖ over all parameters, in float64."""
    total = sum((found[name].double() - value.double()).square().sum() for name, value in expected.items())
    return (total / sum(value.double().square().sum() for value in expected.values())).sqrt().item()


def in_turn(terms):
    """The terms added up one by one."""
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    return total
