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
        _message(setattr, weight, "data", torch.ones(23, 12)),
    ]
    return fit, all(torch.equal(after[name], 0.5 * before[name]) for name in before), messages


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_data_is_this_ranks_rows_as_the_gradient_is(two, dtype):
    """CS336's tests of FSDP read it so; elementwise changes of it are changes of the parameter, on all ranks alike."""
    for fit, is_halved, (norm, product, replaced) in two.run(_data, dtype):
        assert all(fit)
        assert len(fit) > 5
        assert is_halved
        assert norm.startswith("norm of a sharded parameter's data: a rank has only its rows of it")
        assert "gather_full_parameters() of FullyShardedDataParallel; for this rank's rows as they are, data" in norm
        assert product.startswith("matmul of a sharded parameter's data")
        assert replaced.startswith("data of head.weight, which is sharded")


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
