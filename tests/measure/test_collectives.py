"""The record of collectives: every way of calling them, by its usual name, with its payload."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn
from torch._prims.rng_prims import run_and_save_rng_state

from trainstep.measure.collectives import recorded_collectives

pytestmark = pytest.mark.distributed


def _calls(process):
    group, x = process.group, torch.ones(6)
    parts = [torch.empty(6), torch.empty(6)]
    with recorded_collectives() as calls:
        dist.all_reduce(x, group=group)
        dist.all_reduce(x, group=group, async_op=True).wait()
        dist.broadcast(x.bfloat16(), group=group, group_src=0)
        dist.all_gather(parts, x, group=group)
        dist.reduce(x, group=group, group_dst=0)
        dist.scatter(x, parts if process.rank == 0 else None, group=group, group_src=0)
        functional.all_reduce(x, "sum", group) + 1  # waits
        dist.barrier(group=group)
        if process.rank == 0:
            dist.send(x, group=group, group_dst=1)
        else:
            dist.recv(x, group=group, group_src=0)
        x + x  # nothing to do with other ranks
    outside = len(calls)
    dist.all_reduce(x, group=group)
    assert len(calls) == outside, "what comes after the block is not recorded"
    return [(call.name, call.tensors, call.bytes, call.dtype) for call in calls]


def test_every_call_is_recorded_by_its_usual_name(two):
    for rank, calls in enumerate(two.run(_calls)):
        assert calls[:4] == [
            ("all-reduce", 1, 24, torch.float32),
            ("all-reduce", 1, 24, torch.float32),
            ("broadcast", 1, 12, torch.bfloat16),
            ("all-gather", 2, 48, torch.float32),
        ]
        assert [name for name, *_ in calls[4:]] == [
            "reduce", "scatter", "all-reduce", "barrier", "send" if rank == 0 else "receive"
        ]  # fmt: skip
        assert calls[6] == ("all-reduce", 1, 24, torch.float32)


def _in_backward(process):
    model = nn.Linear(3, 3)
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: dist.all_reduce(p.grad, group=process.group))
    with recorded_collectives() as calls:
        model(torch.ones(2, 3)).sum().backward()
    return sorted(call.bytes for call in calls)


def test_calls_in_backward_are_recorded(two):
    assert two.run(_in_backward) == [[12, 36]] * 2


def test_operators_that_hold_others_as_compiled_code_has_them_run_as_they_are():
    with recorded_collectives() as calls:
        _, drawn = run_and_save_rng_state(torch.ops.aten.rand.default, [3], device=torch.device("cpu"))
    assert drawn.shape == (3,)
    assert calls == []
