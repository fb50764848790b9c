"""Tables of data parallel training: schemes, their memory, their traced steps, and collectives."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from tables import RESULTS, of_rows, plain, results, setting, where
from tables.alone import communication
from trainstep.base.config import SIZES
from trainstep.base.schemes import SCHEMES
from trainstep.bench.parallel.planned import copies_of, moments, planned_bytes, scheme_of
from trainstep.bench.parallel.ratios import ratios_alike, time_ratio
from trainstep.report import columns
from trainstep.report.columns import Column
from trainstep.report.numbers import number
from trainstep.report.tables import Table, tabulate, text_table
from trainstep.rows import (
    CollectiveFitRow,
    CollectiveRow,
    ParallelFamilyRow,
    ParallelRow,
    ParallelTraceRow,
    PlanRow,
)
from trainstep.rows.records import Row

PARTS = ("forward", "backward", "communication", "optimizer")


def parallel(name: str = "h200-parallel") -> Table:
    """Schemes of data parallel training: time and traffic."""
    rows = results(name, ParallelRow)
    wanted = (
        *columns.cases(
            {
                "compile": "compile",
                "timing": "timing",
                "scheme": "scheme",
                "replicas": "replicas",
                "blocks a group": "blocks_per_group",
            }
        ),
        columns.value("rounds", "rounds"),
        columns.median("step on the slowest rank (ms) [95 %]", "step"),
        *communication(rows),
        *columns.values({f"{name} (ms)": f"{name}_ms" for name in PARTS}),
        columns.value("launched by the host in (ms)", "issue_ms"),
        *columns.values({"collectives": "collectives", "sent by a rank (GiB)": "sent_gib"}),
        *columns.values({"by plan (GiB)": "sent_floor_gib", "parameters off by (of their movement)": "update_error"}),
        columns.value("allowed", "update_allowed"),
    )
    return tabulate("parallel", f"{setting(rows)}; {where(rows)}", wanted, rows)


def parallel_memory(name: str = "h200-parallel") -> Table:
    """The same: memory at three moments, measured and planned."""
    rows = [planned_anew(row) for row in results(name, ParallelRow)]
    wanted = (
        *columns.cases(
            {"compile": "compile", "scheme": "scheme", "replicas": "replicas", "blocks a group": "blocks_per_group"}
        ),
        *columns.values({"start (GiB)": "start_gib", "by plan": "predicted_start_gib"}),
        *columns.values({"before the optimizer (GiB)": "before_step_gib", "by plan": "predicted_before_step_gib"}),
        *columns.values({"after it (GiB)": "after_step_gib", "by plan": "predicted_after_step_gib"}),
        *columns.values({"weights": "before_step_weights_gib", "gradients": "before_step_gradients_gib"}),
        *columns.values({"state": "before_step_optimizer_state_gib", "peak": "peak_gib"}),
    )
    return tabulate("parallel-memory", f"GiB; {where(rows)}", wanted, rows)


def planned_anew(row: Row) -> Row:
    """A scheme's row with what the plan says today; rows of other kinds as they are."""
    if not isinstance(row, ParallelRow):
        return row
    model, scheme = SIZES[str(row.workload)], scheme_of(row)
    settings = {"precision": row.precision, "optimizer": row.optimizer}
    plan = planned_bytes(scheme, model.num_parameters, row.world_size, model=model, **settings, **copies_of(row))
    return dataclasses.replace(row, **moments(plan))


BY_SENT = {
    "bucketed-25": ("all-reduced", "–", "8P(n − 1)/n"),
    "sharded-optimizer": ("reduce-scattered", "gathered", "8P(n − 1)/n"),
    "sharded-optimizer-1000": ("reduce-scattered", "gathered", "8P(n − 1)/n"),
    "torch-zero": ("all-reduced", "broadcast", "12P(n − 1)/n"),
}
"""Scheme → how gradients and updated parameters travel, and what a rank sends."""


