"""What the page says, section by section: each is a function from records to a `Section`, or None where they have none.

To show a new kind of record, write such a function in a file here and name it in `SECTIONS`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from trainstep.records import Row
from trainstep.report.blocks import Section
from trainstep.report.sections.activations import checkpointing, residuals
from trainstep.report.sections.allocations import allocations
from trainstep.report.sections.kernels import kernels
from trainstep.report.sections.ladder import correctness, ladder
from trainstep.report.sections.memory import memory
from trainstep.report.sections.peaks import peaks
from trainstep.report.sections.phases import grid, phases, warmup
from trainstep.report.sections.precision import accumulation, dtypes
from trainstep.report.sections.summary import summary
from trainstep.report.sections.workload import environment, workload
from trainstep.report.subjects import attention, parallel
from trainstep.report.subjects.plan import plan
from trainstep.report.subjects.sweep import sweep

SECTIONS: tuple[Callable[[Sequence[Row]], Section | None], ...] = (
    summary,
    phases,
    warmup,
    grid,
    kernels,
    ladder,
    correctness,
    *attention.SECTIONS,
    *parallel.SECTIONS,
    memory,
    peaks,
    allocations,
    residuals,
    checkpointing,
    dtypes,
    accumulation,
    plan,
    sweep,
    workload,
    environment,
)
"""The page, in order."""
