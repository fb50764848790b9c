"""What this device reaches at best, as rows: a large product in each precision, and a large copy."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import get_args

import torch

from trainstep.bench.outcome import Failure, attempt, failed_row
from trainstep.casting import check_precision
from trainstep.kinds import CeilingRow
from trainstep.measure.environment import describe, measure_ceilings
from trainstep.precision import Rate


def ceiling_records(device: torch.device) -> Iterator[CeilingRow]:
    """One row per precision that the device has, and one for the copy."""
    environment = describe(device)
    supported = [
        each for each in get_args(Rate) if not isinstance(attempt(partial(check_precision, each, device)), Failure)
    ]
    measured = attempt(partial(measure_ceilings, device, supported))
    if isinstance(measured, Failure):
        yield failed_row(CeilingRow, {"operation": "all"}, measured, environment)
        return
    for precision, rate in measured.matmul_tflops.items():
        yield CeilingRow(operation="matmul", precision=precision, tflops=rate, environment=environment)
    yield CeilingRow(operation="copy", gb_s=measured.copy_gb_s, environment=environment)
