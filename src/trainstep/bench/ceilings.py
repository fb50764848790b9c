"""What this device reaches at best, as rows: a large product in each precision, and a large copy."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from trainstep.bench.outcome import Failure, attempt
from trainstep.config import Precision
from trainstep.kinds import row_of
from trainstep.measure.ceilings import measure_ceilings
from trainstep.measure.environment import describe
from trainstep.precision import check_precision
from trainstep.records import Row

PRECISIONS: tuple[Precision, ...] = ("fp32", "tf32", "bf16")


def ceiling_records(device: torch.device) -> Iterator[Row]:
    """One row per precision that the device has, and one for the copy."""
    environment = describe(device)
    supported = [
        each for each in PRECISIONS if not isinstance(attempt(partial(check_precision, each, device)), Failure)
    ]
    measured = attempt(partial(measure_ceilings, device, supported))
    if isinstance(measured, Failure):
        case = {"operation": "all"}
        yield row_of("ceiling", case, status=measured.status, reason=measured.reason, environment=environment)
        return
    for precision, rate in measured.matmul_tflops.items():
        yield row_of(
            "ceiling", {"operation": "matmul", "precision": precision}, {"tflops": rate}, environment=environment
        )
    yield row_of("ceiling", {"operation": "copy"}, {"gb_s": measured.copy_gb_s}, environment=environment)
