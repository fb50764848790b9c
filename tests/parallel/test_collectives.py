"""Lists of tensors in one call, in place, whatever their layout; the record of what was called; and buckets.

A bucket: every tensor once, in order, within the limit, closed in the order in which they fill.
"""

import math
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from trainstep.measure.collectives import recorded_collectives
from trainstep.parallel.collectives import (
    MB,
    all_gather_slices,
    all_reduce_mean,
    assign_buckets,
    broadcast_from_first,
    reduce_scatter_mean,
)
from trainstep.parallel.slices import flat, slice_of


def test_flat_is_a_view_in_the_order_of_memory():
    tensor = torch.arange(24.0).view(2, 3, 4)
    for view in (tensor, tensor.permute(2, 0, 1), tensor.t() if tensor.dim() == 2 else tensor.transpose(0, 1)):
        assert torch.equal(flat(view), torch.arange(24.0))
        assert flat(view).data_ptr() == tensor.data_ptr()
    with pytest.raises(ValueError, match="does not fill its memory"):
        flat(tensor[:, ::2])
    with pytest.raises(ValueError, match="does not fill its memory"):
        flat(torch.ones(3, 1).expand(3, 4))
    assert slice_of(tensor.permute(2, 0, 1), 1, 4).tolist() == [6, 7, 8, 9, 10, 11]


CALLS = {
    "all-reduce": all_reduce_mean,
    "reduce-scatter": reduce_scatter_mean,
    "all-gather": all_gather_slices,
    "broadcast": broadcast_from_first,
}


def inputs(rank, dtype, device="cpu"):
    generator = torch.Generator().manual_seed(rank)
    whole = torch.randint(-64, 64, (2, 12), generator=generator).to(device, dtype)  # sums, quarters of these are exact
    return [whole[0].clone(), whole[1].view(3, 4).t().clone(memory_format=torch.preserve_format)]


def _all(process, dtype, lazily):
    """Results of each, and their records; `lazily`, the second rank's tensors are negatives of their memory, and go one
    by one, so that no list is packed into copies."""
    group, rank, results = process.group, process.rank, {}
    with recorded_collectives() as calls:
        for name, call in CALLS.items():
            tensors = inputs(rank, dtype, process.device)
            if lazily and rank == 1:
                tensors = [torch._neg_view(-tensor) for tensor in tensors]
            pointers = [tensor.data_ptr() for tensor in tensors]
            for each in [[tensor] for tensor in tensors] if lazily else [tensors]:
                if (work := call(each, group)) is not None:
                    work.wait()
            assert [tensor.data_ptr() for tensor in tensors] == pointers
            results[name] = [tensor.resolve_neg().cpu() for tensor in tensors]
        dist.barrier(group=group)
    results["reduce-scatter"] = [slice_of(each, rank, process.world_size) for each in results["reduce-scatter"]]
    return results, [(call.name, call.tensors, call.bytes, call.dtype) for call in calls]


def check(workers, dtype, lazily=False):
    """Compare every rank's results with sums made here; returns the recorded calls."""
    n = workers.world_size
    whole = [inputs(rank, dtype) for rank in range(n)]
    by_rank = workers.run(_all, dtype, lazily)
    for rank, (results, _) in enumerate(by_rank):
        for i in range(2):
            mean = sum(whole[each][i].double() for each in range(n)) / n
            assert torch.equal(results["all-reduce"][i], mean.to(dtype))
            assert results["all-reduce"][i].stride() == whole[0][i].stride()
            expected = flat(torch.empty_like(whole[0][i]).copy_(mean))
            assert torch.equal(results["reduce-scatter"][i], slice_of(expected, rank, n))
            slices = [slice_of(whole[each][i], each, n) for each in range(n)]
            assert torch.equal(flat(results["all-gather"][i]), torch.cat(slices))
            assert torch.equal(results["broadcast"][i], whole[0][i])
    return [calls for _, calls in by_rank]


@pytest.mark.distributed
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_each_gives_what_it_says_and_is_recorded(four, dtype):
    size = 24 * dtype.itemsize
    for calls in check(four, dtype):
        assert calls[:3] == [(name, 2, size, dtype) for name in ("all-reduce", "reduce-scatter", "all-gather")]
        assert calls[3:5] == [("broadcast", 1, size // 2, dtype)] * 2
        assert [name for name, *_ in calls[5:]] == ["barrier"]


@pytest.mark.distributed
def test_lazy_negatives_travel_by_their_values(four):
    check(four, torch.float32, lazily=True)


ITEMS = st.lists(st.tuples(st.integers(0, 3 * MB), st.sampled_from("ab")), max_size=30)


@settings(deadline=None)
@given(items=ITEMS, limit=st.sampled_from([0, 0.5, 1.0, 2.5, math.inf]))
def test_buckets_hold_everything_once_in_order_and_within_the_limit(items, limit):
    numbered = [(index, size, kind) for index, (size, kind) in enumerate(items)]
    buckets = assign_buckets(numbered, limit)
    assert sorted(index for bucket in buckets for index in bucket) == list(range(len(items)))
    for bucket in buckets:
        assert bucket == sorted(bucket)
        assert len({items[index][1] for index in bucket}) == 1, "one kind"
        assert len(bucket) == 1 or sum(items[index][0] for index in bucket[:-1]) < limit * MB, "closed when it is full"
    assert [bucket[-1] for bucket in buckets] == sorted(bucket[-1] for bucket in buckets), "in the order they fill"
    for kind in "ab":
        own = [bucket for bucket in buckets if items[bucket[0]][1] == kind]
        for one, _ in pairwise(own):
            assert sum(items[index][0] for index in one) >= limit * MB, "a bucket is closed only when it is full"


def test_the_two_ends_of_the_scale():
    items = [(index, 10, "x") for index in range(5)]
    assert assign_buckets(items, 0) == [[0], [1], [2], [3], [4]]
    assert assign_buckets(items, math.inf) == [[0, 1, 2, 3, 4]]
    assert assign_buckets([], 1.0) == []
