"""Checks of tiny models take as long as their random numbers: a smaller pool of them is enough."""

from collections.abc import Iterator

import pytest

from trainstep.check import rounding


@pytest.fixture(scope="module")
def small_pool() -> Iterator[None]:
    """Fewer random roundings are drawn ahead."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rounding, "_POOL", 2**17)
        yield
