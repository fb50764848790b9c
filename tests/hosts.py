"""Hosts for tests: network namespaces of this machine, each with a name and a network card, joined by a switch.

The switch is a bridge in a namespace of its own, so no interface, route or firewall of the machine is touched. A cable
is pulled by taking down the switch's end; a host that is killed has its cable pulled first, as when power fails: nobody
is told. Needs root and iproute2.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from torch.distributed.run import get_args_parser

PORT = 29400
FOLDER = Path("/run/netns")
CARD = "eth0"
_NAME = re.compile(r"trainstep-(\d+)-\d+-(?:switch|\w)")
_FORBIDDEN = re.compile("not permitted|Permission denied|not supported|Unknown device type|kind is unknown")
_NEW_UTS = 0x04000000


def ip(*words: object) -> str:
    done = subprocess.run(["ip", *map(str, words)], capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"ip {' '.join(map(str, words))}: {done.stderr.strip()}")
    return done.stdout


@functools.cache
def missing() -> str | None:
    """Why there can be no hosts here; None if there can."""
    if lacking := [name for name in ("ip", "tc", "unshare") if shutil.which(name) is None]:
        return f"needs iproute2 and util-linux, and there is no {' and no '.join(lacking)}"
    try:
        with Hosts(2) as hosts:
            hosts.limit(1000)
    except OSError as error:
        if not _FORBIDDEN.search(str(error)):
            raise
        return f"needs network namespaces with a bridge and tbf, which are not allowed here ({error})"
    return None


class Hosts:
    """Two or more hosts `a`, `b`, … with addresses 10.77.0.1, 10.77.0.2, …

    Args:
        apart: each has its own part of this machine's cores.
    """

    _made = 0

    def __init__(self, count: int, *, apart: bool = False) -> None:
        Hosts._made += 1
        prefix = f"trainstep-{os.getpid()}-{Hosts._made}"
        self.names = [chr(ord("a") + number) for number in range(count)]
        self.addresses = [f"10.77.0.{number + 1}" for number in range(count)]
        self._switch = f"{prefix}-switch"
        self.spaces = [f"{prefix}-{name}" for name in self.names]
        self._running: list[subprocess.Popen[bytes]] = []
        cores = sorted(os.sched_getaffinity(0))
        each = len(cores) // count if apart else len(cores)
        self._cores = [cores[host * each :][:each] if apart else cores for host in range(count)]

    def __enter__(self) -> Hosts:
        _remove(path.name for path in FOLDER.glob("trainstep-*") if _is_orphan(path.name))
        try:
            ip("netns", "add", self._switch)
            ip("-n", self._switch, "link", "add", "bridge", "type", "bridge")
            ip("-n", self._switch, "link", "set", "dev", "bridge", "up")
            for name, space, address in zip(self.names, self.spaces, self.addresses, strict=True):
                ip("netns", "add", space)
                ends = ("name", CARD, "type", "veth", "peer", "name", name, "netns", self._switch)
                ip("-n", space, "link", "add", *ends)
                ip("-n", space, "address", "add", f"{address}/24", "dev", CARD)
                for card in ("lo", CARD):
                    ip("-n", space, "link", "set", "dev", card, "up")
                ip("-n", self._switch, "link", "set", "dev", name, "master", "bridge", "up")
        except OSError:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for running in self._running:
            running.kill()
        _remove([*self.spaces, self._switch])
        for running in self._running:
            running.wait()

    def limit(self, mbit: float, hosts: Iterable[int] | None = None) -> None:
        """Let these hosts, or all, send and receive at most so many megabits a second."""
        for host in range(len(self.names)) if hosts is None else hosts:
            for space, card in ((self.spaces[host], CARD), (self._switch, self.names[host])):
                words = ("tbf", "rate", f"{mbit}mbit", "burst", str(max(16_000, int(mbit * 125))), "latency", "50ms")
                done = subprocess.run(
                    ["tc", "-n", space, "qdisc", "replace", "dev", card, "root", *words],
                    capture_output=True,
                    text=True,
                    check=False,
                )
                if done.returncode:
                    raise OSError(f"tc: {done.stderr.strip()}")

    def pull(self, host: int) -> None:
        """Pull a host's cable: what is sent from or to it is lost."""
        ip("-n", self._switch, "link", "set", "dev", self.names[host], "down")

    def processes(self, host: int, containing: str = "") -> list[int]:
        """The processes that run there, with these words in their command line."""
        found = [int(each) for each in ip("netns", "pids", self.spaces[host]).split()]
        return [each for each in found if containing in _command_of(each)]

    def kill(self, host: int) -> None:
        """Let a host lose its power."""
        self.pull(host)
        for each in self.processes(host):
            kill(each)

    def enter(self, host: int) -> None:
        """Make this process one of a host; its later threads and children are too."""
        libc = ctypes.CDLL(None, use_errno=True)
        space = os.open(FOLDER / self.spaces[host], os.O_RDONLY)
        try:
            if libc.setns(space, 0) or libc.unshare(_NEW_UTS):
                raise OSError(ctypes.get_errno(), f"cannot enter {self.spaces[host]}")
        finally:
            os.close(space)
        socket.sethostname(self.names[host])
        os.environ["GLOO_SOCKET_IFNAME"] = CARD

    def run(
        self, host: int, words: Sequence[str], log: Path, environment: Mapping[str, str] | None = None
    ) -> subprocess.Popen[bytes]:
        """Start a command on a host, which prints into a file. It ends with the test."""
        named = [
            *("taskset", "--cpu-list", ",".join(map(str, self._cores[host]))),
            "unshare",
            "--uts",
            "sh",
            "-c",
            f'echo {self.names[host]} > /proc/sys/kernel/hostname; exec "$@"',
            "sh",
        ]
        with log.open("wb") as printed:
            running = subprocess.Popen(
                ["ip", "netns", "exec", self.spaces[host], *named, *words],
                env={**os.environ, "GLOO_SOCKET_IFNAME": CARD, **(environment or {})},
                stdin=subprocess.DEVNULL,
                stdout=printed,
                stderr=subprocess.STDOUT,
                preexec_fn=_ends_with_parent,
            )
        self._running.append(running)
        return running

    def torchrun(
        self,
        host: int,
        *words: str,
        log: Path,
        nodes: str,
        ranks: int = 1,
        restarts: int = 0,
        environment: Mapping[str, str] | None = None,
    ) -> subprocess.Popen[bytes]:
        """Start a host's torchrun, which meets the others' at the first; it gives up on a host after 3 s."""
        meeting = f"is_host={int(host == 0)},last_call_timeout=2,keep_alive_interval=1,keep_alive_max_attempt=3"
        command = [
            *(sys.executable, "-m", "torch.distributed.run", f"--nnodes={nodes}", f"--nproc-per-node={ranks}"),
            *(f"--max-restarts={restarts}", "--rdzv-backend=c10d", f"--rdzv-endpoint={self.addresses[0]}:{PORT}"),
            *(f"--rdzv-conf={meeting},join_timeout=60,read_timeout=10", f"--local-addr={self.addresses[host]}"),
            *("--monitor-interval=0.5", *_patience()),
        ]
        return self.run(host, [*command, *words], log, environment)


