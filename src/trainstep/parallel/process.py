"""A process among several: start-up from torchrun's environment, its device, and agreement between ranks.

Launching is torchrun's work. `join_group` reads what torchrun put into the environment, binds the process to the GPU of
its local rank, joins the group (NCCL for GPU tensors and Gloo for the rest, or Gloo alone) and leaves it in the end.
Nothing else in trainstep reads the environment or a global group: groups are passed.
"""

from __future__ import annotations

import hashlib
import os
import shlex
import socket
import sys
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import chain
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import TCPStore
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import PrefixStore, Store, _get_default_store
from torch.distributed.rendezvous import rendezvous

from trainstep.base.errors import CollectiveError, UsageError
from trainstep.parallel.announced import BESIDE
from trainstep.parallel.rollcall import Rollcall, is_of_a_collective, shortened

Result = TypeVar("Result")

LONGEST_S = 31 * 24 * 3600.0  # the most that a timeout may be
TIMEOUT_S = 600.0  # how long a collective waits for the other ranks before it is an error


@dataclass(frozen=True)
class Process:
    """This process among those of its group."""

    rank: int
    world_size: int
    device: torch.device  # the CPU, or the GPU of this local rank, which is also torch's current device
    group: dist.ProcessGroup
    timeout_s: float = TIMEOUT_S  # how long its collectives wait; a further group is to be made with the same
    hosts: int = 1  # on which its ranks are, in order, as many on each
    rollcall: Rollcall | None = None  # who says which rank is missing; None where there is no group
    _meshes: dict[int, DeviceMesh] = field(default_factory=dict, repr=False, compare=False)
    _beside: list[dist.ProcessGroup] = field(default_factory=list, repr=False, compare=False)

    def mesh(self, replicas: int) -> DeviceMesh:
        """All ranks as ("replicate", "shard"); consecutive ranks are a replica. Every rank must call it.

        Its groups are made once, and are there as long as this one.
        """
        if replicas not in self._meshes:
            assert self.world_size % replicas == 0, f"{self.world_size} ranks, {replicas} replicas"
            layout, timeout = torch.arange(self.world_size).view(replicas, -1), timedelta(seconds=self.timeout_s)
            groups = [
                dist.new_subgroups_by_enumeration(ranks.tolist(), timeout=timeout)[0] for ranks in (layout.t(), layout)
            ]
            names = ("replicate", "shard")
            made = DeviceMesh.from_group(groups, self.device.type, mesh=layout, mesh_dim_names=names)
            self._meshes[replicas] = made
        return self._meshes[replicas]

    def group_beside(self) -> dist.ProcessGroup:
        """A new Gloo group of all ranks for threads beside training. Every rank must call it."""
        timeout = timedelta(seconds=self.timeout_s)  # its default is longer
        made = dist.new_group(backend="gloo", timeout=timeout, group_desc=BESIDE)
        assert isinstance(made, dist.ProcessGroup), "this rank is in it"
        self._beside.append(made)
        return made

    def now(self, doing: str) -> None:
        """Note this rank's work, for the sentence that names it if a collective fails: "update 12"."""
        if self.rollcall is not None:
            self.rollcall.doing = doing

    def abort(self) -> None:
        """Break off the connections of all its groups."""
        meshes = chain.from_iterable(mesh.get_all_groups() for mesh in self._meshes.values())
        for each in (*meshes, *self._beside, self.group):
            each.abort()


@contextmanager
def join_group(device: str = "auto", *, timeout_s: float = TIMEOUT_S) -> Iterator[Process]:
    """Join the processes that torchrun started, and leave them in the end.

    Args:
        device: auto (the GPU of the local rank where there are GPUs), cpu or cuda.
        timeout_s: seconds that a collective waits for the other ranks.

    Raises:
        UsageError: not started by torchrun, a group joined already, or no GPU for this local rank.
        CollectiveError: other ranks did not come, or were missing when a collective failed; it names them.
    """
    variables = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    if missing := [name for name in variables if name not in os.environ]:
        what = f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'} not set"
        raise UsageError(f"this runs in several processes, started by torchrun, and {what}; run: {torchrun_command()}")
    check_timeout(timeout_s)
    bound = bind_device(device, int(os.environ["LOCAL_RANK"]))
    with _coming_together(timeout_s):
        shared, rank, world_size = next(rendezvous("env://", timeout=timedelta(seconds=timeout_s)))
        store = fresh_store(shared, rank, world_size, timeout_s=timeout_s)
    hosts = int(os.environ.get("GROUP_WORLD_SIZE", "1"))  # torchrun has one agent on each
    with joined(bound, rank=rank, world_size=world_size, store=store, timeout_s=timeout_s, hosts=hosts) as process:
        yield process


def join_group_or_alone(device: str = "auto", *, timeout_s: float = TIMEOUT_S) -> AbstractContextManager[Process]:
    """`join_group` where torchrun started this process; else a group of this process alone, on the first GPU if any."""
    if "RANK" in os.environ:
        return join_group(device, timeout_s=timeout_s)
    store = dist.HashStore()  # type: ignore[attr-defined]
    return joined(bind_device(device, 0), rank=0, world_size=1, store=store, timeout_s=timeout_s)