def zero() -> Table:
    """The sharded optimizer beside torch's, on two GPUs and on four: what a rank sends and holds."""
    runs = [results(name, ParallelRow) for name in ("h200-parallel", "h200-parallel-4gpus")]
    rows = [row for rows in runs for row in rows if row.scheme in BY_SENT]
    ways = ("gradients", "updated parameters", "sent in a step")
    wanted = (
        *columns.cases({"GPUs": "world_size", "scheme": "scheme"}),
        *(Column(title, lambda row, place=place: BY_SENT[row.scheme][place]) for place, title in enumerate(ways)),
        *columns.values({"sent (GiB)": "sent_gib", "weights (GiB)": "before_step_weights_gib"}, digits=4),
        *columns.values(
            {"state (GiB)": "before_step_optimizer_state_gib", "in all (GiB)": "before_step_gib"}, digits=4
        ),
    )
    caption = "2.7B, P = 3,406,809,600 parameters, before the optimizer's step"
    return tabulate("parallel-zero", f"{caption}; {where(rows)}", wanted, rows)


RUNS = (
    *("h200-parallel-large", "h200-parallel-compiled", "h200-parallel-peers"),
    *("h200-parallel-sustained-4gpus", "h200-parallel-pinned-4gpus"),
    *("h200-parallel-rounds-4gpus", "h200-parallel-compiled-rounds-4gpus"),
    *("h200-parallel-hybrid-averaged-4gpus", "h200-parallel-hybrid-eager-4gpus"),
)
"""Files whose rows stand beside torch's with its best settings, as far as they are there."""
OURS = (
    *("bucketed-25", "bucketed-100", "bucketed-1000"),
    *("sharded-optimizer", "sharded-optimizer-1000", "sharded-optimizer-1000-overlapped"),
    *("fsdp", "fsdp-collectives", "hsdp"),
)


def parallel_ratios() -> Table:
    """Ours over torch's: time with its interval, and peak memory."""
    runs = [results(name, ParallelRow) for name in RUNS if (RESULTS / f"{name}.jsonl").exists()]
    found = [row for rows in runs for row in ratios_alike(rows) if row.scheme in OURS]
    wanted = (
        *columns.cases({"GPUs": "world_size", "model": "workload", "compile": "compile", "timing": "timing"}),
        *columns.cases({"ours": "scheme", "replicas": "replicas", "blocks a group": "blocks_per_group"}),
        columns.value("torch's, its fastest setting", "peer_setting"),
        columns.ratio("time, ours over torch's", "ratio"),
        columns.value("rounds", "rounds"),
        columns.value("peak memory, ours over torch's", "peak_ratio"),
    )
    every = [row for rows in runs for row in rows]
    return tabulate("parallel-ratios", f"Each pair in one run; {where(every)}", wanted, found)


HYBRID_RUNS: Mapping[str, str] = {
    "h200-parallel-hybrid-averaged-4gpus": "means averaged between rows",
    "h200-parallel-hybrid-4gpus": "among all ranks",
    "h200-parallel-hybrid-blocks-4gpus": "among all ranks",
    "h200-parallel-hybrid-by-two-4gpus": "among all ranks",
    "h200-parallel-hybrid-eager-4gpus": "among all ranks",
}
"""How gradients went in each: before and since they go among all ranks of a host at once."""


def hybrid_ratios() -> Table:
    """Hybrid sharding's time over that of schemes which are not hybrid, each pair in one run."""
    cells, shown = [], []
    for name, took in HYBRID_RUNS.items():
        schemes = [(row, SCHEMES[row.scheme]) for row in results(name, ParallelRow)]
        ours = [row for row, scheme in schemes if scheme.communicates and scheme.peer is None]
        most = max(row.rounds or 1 for row in ours)  # the first file has a shorter run beside it
        rows = [row for row in ours if row.rounds == most]
        hybrid = [row for row in rows if row.replicas == 2]
        flat = [row for row in rows if row.replicas is None]
        shown += [*hybrid, *flat]
        for own, other in ((own, other) for own in hybrid for other in flat):
            ratio = time_ratio(own, other)
            assert ratio.interval is not None, "three rounds and more"
            low, high = (f"{end:.3g}" for end in (ratio.interval.low, ratio.interval.high))
            blocks = [str(row.blocks_per_group or 1) for row in (own, other)]
            if SCHEMES[other.scheme].wrapper != "fsdp":
                blocks[1] = "–"
            case = [str(own.compile), took, blocks[0], other.scheme, blocks[1]]
            cells.append([*case, f"{ratio.value:.3f}× [{low}–{high}]", number(own.rounds)])
    titles = (
        *("compile", "gradients of hsdp, 2 × 2", "blocks a group", "beside", "its blocks a group"),
        *("hsdp's time over that [95 %]", "rounds"),
    )
    return text_table("hybrid-ratios", f"Each pair in one run; {where(shown)}", titles, cells)


