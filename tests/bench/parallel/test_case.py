"""Ranks divide a workload's batches among them, evenly or not at all."""

import pytest
import torch

from trainstep.base.errors import UsageError
from trainstep.bench.parallel import part_of
from trainstep.step.workload import Workload


def test_a_batch_that_does_not_divide_is_refused():
    workload = Workload(torch.nn.Linear(2, 2), [torch.ones(3, 2)], lambda out, batch: out.sum(), torch.optim.SGD)
    with pytest.raises(UsageError, match=r"\(3, 2\) cannot be divided among 2 ranks"):
        next(iter(part_of(workload, 0, 2).batches))
    assert [next(iter(part_of(workload, rank, 3).batches)).shape for rank in range(3)] == [(1, 2)] * 3
