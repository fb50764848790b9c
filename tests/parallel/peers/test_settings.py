"""Peers have the settings that their files say, where those hold."""

import dataclasses

import pytest
import torch
from torch import nn

from trainstep.base.config import StepConfig
from trainstep.base.errors import UnsupportedError
from trainstep.base.schemes import SCHEMES
from trainstep.measure.collectives import recorded_collectives
from trainstep.parallel.peers.fsdp2 import shard_fully
from trainstep.parallel.replicas import build, full_parameters


class Net(nn.Module):
    """Four blocks, a buffer, and two parameters of a megabyte each."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(16, 16) for _ in range(4)])
        self.register_buffer("table", torch.ones(16))
        self.wide = nn.ParameterList([nn.Parameter(torch.zeros(2**18)) for _ in range(2)])

    def forward(self, x):
        for block in self.blocks:
            x = block(x) * self.table
        return x.sum() + sum(each.sum() for each in self.wide)


def _built(process, scheme, *, allow_unused=False, precision="fp32"):
    torch.manual_seed(0)
    net = Net()
    config = StepConfig(device="cpu", precision=precision)
    return build(
        SCHEMES[scheme], process, config, net, lambda own: torch.optim.AdamW(list(own)), allow_unused=allow_unused
    )


def _step(replica):
    with recorded_collectives() as calls:
        replica.module(torch.ones(2, 16)).backward()
        replica.optimizer.step()
        replica.optimizer.zero_grad()
    return [call.name for call in calls]


def _ddp(process):
    found = {}
    for scheme in ("torch-ddp-1", "torch-ddp-1000"):
        replica = _built(process, scheme)
        steps = [_step(replica) for _ in range(5)]  # buckets are rebuilt in the third, where the graph is static
        module = replica.module
        views = [each.grad is None for each in module.parameters()]
        found[scheme] = (module.static_graph, module.find_unused_parameters, steps[-1], all(views))
    module = _built(process, "torch-ddp", allow_unused=True).module
    return found, (module.static_graph, module.find_unused_parameters, module.gradient_as_bucket_view)


@pytest.mark.distributed
def test_ddp_broadcasts_no_buffers_knows_a_static_graph_and_fills_buckets_of_the_size_asked_for(two):
    found, unused = two.run(_ddp)[0]
    assert found["torch-ddp-1"] == (True, False, ["all-reduce"] * 3, True), "two of a megabyte, and the rest"
    assert found["torch-ddp-1000"] == (True, False, ["all-reduce"], True)
    assert unused == (False, True, True), "its graph may change"


def _zero(process):
    replica = _built(process, "torch-zero")
    calls = [_step(replica) for _ in range(5)][-1]
    parameters = [each for group in replica.optimizer.param_groups for each in group["params"]]
    return calls, len({each.data.untyped_storage().data_ptr() for each in parameters}), len(parameters)


@pytest.mark.distributed
def test_zero_broadcasts_what_each_rank_updates_in_one_call(two):
    calls, storages, parameters = two.run(_zero)[0]
    assert calls.count("broadcast") == 2, "from each of two ranks"
    assert (storages, parameters) == (2, 10), "parameters are views of two buffers"


def _ahead(module):
    """Each block's group, by its first block; the policy; groups that are gathered ahead in forward and backward."""
    states = [block._get_fsdp_state() for block in module.blocks]
    ahead = [[states.index(each) for each in state._states_to_forward_prefetch] for state in states]
    behind = [[states.index(each) for each in state._states_to_backward_prefetch] for state in states]
    return [states.index(each) for each in states], states[0]._mp_policy, ahead, behind


def _fsdp2_by_blocks(process):
    scheme = dataclasses.replace(SCHEMES["torch-fsdp2"], blocks_per_group=3)
    net = Net()
    build(scheme, process, StepConfig(device="cpu"), net, lambda own: torch.optim.SGD(own, 0.01))
    groups, _, ahead, _ = _ahead(net)
    return groups, [ahead[0], ahead[3]]


@pytest.mark.distributed
def test_fsdp2_takes_several_blocks_as_one_and_prefetches_the_next_such(two):
    assert two.run(_fsdp2_by_blocks)[0] == ([0, 0, 0, 3], [[3], []])


def _fsdp2(process):
    found = []
    for scheme, allow_unused in (("torch-fsdp2", False), ("torch-fsdp2-bf16-reduce", False), ("torch-fsdp2", True)):
        module = _built(process, scheme, allow_unused=allow_unused, precision="bf16").module
        _, policy, ahead, behind = _ahead(module)
        found.append((ahead, behind, str(policy.param_dtype), str(policy.reduce_dtype)))
    return found


@pytest.mark.distributed
def test_fsdp2_prefetches_two_blocks_and_reduces_as_its_row_says(two):
    wide, narrow, unordered = two.run(_fsdp2)[0]
    assert wide[0] == [[1, 2], [2, 3], [3], []]
    assert wide[1] == [[], [0], [1, 0], [2, 1]]
    assert wide[2:] == ("torch.bfloat16", "torch.float32")
    assert (narrow[:2], narrow[2:]) == (wide[:2], ("torch.bfloat16", "None"))
    assert unordered[:2] == ([[], [], [], []], [[], [], [], []])


def _compiled(process, scheme):
    """Parameters after four steps, eager and with its blocks compiled first, as a step compiles them."""
    found = []
    for backend in (None, "aot_eager"):
        torch.manual_seed(0)
        net = Net()
        if backend is not None:
            for block in net.blocks:
                block.compile(backend=backend)
        replica = build(SCHEMES[scheme], process, StepConfig(device="cpu"), net, lambda own: torch.optim.SGD(own, 0.01))
        for _ in range(4):
            replica.module(torch.full((2, 16), 1.0 + process.rank)).backward()
            replica.optimizer.step()
            replica.optimizer.zero_grad()
        found.append({name: value.clone() for name, value in full_parameters(replica, net)})
    torch.compiler.reset()
    return found


def test_what_fsdp2_cannot_shard_is_unsupported_not_a_failure():
    module = nn.Linear(2, 2)
    module.register_parameter("logit_scale", nn.Parameter(torch.tensor(1.0)))
    with pytest.raises(UnsupportedError, match="takes no parameter without dimensions, such as logit_scale"):
        shard_fully(module, None, None, [], narrow_reduce=False, fixed_order=True)


@pytest.mark.distributed
@pytest.mark.parametrize("scheme", ["torch-ddp-1", "torch-zero", "torch-fsdp2"])
def test_compiled_blocks_train_as_eager_ones(two, scheme):
    eager, compiled = two.run(_compiled, scheme)[0]
    torch.testing.assert_close(compiled, eager)
    torch.manual_seed(0)
    assert not torch.equal(eager["blocks.0.weight"], Net().blocks[0].weight), "they moved"
