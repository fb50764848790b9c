"""An attempt at one case of a grid: a result, or a failure that becomes a row while the grid goes on."""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from trainstep.base.errors import UnsupportedError, UsageError, one_line, place_of
from trainstep.parallel.process import Process
from trainstep.rows.records import AnyRow, Scalar, Status, make_row

Result = TypeVar("Result")
WATCHDOG_S = 0.25
"""Two looks of NCCL's watchdog at what has ended, and some time on top (ProcessGroupNCCL looks every 100 ms)."""


class WrongError(Exception):
    """A case does not compute what it says, so that its times would be of something else: a row with status wrong."""


@dataclass(frozen=True)
class Failure:
    """Reason why a case has no result."""

    status: Status
    reason: str
    """A line that says why."""


def failed_row(
    kind: type[AnyRow],
    case: Mapping[str, Scalar],
    failure: Failure,
    environment: Mapping[str, Scalar],
    values: Mapping[str, Scalar] | None = None,
) -> AnyRow:
    """The row of a case that has no result: its settings, why, and the values that are known without one."""
    return make_row(kind, case, values or {}, status=failure.status, reason=failure.reason, environment=environment)


def attempt(work: Callable[[], Result], *, drop_compiled: bool = True) -> Result | Failure:
    """`caught`, and give back the memory either way.

    Without `drop_compiled` compiled code stays, for work that is attempted again.
    """
    try:
        return caught(work)
    finally:
        release_memory(drop_compiled=drop_compiled)


def caught(work: Callable[[], Result]) -> Result | Failure:
    """Run `work`; turn what a grid must survive into a `Failure`.

    A `UsageError` other than `UnsupportedError` goes through: it is about the whole run, not about one case.
    """
    try:
        return work()
    except UnsupportedError as error:
        return Failure("unsupported", one_line(error))
    except UsageError:
        raise
    except WrongError as error:
        return Failure("wrong", one_line(error))
    except Exception as error:
        return classify(error)


def attempt_on_all_ranks(work: Callable[[], Result], process: Process) -> list[Result] | Failure:
    """`attempt` on every rank of the group: all results by rank, or the first failure there was on any.

    A `UsageError` is a failure here, of the scheme at hand: on one rank alone it would leave the others waiting.
    """
    release_memory()  # what the case before held in circles
    _let_go_of_collectives(process)
    try:
        result = attempt(work)
    except UsageError as error:
        result = Failure("unsupported", one_line(error))
    results: list[Any] = [None] * process.world_size
    dist.all_gather_object(results, result, group=process.group)
    return next((each for each in results if isinstance(each, Failure)), results)


def _let_go_of_collectives(process: Process) -> None:
    """Have NCCL's group give back the tensors of collectives that nobody waited for.

    torch's DistributedDataParallel waits for their futures. The group then keeps all buckets until the collective after
    its watchdog has seen them end.
    """
    if process.device.type == "cuda":
        torch.cuda.synchronize(process.device)
        time.sleep(WATCHDOG_S)
        dist.all_reduce(torch.zeros(1, device=process.device), group=process.group)
        torch.cuda.empty_cache()


def classify(error: Exception) -> Failure:
    """Failure that a grid records of an error."""
    text = one_line(error)
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "memory: you tried to allocate" in str(error):
        return Failure("out of memory", text)  # the CPU's allocator raises a plain RuntimeError
    if "InvalidCxxCompiler" in f"{type(error).__name__}: {error}":
        return Failure("unsupported", "torch.compile on a CPU needs a C++ compiler, and none was found; install g++")
    if any(each.__name__ == "BackendCompilerFailed" for each in type(error).__mro__):  # InductorError is one
        return Failure("unsupported", f"torch.compile cannot compile it: {text}")
    logging.getLogger(__name__).debug("a case failed", exc_info=error)  # shown by --debug
    return Failure("failed", f"{type(error).__name__}: {text}{place_of(error)}")


def release_memory(*, drop_compiled: bool = True) -> None:
    """Drop what the last case left behind: garbage, cached device memory, compiled code."""
    if drop_compiled:
        torch.compiler.reset()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
