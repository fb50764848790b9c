"""Runs of a script for the ladder, on one rank or on all that torchrun started.

One process of each rank belongs to the ladder. The first rank's climbs, and says what is to be run in files under the
ladder's folder, which the ranks of one host share; the others' follow. Each starts the script's process of its own
rank, with a port of its own for every run: torchrun's store has seen the runs before. A run ends on all ranks when it
fails on one, which those that wait for it in a collective would not notice.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from trainstep.base.errors import UsageError
from trainstep.base.files import aside
from trainstep.base.guards import STOPS
from trainstep.ladder.trial.capture import FILE
from trainstep.ladder.trial.in_memory import in_memory
from trainstep.observe.command import Command
from trainstep.observe.supervise import GRACE_S, Rank, run_script

SEED = 0
"""Seed of the first rank; that of each further one is larger by one, as no two would draw the same by themselves."""
POLL_S = 0.02
OVER, READY = "over.json", "ready-{}.json"
TRIAL = "trainstep.ladder.trial.trial:Trial"
"""Makes the changes in the script's process, which imports it by this name."""


@dataclass(frozen=True)
class Order:
    """A run, the same for all ranks."""

    number: int
    folder: str
    place: str
    """The directory that it runs in."""
    target: str
    steps: int
    trial: Mapping[str, Any] | None
    """Trial as `trial.Trial` has it, without the seed; None for a deep run, which tries nothing."""
    limit_s: float = math.inf
    is_judged: bool = True
    """True if it leaves what it is checked by; else it is only timed."""
    plan: Mapping[str, Any] = field(default_factory=dict)
    """Session's plan, without the steps."""
    port: int = 0
    """Port of the ranks' rendezvous."""

    def output(self, rank: int) -> Path:
        """Path of a rank's outputs."""
        return Path(self.folder, f"output-{rank}.txt" if rank else "output.txt")

    def captured(self, rank: int) -> Path:
        """Path where a rank puts what it is checked by."""
        return Path(self.folder, f"rank-{rank}") if rank else Path(self.folder)


class Interrupted(Exception):
    """A signal has come to this process that stops the ladder. A script that handles it may end as if it had not."""


def carry_out(order: Order, command: Command, rank: Rank, is_over: Callable[[], bool] = lambda: False) -> int:
    """Run one rank's process of it; its exit code, −n for signal n.

    Args:
        is_over: asked several times a second: whether it is to be ended.

    Raises:
        Interrupted: a signal came that stops the ladder.
        TimeoutError: it took too long, or failed on another rank, and was ended.
        UsageError: the folder cannot be written.
    """
    alone = rank.world_size == 1
    own = {} if alone else {"MASTER_PORT": str(order.port), "TORCHELASTIC_USE_AGENT_STORE": "False"}
    others = [each for each in range(rank.world_size) if each != rank.rank]
    kept = str(order.captured(rank.rank).resolve()) if order.is_judged else None
    further: dict[str, Any] = {}
    if order.trial is not None:
        further = {"trial": {**order.trial, "by": TRIAL, "seed": SEED + rank.rank, "captured": kept}}
        own["PYTHONHASHSEED"] = str(SEED)
    received = set[int]()
    with order.output(rank.rank).open("wb") as output:
        code = run_script(
            replace(command, target=order.target),
            rank,
            Path(order.folder),
            {"steps": order.steps, **order.plan},
            further,
            limit_s=order.limit_s,
            on_signal=received.add,
            is_over=lambda: is_over() or any(found.code for each in others if (found := _end(order, each))),
            cwd=order.place,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **own},
        )
    for stop in received & set(STOPS):
        raise Interrupted(stop)
    return code


@dataclass(frozen=True)
class Failed:
    """A rank on which a run failed, other than the first."""

    rank: int
    code: int