def step8b() -> Table:
    """The leaderboard's step, ours and FSDP2's."""
    rows = results("h200-step8b", ParallelRow)
    wanted = (
        *columns.cases({"scheme": "scheme", "attention": "attention", "loss": "loss", "fused": "fused"}),
        columns.case("compiled", "compile"),
        Column("blocks checkpointed", lambda row: Path(str(row.case.get("checkpointing", "none"))).stem),
        columns.median("step on the slowest rank (ms)", "step"),
        *columns.values({"steps": "n", "forward (ms)": "forward_ms", "loss (ms)": "loss_ms"}),
        *columns.values({"backward (ms)": "backward_ms", "optimizer (ms)": "optimizer_ms"}),
        *columns.values({"peak (GiB)": "peak_gib", "reserved (GiB)": "peak_reserved_gib"}, digits=4),
        *columns.values({"gradients off by": "gradient_error", "allowed": "gradient_allowed"}),
        columns.value("clock (MHz)", "sm_clock_mhz"),
        columns.value("slowed by", "throttled_by"),
    )
    caption = "8 B, two GPUs, 32,768 tokens each, bf16-pure, fused AdamW; three runs, the last on another machine"
    return tabulate("step8b", f"{caption}; {where(rows)}", wanted, rows)


def plan_4gpus() -> Table:
    """What the plan said of four GPUs before they were measured, beside what was measured then."""
    said = {(row.compile, row.strategy, row.replicas): row for row in results("h200-plan-4gpus", PlanRow)}
    runs = ("h200-parallel-peers-4gpus", "h200-parallel-compiled-4gpus")
    rows = [row for name in runs for row in results(name, ParallelRow) if SCHEMES[row.scheme].peer is None]

    def by_plan(name: str, row: Row) -> float:
        return float(said[row.case["compile"], _strategy(row), row.case.get("replicas")].values[name])

    def beside(title: str, name: str) -> list[Column]:
        return [
            columns.value(title, name),
            Column("by plan", lambda row: number(by_plan(name, row))),
            Column("off by (%)", lambda row: number(100 * (by_plan(name, row) / float(row.values[name]) - 1), 2)),
        ]

    wanted = (
        *columns.cases({"compile": "compile", "scheme": "scheme", "replicas": "replicas"}),
        *beside("step (ms)", "step_ms"),
        columns.value("the host waits for the GPU (ms)", "wait_ms"),
        *beside("peak (GiB)", "peak_gib"),
    )
    caption = "predicted by the rates of one H200 and collectives of two"
    return tabulate("plan-4gpus", f"{setting(rows)}, {caption}; {where(rows)}", wanted, rows)


def _strategy(row: Row) -> str:
    return SCHEMES[str(row.case["scheme"])].planned_as or "single"


README_NAMES = {
    "single": "one GPU, no communication",
    "torch-ddp": "DistributedDataParallel, torch's",
    "bucketed-25": "DistributedDataParallel, ours",
    "torch-ddp-1000": "the same in buckets of 1,000 MB, torch's",
    "bucketed-1000": "the same in buckets of 1,000 MB, ours",
    "torch-zero": "sharded optimizer, torch's",
    "sharded-optimizer": "sharded optimizer, ours",
    "torch-fsdp2": "fully sharded, torch's FSDP2",
    "fsdp": "fully sharded, ours",
}
"""What README.md calls the schemes that it shows, in its order."""