@contextmanager
def joined(
    device: torch.device,
    *,
    rank: int,
    world_size: int,
    init_method: str | None = None,
    store: Store | None = None,
    timeout_s: float = TIMEOUT_S,
    hosts: int = 1,
    backend: str | None = None,
) -> Iterator[Process]:
    """Join a group by a rendezvous of one's own (torch.distributed's `init_method` or `store`); leave it in the end.

    After an error the connections are broken off instead, so that ranks waiting for this one fail too. With an
    `AgreedError`, which every rank has, they leave in order. `backend` is
    torch.distributed's; by default Gloo for tensors on the CPU and, on a GPU, NCCL for those on it.

    Raises:
        CollectiveError: a collective failed within, as other ranks were missing; it names them.
    """
    check_timeout(timeout_s)
    if dist.is_initialized():
        raise UsageError("this process has joined a group already; leave it first (destroy_process_group)")
    if backend is None:
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    with _coming_together(timeout_s):
        dist.init_process_group(
            backend,
            init_method=init_method,
            store=store,
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=timeout_s),
            device_id=device if "nccl" in backend else None,
        )
    rollcall = Rollcall(PrefixStore("rollcall", _get_default_store()), rank, world_size)
    process = Process(rank, world_size, device, resolve_group(None), timeout_s, hosts, rollcall)
    mistake: AgreedError | None = None
    try:
        yield process
    except AgreedError as error:
        mistake = error
    except BaseException as error:
        named = rollcall.failed(error) if is_of_a_collective(error) else None
        if named is None:
            rollcall.stopped(error)
        process.abort()
        if named is not None:
            raise named from error
        raise
    rollcall.leave()
    dist.destroy_process_group()
    if mistake is not None:
        raise mistake


@contextmanager
def _coming_together(timeout_s: float) -> Iterator[None]:
    try:
        yield
    except (TimeoutError, RuntimeError) as error:
        if not (isinstance(error, TimeoutError) or is_of_a_collective(error)):
            raise
        raise CollectiveError(
            f"the ranks did not come together: this one, on host {socket.gethostname()}, waited up to {timeout_s:g} s "
            f"for the others ({shortened(error)})"
        ) from error


def fresh_store(store: Store, rank: int, world_size: int, *, timeout_s: float) -> Store:
    """The part of `store` under a name that all ranks of this start, and no others, know.

    Ranks find each other through a key-value store, where each leaves its address. torchrun keeps that store when it
    starts its workers again after one was killed (seen in torch 2.13; the number of the start, which it tells them, may
    differ between hosts). Then a rank that is early finds the address of a process that is dead, and waits for it in
    vain. So before anything else the ranks agree on a new name, under which they then keep all they write.

    Rank 0 makes the name. Every other rank asks for it with a token that it has just made; rank 0 answers each token
    with the name; the rank that made the token, and no other, confirms. Rank 0 answers again when a rank's token
    changes, as it does when the first one was a dead process's.

    Raises:
        TimeoutError: some rank has not come in time.
    """
    token = uuid.uuid4().hex
    if rank == 0:
        _answer_all(store, token, world_size, time.monotonic() + timeout_s)
        return PrefixStore(f"start/{token}", store)
    store.set(f"call/{rank}", token)
    store.wait([f"answer/{token}"], timedelta(seconds=timeout_s))
    name = store.get(f"answer/{token}").decode()
    store.set(f"confirm/{name}/{rank}", "")
    return PrefixStore(f"start/{name}", store)


def _answer_all(store: Store, name: str, world_size: int, deadline: float) -> None:
    waiting = set(range(1, world_size))
    answered: dict[int, str] = {}
    while waiting:
        for rank in sorted(waiting):
            if store.check([f"confirm/{name}/{rank}"]):
                waiting.discard(rank)
            elif store.check([f"call/{rank}"]):
                token = store.get(f"call/{rank}").decode()
                if answered.get(rank) != token:
                    answered[rank] = token
                    store.set(f"answer/{token}", name)
        if time.monotonic() > deadline:
            raise TimeoutError(f"rank {', '.join(map(str, sorted(waiting)))} did not come to the rendezvous in time")
        time.sleep(0.01)


def bind_device(device: str, local_rank: int) -> torch.device:
    """The device of a local rank; a GPU becomes torch's current device.

    Raises:
        UsageError: not auto, cpu or cuda, or fewer GPUs than local ranks.
    """
    if device not in ("auto", "cpu", "cuda"):
        expected = "expected auto, cpu or cuda (each local rank takes the GPU of its number)"
        raise UsageError(f"device is {device!r}; {expected}")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device == "cpu" or (device == "auto" and count == 0):
        return torch.device("cpu")
    if local_rank >= count:
        found = f"{count} GPU{'s' if count > 1 else ''}" if count else "no GPU"
        raise UsageError(
            f"local rank {local_rank} has no GPU: this machine has {found}; start at most one process per GPU "
            "(torchrun --nproc-per-node), or use --device cpu"
        )
    bound = torch.device("cuda", local_rank)
    torch.cuda.set_device(bound)
    return bound


