"""Tables of data parallel training: schemes, their memory, their traced steps, and collectives."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from tables import RESULTS, WORDS, results, setting, where
from trainstep.base.schemes import SCHEMES
from trainstep.bench.parallel.ratios import ratios_alike, time_ratio
from trainstep.report import columns
from trainstep.report.columns import Column
from trainstep.report.numbers import number
from trainstep.report.tables import Table, tabulate, text_table
from trainstep.rows import ParallelRow, PlanRow
from trainstep.rows.records import Row

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


HYBRID_RUNS = WORDS["hybrid-ratios"]
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


TABLES: Mapping[str, Callable[[], Table]] = {
    "hybrid-ratios": hybrid_ratios,
    "plan-4gpus": plan_4gpus,
    "parallel-ratios": parallel_ratios,
}
