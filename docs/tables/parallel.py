"""Tables of data parallel training: schemes, their memory, their traced steps, and collectives."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from functools import partial

from tables import plain, results, setting, where
from trainstep.bench.parallel.run import moments, planned_bytes
from trainstep.config import SIZES
from trainstep.kinds import CollectiveFitRow, CollectiveRow, ParallelRow, ParallelTraceRow
from trainstep.records import Row
from trainstep.report import columns
from trainstep.report.tables import Table, tabulate
from trainstep.schemes import SCHEMES


def parallel(table: str = "parallel", name: str = "h200-parallel") -> Table:
    """Schemes of data parallel training: time and traffic."""
    rows = results(name, ParallelRow)
    wanted = (
        columns.case("scheme", "scheme"),
        columns.median("step on the slowest rank (ms) [95 %]", "step"),
        columns.value("beyond the step without communication (ms)", "exposed_ms"),
        *(
            columns.value(f"{name} (ms)", f"{name}_ms")
            for name in ("forward", "backward", "communication", "optimizer")
        ),
        *columns.values({"collectives": "collectives", "sent by a rank (GiB)": "sent_gib"}),
        *columns.values({"by plan (GiB)": "sent_floor_gib", "parameters off by (of their movement)": "update_error"}),
        columns.value("allowed", "update_allowed"),
    )
    return tabulate(table, f"{setting(rows)}; {where(rows)}", wanted, rows)


def parallel_memory(table: str = "parallel-memory", name: str = "h200-parallel") -> Table:
    """The same: memory at three moments, measured and planned."""
    rows = [planned_anew(row) for row in results(name, ParallelRow)]
    points = (("start", "start"), ("before the optimizer", "before_step"), ("after it", "after_step"))
    wanted = (
        columns.case("scheme", "scheme"),
        *(
            column
            for title, name in points
            for column in (
                columns.value(f"{title} (GiB)", f"{name}_gib"),
                columns.value("by plan", f"predicted_{name}_gib"),
            )
        ),
        *columns.values({"weights": "before_step_weights_gib", "gradients": "before_step_gradients_gib"}),
        *columns.values({"state": "before_step_optimizer_state_gib", "peak": "peak_gib"}),
    )
    return tabulate(table, f"GiB; {where(rows)}", wanted, rows)


def planned_anew(row: Row) -> Row:
    """A scheme's row with what the plan says today; rows of other kinds as they are."""
    if not isinstance(row, ParallelRow):
        return row
    model, scheme = SIZES[str(row.workload)], SCHEMES[row.scheme]
    plan = planned_bytes(
        scheme,
        model.num_parameters,
        row.world_size,
        precision=row.precision,
        optimizer=row.optimizer,
        model=model,
        peer_copies=scheme.takes_peer_copies,
    )
    return dataclasses.replace(row, **moments(plan))


TABLES: Mapping[str, Callable[[], Table]] = {
    "parallel": parallel,
    "parallel-memory": parallel_memory,
    "parallel-4gpus": partial(parallel, "parallel-4gpus", "h200-parallel-4gpus"),
    "parallel-memory-4gpus": partial(parallel_memory, "parallel-memory-4gpus", "h200-parallel-4gpus"),
    "parallel-trace": partial(plain, "h200-parallel-trace", ParallelTraceRow),
    "collectives": partial(plain, "h200-collectives", CollectiveRow),
    "collectives-4gpus": partial(plain, "h200-collectives-4gpus", CollectiveRow),
    "collectives-fit-4gpus": partial(plain, "h200-collectives-4gpus", CollectiveFitRow),
    "collectives-fit": partial(plain, "h200-collectives", CollectiveFitRow),
}
