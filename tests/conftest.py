"""Markers: tests that need a GPU are skipped with the reason where there is none."""

import pytest
import torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs an NVIDIA GPU, and torch finds none")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)
