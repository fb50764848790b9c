"""Worker pools for the distributed tests: started once per test process, shared by all modules."""

import pytest
import torch

from trainstep.parallel.workers import Workers


@pytest.fixture(scope="session")
def two():
    """Two Gloo workers: `two.run(function, *arguments)` calls `function(process, *arguments)` on both."""
    with Workers(2) as workers:
        yield workers


@pytest.fixture(scope="session")
def four():
    """Four Gloo workers."""
    with Workers(4) as workers:
        yield workers


@pytest.fixture(autouse=True)
def one_thread():
    """As in the workers: the number of threads changes the order of sums, and so their last bits."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
