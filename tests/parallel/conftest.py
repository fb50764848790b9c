"""Worker pools for the distributed tests: started once per test process, shared by all modules."""

import pytest

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
