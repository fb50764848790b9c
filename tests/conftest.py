"""Markers: tests that need a GPU are skipped with the reason where there is none. Workers for distributed tests."""

import gc
import importlib

import pytest
import torch

from tests.workers import Workers


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs an NVIDIA GPU, and torch finds none")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


def pytest_collection_finish(session: pytest.Session) -> None:
    """What a whole run imports is left out of every search for garbage, which took a third of the judges' tests."""
    if hasattr(session.config, "workerinput"):  # a process of `pytest -n`
        importlib.import_module("torch._inductor.compile_fx")
        gc.collect()
        gc.freeze()


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