def check_timeout(seconds: float) -> None:
    """Raise `UsageError` unless a collective can wait that long."""
    if not 0 < seconds <= LONGEST_S:
        raise UsageError(f"timeout is {seconds:g}; expected seconds above 0, and 31 days at most")


def is_restart() -> bool:
    """True if torchrun has started all processes again because one of them died."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0


def torchrun_command(processes: int = 2) -> str:
    """The command that starts this very command line under torchrun."""
    return shlex.join(["torchrun", f"--nproc-per-node={processes}", "-m", "trainstep", *sys.argv[1:]])


def resolve_group(process_group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """The group that was passed, or that of all processes.

    Raises:
        UsageError: torch.distributed is not initialised, or this process is not in the group.
    """
    if not dist.is_available() or not dist.is_initialized():
        raise UsageError(
            "torch.distributed is not initialised; start with torchrun, and open trainstep.parallel.join_group() "
            "or call torch.distributed.init_process_group() first"
        )
    group = dist.group.WORLD if process_group is None else process_group
    if not isinstance(group, dist.ProcessGroup):
        raise UsageError(
            f"process_group is {group!r}, a group that this process (rank {dist.get_rank()}) is not in; "
            "only its members may use it"
        )
    return group


def check_ranks_agree(
    wrapper: str, named: Iterable[tuple[str, Tensor]], group: dist.ProcessGroup, *, settings: Mapping[str, object]
) -> None:
    """Raise on every rank where the ranks differ, instead of hanging or adding up different parameters later.

    Compared are the wrapper's name, its settings, and the names, dtypes, shapes, `requires_grad` and order of the
    tensors, not their values. One exchange of objects; every rank of the group must call it.

    Raises:
        UsageError: which rank differs from rank 0 (of the group), and in which parameter or setting.
    """
    mine = [f"{name} = {value!r}" for name, value in settings.items()]
    mine += [
        f"{name} ({str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"
        f"{'' if tensor.requires_grad else ', frozen'})"
        for name, tensor in named
    ]
    gathered: list[tuple[str, int, list[str]]] = [("", 0, [])] * group.size()
    dist.all_gather_object(gathered, (wrapper, len(settings), mine), group=group)
    compared = [(rank, _difference(theirs, gathered[0])) for rank, theirs in enumerate(gathered)]
    if differences := [f"rank {rank} {difference}" for rank, difference in compared if difference]:
        raise UsageError(
            f"{wrapper}: the ranks disagree: {'; '.join(differences)}. Build the same model, in the same order and "
            "with the same settings, on every rank"
        )


def _difference(theirs: tuple[str, int, list[str]], first: tuple[str, int, list[str]]) -> str | None:
    (their_wrapper, _, there), (wrapper, settings, here) = theirs, first
    if their_wrapper != wrapper:
        return f"builds {their_wrapper}, rank 0 {wrapper}"
    for number, (one, other) in enumerate(zip(there, here, strict=False)):
        if one != other:
            what = "setting" if number < settings else f"parameter {number - settings}"
            return f"has {one} as {what}, rank 0 {other}"
    if len(there) == len(here):
        return None
    longer, owner = (there, "it") if len(there) > len(here) else (here, "rank 0")
    extra = f"{longer[min(len(there), len(here))]} is the first that only {owner} has"
    return f"has {len(there) - settings} parameters, rank 0 {len(here) - settings}; {extra}"


def is_first_to_say(text: str) -> bool:
    """True if no other rank that torchrun has started this time has asked this of the same text.

    The ranks need not have joined a group: torchrun's own store counts. Where it has none, each is the first.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return True
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    key = f"said/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/{hashlib.sha256(text.encode()).hexdigest()}"
    try:
        return TCPStore(host, port, timeout=timedelta(seconds=10)).add(key, 1) == 1
    except RuntimeError:
        return True


class AgreedError(UsageError):
    """A mistake that every rank knows of; it is enough that the first one says it."""


def on_first_rank(process: Process, call: Callable[[], Result]) -> Result:
    """Call on rank 0; its result, or its `UsageError` as an `AgreedError`, is that of every rank."""
    outcome: list[Result | UsageError | None] = [None]
    if process.rank == 0:
        try:
            outcome = [call()]
        except UsageError as error:
            outcome = [error]
    dist.broadcast_object_list(outcome, group=process.group, group_src=0)
    if isinstance(outcome[0], UsageError):
        raise AgreedError(str(outcome[0])) from outcome[0]
    return outcome[0]  # type: ignore[return-value]


def on_all_ranks(process: Process, call: Callable[[], Result]) -> Result:
    """Call on every rank; the first rank's `UsageError`, if there is any, is that of every rank."""
    mine, result = None, None
    try:
        result = call()
    except UsageError as error:
        mine = error
    errors: list[str | None] = [None] * process.world_size
    dist.all_gather_object(errors, None if mine is None else str(mine), group=process.group)
    for rank, message in enumerate(errors):
        if message is not None:
            raise AgreedError(message if process.world_size == 1 else f"rank {rank}: {message}") from mine
    return result  # type: ignore[return-value]
