"""Times that each operator of a traced step takes alone on the device that is here.

A call is made again with tensors of the same shapes, strides and dtypes: floats are random, indices are zero, which is
an index everywhere, but for an embedding's, which are spread over its rows as tokens are. Several sets of arguments
take turns and results stay for a while, as in a step: what was just written would come from the nearest cache. The
median of a few samples is taken. What cannot be called again so has no time. What a step takes beyond this is the
host's, between operators.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from trainstep.measure.timing import device_clock
from trainstep.measure.tracing import OperatorCall, TensorSpec

LEAST_S, MOST_ROUNDS, SAMPLES = 0.002, 1000, 3
"""Seconds of a sample, rounds over the copies in it, and samples of an operator."""
COLD_BYTES, MOST_COPIES = 64e6, 32
"""Arguments in turn, so that they come from where a step finds them: not from the nearest cache."""


def operator_seconds(calls: Iterable[OperatorCall], device: torch.device) -> list[float | None]:
    """Seconds of one call of each; None where it cannot be called by itself."""
    found: dict[Any, float | None] = {}
    keys = []
    for call in calls:
        key = (call.operator, repr(call.arguments))
        keys.append(key)
        if key not in found:
            try:
                found[key] = _seconds(call, device)
            except Exception:  # whatever an operator raises of arguments that are not its own
                found[key] = None
    return [found[key] for key in keys]


def quiet_clock(device: torch.device) -> Callable[[], float]:
    """The process's own time where one thread of a CPU does the work, so that others on it do not count; else a clock
    on the wall."""
    return time.process_time if device.type == "cpu" and torch.get_num_threads() == 1 else time.perf_counter


def _seconds(call: OperatorCall, device: torch.device) -> float:
    clock, now = device_clock(device), quiet_clock(device)
    copies = min(MOST_COPIES, max(1, math.ceil(COLD_BYTES / max(1.0, call.bytes))))
    given = [_arguments(call, device) for _ in range(copies)]
    with torch.no_grad():
        for args, kwargs in given:
            call.operator(*args, **kwargs)
        rounds = 1
        samples: list[float] = []
        kept: list[Any] = []
        while len(samples) < SAMPLES:
            clock.synchronize()
            start = now()
            for _ in range(rounds):
                kept[:] = [call.operator(*args, **kwargs) for args, kwargs in given]  # results stay for a round
            clock.synchronize()
            taken = now() - start
            if taken < LEAST_S and not samples and rounds < MOST_ROUNDS:
                rounds = min(MOST_ROUNDS, max(2 * rounds, math.ceil(rounds * LEAST_S / max(taken, 1e-6))))
                continue
            samples.append(taken / rounds / copies)
    return statistics.median(samples)


def _arguments(call: OperatorCall, device: torch.device) -> Any:
    rows = _rows(call)

    def made(spec: TensorSpec) -> Tensor:
        size = 1 + sum((size - 1) * stride for size, stride in zip(spec.shape, spec.stride, strict=True) if size)
        if spec.dtype.is_floating_point:
            under = torch.rand(size, device=device).add_(0.1).to(spec.dtype)
        elif rows and spec.dtype in (torch.int64, torch.int32):
            under = torch.randint(rows, (size,), dtype=spec.dtype, device=device)
        else:
            under = torch.zeros(size, dtype=spec.dtype, device=device)
        return under.as_strided(spec.shape, spec.stride)

    return tree_map_only(TensorSpec, made, call.arguments)


def _rows(call: OperatorCall) -> int:
    """Rows of the table that the operator looks up in; 0 where it is another operator."""
    args = call.arguments[0]
    if call.name == "aten::embedding":
        return int(args[0].shape[0])
    return int(args[2]) if call.name == "aten::embedding_dense_backward" else 0
