"""What stands in the module for a sharded parameter, as code outside of the wrapper meets it."""

import pytest
import torch

from tests.parallel.nets import batch, build, loss_of
from trainstep.base.errors import UsageError
from trainstep.parallel import FullyShardedDataParallel

pytestmark = pytest.mark.distributed


def _message(attempt, *arguments):
    with pytest.raises(UsageError) as caught:
        attempt(*arguments)
    return str(caught.value)


def _data(process, dtype):
    sharded = FullyShardedDataParallel(build(), compute_dtype=dtype)
    loss_of(sharded, batch(0).chunk(2)[process.rank]).backward()
    sharded.finish_gradient_synchronization()
    fit, before = [], sharded.gather_full_parameters()
    for parameter in sharded.module.parameters():
        fit.append(
            parameter.grad is None
            or (parameter.grad.shape, parameter.grad.dtype) == (parameter.data.shape, parameter.data.dtype)
        )
        parameter.data.mul_(0.5)
    after = sharded.gather_full_parameters()
    weight = sharded.module.head.weight
    messages = [
        _message(lambda: weight.data.norm()),
        _message(lambda: weight.data @ torch.ones(12)),
        _message(setattr, weight, "data", torch.ones(23, 1)),
    ]
    return fit, all(torch.equal(after[name], 0.5 * before[name]) for name in before), messages


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_data_is_this_ranks_rows_as_the_gradient_is(two, dtype):
    """CS336's tests of FSDP read it so; elementwise changes of it are changes of the parameter, on all ranks alike."""
    for fit, is_halved, (norm, product, replaced) in two.run(_data, dtype):
        assert all(fit)
        assert len(fit) > 5
        assert is_halved
        assert norm.startswith("norm of a sharded parameter's values: a rank has only its rows of it")
        assert "Compute with the whole, from gather_full_parameters() of FullyShardedDataParallel" in norm
        assert product.startswith("matmul of a sharded parameter's values")
        assert replaced.startswith("data of head.weight, which is sharded was set to shape (23, 1); expected shape")


def _data_in_forward(process):
    net = build()
    sharded = FullyShardedDataParallel(net)
    messages = []
    net.register_forward_hook(lambda *_: messages.append(_message(lambda: net.head.weight.data)))
    loss_of(sharded, batch(0).chunk(2)[process.rank])
    return messages


def test_data_is_refused_where_the_whole_may_be_meant(two):
    for (message,) in two.run(_data_in_forward):
        assert message.startswith("data of head.weight, which is sharded: what is changed outside of its module's")


KEPT = {
    "to(device)": lambda m: m.to("cpu"),
    "to(dtype)": lambda m: m.to(torch.float32),
    "cpu": lambda m: m.cpu(),
    "float": lambda m: m.float(),
    "type": lambda m: m.type(torch.float32),
    "to, by keywords": lambda m: m.to(device=torch.device("cpu"), dtype=torch.float32, non_blocking=True),
}
MOVED = {
    "half": lambda m: m.half(),
    "to(dtype)": lambda m: m.to(torch.bfloat16),
    "double": lambda m: m.double(),
    "to(device)": lambda m: m.to("meta"),
    "type": lambda m: m.type(torch.float16),
    "to_empty": lambda m: m.to_empty(device="cpu"),
}


def _moved(process, dtype):
    """What calls that move or cast do to the wrapper, the module in it and a block, with gradients there."""
    sharded = FullyShardedDataParallel(build(), compute_dtype=dtype)
    loss_of(sharded, batch(0).chunk(2)[process.rank]).backward()
    sharded.finish_gradient_synchronization()
    places = (sharded, sharded.module, sharded.module.blocks[0])

    def state():
        values = [each for p in sharded.sharded_parameters() for each in (p.shard, p.shard.grad)]
        return [each.detach().clone() for each in (*values, sharded.module.scale)]

    before = state()
    for change in KEPT.values():
        assert all(change(place) is place for place in places)
    for one, other in zip(before, state(), strict=True):
        assert torch.equal(one, other)
    return [_message(change, place) for change in MOVED.values() for place in places]


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_moves_and_casts_that_change_nothing_do_nothing_and_others_raise(two, dtype):
    for messages in two.run(_moved, dtype):
        assert set(messages) == {
            "a sharded module was moved or cast; give FullyShardedDataParallel device= or compute_dtype= instead"
        }
