"""Processes of one machine that run functions together, for tests. Real runs are torchrun's.

Each worker joins one group and then waits for functions; starting costs once, not per function. Workers are forked
from a server that has imported torch (and started no threads), so a new group is up in tenths of a second. They never
outlive their parent: each watches it, and ends at once when it is gone, even in the middle of a collective.
"""

from __future__ import annotations

import gc
import multiprocessing
import multiprocessing.connection
import os
import pickle
import shutil
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import TracebackType
from typing import Any

from tests.hosts import PORT, Hosts

PRELOADED = ["torch", "torch.distributed.tensor", "torch.distributed.checkpoint", "torch.distributed.fsdp"]
PRELOADED += ["trainstep.parallel.fsdp.checkpoint", "trainstep.parallel.zero.optimizer"]
"""Imported once, by the server that workers are forked from."""

GRACE_S = 12.0
"""After the first failure, how long the other ranks may take to report theirs before they are killed: they ask each
other for 5 s first."""


class WorkerError(RuntimeError):
    """A function failed, or a worker ended, on at least one rank; the message has every rank's traceback."""

    def __init__(self, failures: dict[int, str]) -> None:
        self.failures = failures
        """Rank → traceback, or how the process ended."""
        super().__init__("\n".join(f"rank {rank}: {text}" for rank, text in sorted(failures.items())))


class Workers:
    """`world_size` processes in one group, used as a context manager.

    Args:
        world_size: how many.
        device: cpu (Gloo) or cuda (NCCL, one GPU per worker).
        backend: another than these, as torch.distributed names it.
        gpus: how many GPUs the workers share; by default each has its own.
        timeout_s: of a collective.
        limit_s: of a function; a worker that takes longer is killed and reported.
        preload: modules that the server of all workers imports besides, if it has not started yet.
        hosts: where they run, as many on each, in order; None: all on this machine itself.
    """

    def __init__(
        self,
        world_size: int,
        *,
        device: str = "cpu",
        timeout_s: float = 60.0,
        limit_s: float = 240.0,
        preload: Sequence[str] = (),
        backend: str | None = None,
        gpus: int | None = None,
        hosts: Hosts | None = None,
    ) -> None:
        self.world_size = world_size
        self._device = device
        self._backend = backend
        self._gpus = gpus or world_size
        self._timeout_s = timeout_s
        self._limit_s = limit_s
        self._preload = [*PRELOADED, *preload]
        self._hosts = hosts
        self._processes: list[BaseProcess] = []
        self._connections: list[Connection] = []
        self._folder: Path | None = None

    def run(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Call `function(process, *arguments)` on every rank; its results, by rank.

        `process` is a `trainstep.parallel.Process`. The function is one that a new process can import, its arguments
        and results can be pickled (tensors are copied). After a failure all workers are ended; the next call starts new
        ones.

        Raises:
            WorkerError: the function raised, or its process ended, on some rank.
        """
        if not self._processes:
            self._start()
        message = pickle.dumps((function, arguments))
        for connection in self._connections:
            with suppress(ConnectionError):  # a worker that is gone is found when its answer is awaited
                connection.send_bytes(message)
        results, failures = self._collect()
        if failures:
            for process in self._processes:
                process.kill()
            self.close()
            raise WorkerError(failures)
        return [results[rank] for rank in range(self.world_size)]

    def process_ids(self) -> list[int]:
        """The workers' process ids, by rank."""
        return [process.pid for process in self._processes if process.pid is not None]

    def close(self) -> None:
        """End all workers and wait until they are gone."""
        for connection in self._connections:
            connection.close()  # an idle worker leaves the group and ends
        deadline = time.monotonic() + GRACE_S
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))
        for process in self._processes:
            if process.is_alive():
                process.kill()
            process.join()
        self._processes, self._connections = [], []
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None

    def __enter__(self) -> Workers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _start(self) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(self._preload)
        self._folder = Path(tempfile.mkdtemp(prefix="trainstep-workers-"))
        meeting = f"file://{self._folder}/store" if self._hosts is None else f"tcp://{self._hosts.addresses[0]}:{PORT}"
        for rank in range(self.world_size):
            ours, theirs = context.Pipe()
            settings = {
                "rank": rank,
                "world_size": self.world_size,
                "init_method": meeting,
                "timeout_s": self._timeout_s,
                "backend": self._backend,
                "hosts": 1 if self._hosts is None else len(self._hosts.names),
            }
            arguments = (theirs, self._device, rank % self._gpus, settings, self._hosts)
            process = context.Process(target=_work, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._connections.append(ours)

    def _collect(self) -> tuple[dict[int, Any], dict[int, str]]:
        """Every rank's result or failure; ranks that stay silent are failures too."""
        results: dict[int, Any] = {}
        failures: dict[int, str] = {}
        deadline = time.monotonic() + self._limit_s
        while waiting := [rank for rank in range(self.world_size) if rank not in results and rank not in failures]:
            remaining = deadline - time.monotonic()
            ready = multiprocessing.connection.wait([self._connections[rank] for rank in waiting], max(0.0, remaining))
            for rank in waiting:
                if self._connections[rank] in ready:
                    self._receive(rank, results, failures)
                elif remaining <= 0:
                    failures[rank] = "no answer in time, killed"
                    self._processes[rank].kill()
            if failures:
                deadline = min(deadline, time.monotonic() + self._timeout_s + GRACE_S)
        return results, failures

    def _receive(self, rank: int, results: dict[int, Any], failures: dict[int, str]) -> None:
        try:
            succeeded, value = pickle.loads(self._connections[rank].recv_bytes())
        except (EOFError, ConnectionError):
            self._processes[rank].join(GRACE_S)
            failures[rank] = f"the process ended (exit code {self._processes[rank].exitcode})"
            return
        if succeeded:
            results[rank] = value
        else:
            failures[rank] = value


def _work(connection: Connection, device: str, local_rank: int, settings: dict[str, Any], hosts: Hosts | None) -> None:
    """A worker's life: join the group, run what is sent, leave when the parent closes the connection."""
    import torch

    from trainstep.parallel.process import bind_device, joined

    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(1)  # several workers share the machine
    gc.freeze()  # what was imported is no garbage, and is not to be searched for any
    try:
        if hosts is not None:
            hosts.enter(settings["rank"] * settings["hosts"] // settings["world_size"])
        with joined(bind_device(device, local_rank), **settings) as process:
            _serve(connection, process)
    except Exception:
        connection.send_bytes(pickle.dumps((False, traceback.format_exc())))


def _serve(connection: Connection, process: Any) -> None:
    while True:
        try:
            message = connection.recv_bytes()
        except (EOFError, ConnectionError):
            return
        function, arguments = pickle.loads(message)
        connection.send_bytes(pickle.dumps((True, function(process, *arguments))))


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None, "a worker has a parent"
    parent.join()
    os._exit(1)