def headline() -> Table:
    """The schemes of both, ours beside torch's."""
    rows = results("h200-parallel-large", ParallelRow)
    wanted = (
        Column("scheme", lambda row: README_NAMES[str(row.case["scheme"])]),
        columns.median("step (ms) [95 %]", "step"),
        *communication(rows),
        *columns.values({"sent by a rank (GiB)": "sent_gib", "peak (GiB)": "peak_gib"}),
    )
    shown = [row for name in README_NAMES for row in rows if row.scheme == name]
    caption = (
        "large (969 M) on two GPUs, bf16 autocast; without communication a rank takes the step of one GPU, and where "
        "the optimizer is sharded half of its update"
    )
    return tabulate("rows", f"{caption}; {where(shown)}", wanted, shown)


TABLES: Mapping[str, Callable[[], Table]] = {
    "parallel": parallel,
    "parallel-memory": parallel_memory,
    "parallel-zero": zero,
    "parallel-large": partial(parallel, "h200-parallel-large"),
    "parallel-memory-large": partial(parallel_memory, "h200-parallel-large"),
    "parallel-4gpus": partial(parallel, "h200-parallel-4gpus"),
    "parallel-rounds-4gpus": partial(parallel, "h200-parallel-rounds-4gpus"),
    "parallel-memory-rounds-4gpus": partial(parallel_memory, "h200-parallel-rounds-4gpus"),
    "parallel-compiled-rounds-4gpus": partial(parallel, "h200-parallel-compiled-rounds-4gpus"),
    **{name.removeprefix("h200-"): partial(parallel, name) for name in HYBRID_RUNS},
    "parallel-memory-hybrid-blocks-4gpus": partial(parallel_memory, "h200-parallel-hybrid-blocks-4gpus"),
    "hybrid-ratios": hybrid_ratios,
    "parallel-pinned-4gpus": partial(parallel, "h200-parallel-pinned-4gpus"),
    "plan-4gpus": plan_4gpus,
    "parallel-trace": partial(plain, "h200-parallel-trace", ParallelTraceRow),
    "collectives": partial(plain, "h200-collectives", CollectiveRow),
    "collectives-4gpus": partial(plain, "h200-collectives-4gpus", CollectiveRow),
    "collectives-fit-4gpus": partial(plain, "h200-collectives-4gpus", CollectiveFitRow),
    "collectives-fit": partial(plain, "h200-collectives", CollectiveFitRow),
    "parallel-compiled": partial(parallel, "h200-parallel-compiled"),
    "parallel-peers": partial(parallel, "h200-parallel-peers"),
    "parallel-ratios": parallel_ratios,
    "exposed": partial(
        of_rows,
        "h200-exposed",
        ParallelRow,
        columns.case("scheme", "scheme"),
        columns.median("step (ms) [95 %]", "step"),
        *columns.values({f"{name} (ms)": f"{name}_computing_ms" for name in PARTS if name != "communication"}),
        *columns.values({"exposed (ms)": "exposed_communication_ms", "of the step (%)": "exposed_share"}),
        *columns.values({"communication in all (ms)": "all_communication_ms", "calls": "collectives"}),
        *columns.values({"speed-up": "speedup", "samples/s": "samples_per_s"}),
        caption="small in bf16, batch 4 per GPU, context 512, on two GPUs; phases without their waits",
    ),
    "step8b": step8b,
    "step8b-trace": partial(plain, "h200-step8b", ParallelTraceRow),
    "step8b-families": partial(
        of_rows,
        "h200-step8b",
        ParallelFamilyRow,
        *columns.cases({"phase": "phase", "family": "family"}),
        columns.count("kernels", "kernels"),
        *columns.values({"ms": "ms", "share (%)": "share"}),
        caption="Kernels of rank 0 that compute in one profiled step, those of a millisecond or more",
        only=lambda row: (row.ms or 0) >= 1,
    ),
    "headline-parallel": headline,
}
