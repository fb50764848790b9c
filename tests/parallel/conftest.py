"""Distributed tests compare to the bit."""

import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread():
    """As in the workers: the number of threads changes the order of sums, and so their last bits."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