def kill(process: int) -> None:
    """End a process as the kernel does, if it is there."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(process, signal.SIGKILL)


@functools.cache
def _patience() -> Sequence[str]:
    """That ranks have 12 s to end when told; torchrun before torch 2.12 gives them 30 s, and cannot be told."""
    known = {option for action in get_args_parser()._actions for option in action.option_strings}
    return ["--shutdown-timeout=12"] if "--shutdown-timeout" in known else []


def _command_of(process: int) -> str:
    try:
        return Path(f"/proc/{process}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return ""


def _is_orphan(name: str) -> bool:
    """Whether these are the hosts of a test process that is gone."""
    found = _NAME.fullmatch(name)
    return found is not None and not Path(f"/proc/{found[1]}").exists()


def _remove(spaces: Iterable[str]) -> None:
    """End what runs there, and remove it; of orphans another process may do the same at this moment."""
    for space in spaces:
        if not (FOLDER / space).exists():
            continue
        try:
            deadline = time.monotonic() + 10
            while (there := ip("netns", "pids", space).split()) and time.monotonic() < deadline:
                for each in there:
                    kill(int(each))
                time.sleep(0.02)
            ip("netns", "delete", space)
        except OSError:
            if (FOLDER / space).exists():
                raise


def _ends_with_parent() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)
