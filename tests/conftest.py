"""Markers: tests that need a GPU, Slurm or hosts are skipped with the reason where there is none. Workers, clusters."""

import gc
import importlib
import signal
from collections.abc import Iterator

import pytest
import torch

from tests import hosts
from tests import slurm as slurm_cluster
from tests.workers import Workers


def pytest_configure() -> None:
    """A shell that starts a run in its background hands it an ignored Ctrl-C, and `nohup` an ignored SIGHUP. So would
    every command that tests start and interrupt."""
    for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reasons = {}
    if not torch.cuda.is_available():
        reasons["gpu"] = "needs an NVIDIA GPU, and torch finds none"
    if slurm_cluster.MISSING:
        reasons["slurm"] = f"needs Slurm (Debian's slurm-wlm), and there is no {' and no '.join(slurm_cluster.MISSING)}"
    if any("hosts" in item.keywords for item in items) and (reason := hosts.missing()):
        reasons["hosts"] = reason
    for item in items:
        for marker, reason in reasons.items():
            if marker in item.keywords:
                item.add_marker(pytest.mark.skip(reason=reason))


def pytest_collection_finish(session: pytest.Session) -> None:
    """What a whole run imports is left out of every search for garbage, which took a third of the judges' tests."""
    if hasattr(session.config, "workerinput"):  # a process of `pytest -n`
        importlib.import_module("torch._inductor.compile_fx")
        gc.collect()
        gc.freeze()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """So is what a file's tests have imported and left behind, such as libraries and caches."""
    if hasattr(item.config, "workerinput") and (nextitem is None or nextitem.path != item.path):
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


@pytest.fixture(scope="session")
def slurm_node(tmp_path_factory):
    """A cluster of this machine alone."""
    with slurm_cluster.Cluster(tmp_path_factory.mktemp("slurm")) as cluster:
        yield cluster


@pytest.fixture
def slurm(slurm_node, monkeypatch):
    """The same, as this process's Slurm, without a job from before."""
    for name, value in slurm_node.environment.items():
        monkeypatch.setenv(name, value)
    yield slurm_node
    slurm_node.clear()


@pytest.fixture(scope="module")
def small_pool() -> Iterator[None]:
    """Fewer random roundings are drawn ahead: checks of tiny models take as long as their random numbers."""
    from trainstep.check import rounding

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rounding, "_POOL", 2**17)
        yield
