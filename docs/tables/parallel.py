"""Tables of data parallel training: schemes, their memory, their traced steps, and collectives."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from functools import partial

from tables import one, plain, results, setting, where
from trainstep.bench.parallel.run import moments, planned_bytes
from trainstep.config import SIZES
from trainstep.kinds import CollectiveFitRow, CollectiveRow, ParallelRow, ParallelTraceRow
from trainstep.records import Row
from trainstep.report import columns
from trainstep.report.columns import Column
from trainstep.report.tables import Table, tabulate, text_table
from trainstep.schemes import SCHEMES
from trainstep.stats import ratio_of_medians


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


PAIRS = (
    ("bucketed-25", "torch-ddp"),
    ("bucketed-100", "torch-ddp"),
    ("bucketed-1000", "torch-ddp"),
    ("sharded-optimizer", "torch-zero"),
    ("sharded-optimizer-1000", "torch-zero"),
    ("fsdp", "torch-fsdp2"),
)  # Our schemes and what they replace


def parallel_ratios() -> Table:
    """Ours over torch's: time with its interval, and peak memory."""
    cells = []
    for name, gpus in (("h200-parallel", 2), ("h200-parallel-4gpus", 4)):
        rows = {row.scheme: row for row in results(name, ParallelRow)}
        for ours, theirs in PAIRS:
            if ours not in rows or theirs not in rows:
                continue
            time = ratio_of_medians(rows[ours].samples["step"], rows[theirs].samples["step"])
            low, high = (time.interval.low, time.interval.high) if time.interval else (None, None)
            peak = (rows[ours].peak_gib or 0) / (rows[theirs].peak_gib or 1)
            cells.append((str(gpus), ours, theirs, f"{time.value:.3f} [{low:.3f}–{high:.3f}]", f"{peak:.3f}"))
    wanted = ("GPUs", "ours", "torch's", "time, ours over torch's [95 %]", "peak memory, ours over torch's")
    return text_table(
        "parallel-ratios", f"Each pair in one run; {where(results('h200-parallel', ParallelRow))}", wanted, cells
    )


def headline() -> Table:
    """Our schemes beside PyTorch's."""
    names = {
        "single": "one GPU, no communication",
        "torch-ddp": "DistributedDataParallel, torch's",
        "bucketed-25": "DistributedDataParallel, ours",
        "torch-zero": "sharded optimizer, torch's",
        "sharded-optimizer": "sharded optimizer, ours",
        "torch-fsdp2": "fully sharded, torch's FSDP2",
        "fsdp": "fully sharded, ours",
    }
    rows = [one("h200-parallel", ParallelRow, scheme=name) for name in names]
    wanted = (
        Column("scheme", lambda row: names[str(row.case["scheme"])]),
        *columns.values({"step (ms)": "step_ms", "beyond one GPU's (ms)": "exposed_ms"}),
        *columns.values({"sent by a rank (GiB)": "sent_gib", "peak (GiB)": "peak_gib"}),
    )
    return tabulate("headline-parallel", f"2.7B on two GPUs, bf16 autocast; {where(rows)}", wanted, rows)


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
    "parallel-ratios": parallel_ratios,
    "headline-parallel": headline,
}