class Leader:
    """Has all ranks run what the first one's ladder asks for; alone, it runs it by itself.

    Args:
        folder: of the ladder.
    """

    def __init__(self, command: Command, rank: Rank, folder: Path) -> None:
        self.command, self.rank, self._folder = command, rank, _shared(folder)
        self.is_over = False
        """True once no run is to go on."""

    def carry_out(self, order: Order) -> tuple[int, Failed | None]:
        """The first rank's exit code, and the first of the others that failed by itself.

        Raises:
            TimeoutError: the first rank's process took too long, and was ended.
        """
        if self.rank.world_size == 1:
            return carry_out(order, self.command, self.rank, lambda: self.is_over), None
        order = replace(order, port=_free_port())
        _write(self._folder / f"{order.number}.json", asdict(order))
        try:
            code, late = _carry_out_and_tell(order, self.command, self.rank), None
        except TimeoutError as error:
            code, late = 1, error
        others = {each: self._wait(order, each) for each in range(1, self.rank.world_size)}
        failed = [Failed(each, found.code) for each, found in others.items() if found.code and not found.is_ended]
        if late is not None and not failed:
            raise late
        return code, failed[0] if failed else None

    def _wait(self, order: Order, rank: int) -> _End:
        """Wait until a rank ends; ranks that wait for the first one end with it."""
        start = time.monotonic()
        while (found := _end(order, rank)) is None:
            if time.monotonic() - start > 3 * GRACE_S:
                return _End(1)
            time.sleep(POLL_S)
        return found

    @contextmanager
    def others(self) -> Iterator[None]:
        """Around the ladder: the other ranks end when it does."""
        if self.rank.world_size == 1:
            yield
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        try:
            yield
        finally:
            _write(self._folder / OVER, {})
            time.sleep(1.0)  # they look several times in that while
            if not self.missing(0.0):
                shutil.rmtree(self._folder, ignore_errors=True)

    def missing(self, limit_s: float) -> list[int]:
        """Ranks that do not follow within so many seconds."""
        deadline = time.monotonic() + limit_s
        while True:
            ranks = range(1, self.rank.world_size)
            found = [each for each in ranks if not (self._folder / READY.format(each)).exists()]
            if not found or time.monotonic() > deadline:
                return found
            time.sleep(POLL_S)


def follow(command: Command, rank: Rank, folder: Path) -> int:
    """Run what the first rank's ladder says until it is over; the exit code, which is the ladder's to tell."""
    orders, number, kept = _shared(folder), 1, ExitStack()
    orders.mkdir(parents=True, exist_ok=True)
    _write(orders / READY.format(rank.rank), {})
    while True:
        path = orders / f"{number}.json"
        if path.exists():
            order = Order(**json.loads(path.read_text()))
            kept.close()  # what the run before left, which the first rank has read
            kept.enter_context(in_memory(order.captured(rank.rank), (FILE,) if order.is_judged else ()))
            with suppress(TimeoutError, Interrupted):  # told, and the first rank says of what
                _carry_out_and_tell(order, command, rank)
            number += 1
        elif (orders / OVER).exists():
            kept.close()
            return 0
        else:
            time.sleep(POLL_S)


def check_one_host(environment: Mapping[str, str], flag: str = "--ladder") -> None:
    """Raise `UsageError` where torchrun's ranks are on several hosts."""
    here, all_of_them = environment.get("LOCAL_WORLD_SIZE", "1"), environment.get("WORLD_SIZE", "1")
    if here != all_of_them:
        raise UsageError(
            f"{flag} has {here} of {all_of_them} ranks on this host; expected all: it starts them anew for every run "
            "and compares what they leave. Run it on one host, as torchrun --standalone starts it"
        )


@dataclass(frozen=True)
class _End:
    code: int
    is_ended: bool = False
    """True if it was ended, since another rank had failed or since it took too long."""


def _carry_out_and_tell(order: Order, command: Command, rank: Rank) -> int:
    end = _End(1)
    try:
        end = _End(carry_out(order, command, rank))
    except TimeoutError:
        end = _End(1, is_ended=True)
        raise
    finally:
        _write(_end_path(order, rank.rank), asdict(end))
    return end.code


def _end_path(order: Order, rank: int) -> Path:
    return Path(order.folder, f"ended-{rank}.json")


def _end(order: Order, rank: int) -> _End | None:
    """End of a rank; None where it has not ended."""
    path = _end_path(order, rank)
    return _End(**json.loads(path.read_text())) if path.exists() else None


def _shared(folder: Path) -> Path:
    """The orders' folder of this start: torchrun's process, which is all ranks' parent, and when it was started."""
    parent = os.getppid()
    try:
        started = Path(f"/proc/{parent}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        started = "0"
    return folder / f"orders-{parent}-{started}"


def _write(path: Path, content: Mapping[str, Any]) -> None:
    """Whole or not at all, for those that look meanwhile."""
    with aside(path) as draft, draft.open("x") as file:
        file.write(json.dumps(content))


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])
