"""What a table of each kind of record shows: its caption and its columns."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from trainstep.records import Record
from trainstep.report.numbers import NONE, count, number


@dataclass(frozen=True)
class Column:
    """One column of a table."""

    title: str
    """Header, with the unit."""
    cell: Callable[[Record], str]
    """The text of one row's cell."""
    brief: bool = True
    """Whether the terminal shows it too; files always do."""
    setting: bool = False
    """Whether it says what was run: when it is the same in several rows, it moves to the caption."""


def value_column(title: str, name: str, scale: float = 1, digits: int = 3, brief: bool = True) -> Column:
    """One of the record's values."""

    def cell(row: Record) -> str:
        value = row.values.get(name)
        scaled = value * scale if isinstance(value, float) and scale != 1 else value
        return number(scaled, digits)

    return Column(title, cell, brief)


def count_column(title: str, name: str, brief: bool = True) -> Column:
    """One of the record's values that says how many."""
    return Column(title, lambda row: count(row.values.get(name)), brief)


def case_column(title: str, name: str) -> Column:
    """One of the settings that identify the case."""

    def cell(row: Record) -> str:
        value = row.case.get(name)
        return f"{value:g}" if isinstance(value, float) else number(value)

    return Column(title, cell, setting=True)


def median_column(title: str, phase: str) -> Column:
    """The median with its 95 % interval."""

    def cell(row: Record) -> str:
        middle, low, high = (row.values.get(f"{phase}_{part}") for part in ("ms", "low_ms", "high_ms"))
        if middle is None or low is None or high is None:
            return number(middle)
        return f"{number(middle)} [{number(low)}–{number(high)}]"

    return Column(title, cell)


def mean_column(title: str, phase: str) -> Column:
    """Mean ± standard deviation."""

    def cell(row: Record) -> str:
        mean, std = row.values.get(f"{phase}_mean_ms"), row.values.get(f"{phase}_std_ms")
        return number(mean) if std is None else f"{number(mean)} ± {number(std, 2)}"

    return Column(title, cell, brief=False)


def ratio_column(title: str, name: str, brief: bool = True) -> Column:
    """A ratio with its interval."""

    def cell(row: Record) -> str:
        value, low, high = (row.values.get(name + part) for part in ("", "_low", "_high"))
        if value is None or low is None:
            return f"{number(value)}×" if value is not None else NONE
        return f"{number(value)}× [{number(low)}–{number(high)}]"

    return Column(title, cell, brief)


OUTCOME = Column(
    "outcome", lambda row: row.status if row.status == "ok" else f"{row.status}: {row.reason}", setting=True
)

SETTINGS = (
    *(case_column(name, name) for name in ("workload", "context", "batch", "precision", "compile", "attention")),
    case_column("loss kind", "loss"),
    case_column("checkpointing", "checkpointing"),
    case_column("optimizer kind", "optimizer"),
    case_column("seed", "seed"),
)

COLUMNS: Mapping[str, tuple[str, tuple[Column, ...]]] = {
    "workload": (
        "The workload",
        (
            case_column("workload", "workload"),
            value_column("parameters", "parameters"),
            value_column("weights (GiB)", "parameters_gib"),
            value_column("blocks", "blocks"),
            value_column("tokens per step", "tokens"),
            value_column("forward (TFLOP)", "forward_tflop"),
        ),
    ),
    "step": (
        "Time of one step and its phases, ms",
        (
            *SETTINGS,
            case_column("mode", "mode"),
            case_column("warm-up", "warmup"),
            case_column("pass", "repeat"),
            Column("n", lambda row: number(row.values.get("n")), setting=True),
            *(value_column(name, f"{name}_ms") for name in ("forward", "loss", "backward", "optimizer")),
            median_column("step [95 %]", "step"),
            *(
                mean_column(f"{name}, mean ± std", name)
                for name in ("forward", "loss", "backward", "optimizer", "step")
            ),
            value_column("host waits", "wait_ms", brief=False),
            value_column("first step", "first_step_ms"),
            value_column("tokens/s", "tokens_per_s", brief=False),
            value_column("TFLOP/s", "achieved_tflops", brief=False),
            value_column("utilisation (%)", "utilisation", 100, brief=False),
            value_column("peak (GiB)", "peak_gib"),
            OUTCOME,
        ),
    ),
    "rung": (
        "The ladder: one change per rung, each checked against the first rung's loss and gradients",
        (
            *SETTINGS[:3],
            Column("rung", lambda row: str(row.case["rung"])),
            median_column("step (ms) [95 %]", "step"),
            ratio_column("speed-up [95 %]", "speedup"),
            ratio_column("against the rung before", "gain", brief=False),
            value_column("peak (GiB)", "peak_gib"),
            value_column("utilisation (%)", "utilisation", 100, brief=False),
            value_column("gradient error", "gradient_error", digits=2),
            value_column("budget", "error_budget", digits=2),
            value_column("verdict", "verdict"),
            Column("kept", lambda row: "yes" if row.values.get("kept") else "no", brief=False),
            Column("reason", lambda row: row.reason, brief=False),
        ),
    ),
    "control": (
        "The baseline at the start of the ladder and at its end: the interval of their ratio should contain 1",
        (
            *SETTINGS[:3],
            value_column("start (ms)", "first_ms"),
            value_column("end (ms)", "again_ms"),
            ratio_column("end / start [95 %]", "ratio"),
            OUTCOME,
        ),
    ),
    "attention": (
        "Attention: median of the passes in ms; TFLOP/s counts causal attention as half, backward as 2.5 forwards",
        (
            *(case_column(name, name) for name in ("dtype", "causal", "batch", "heads", "head_dim", "seq")),
            Column("implementation", lambda row: str(row.case["impl"])),
            value_column("forward", "forward_ms"),
            value_column("backward", "backward_ms"),
            median_column("both [95 %]", "both"),
            value_column("TFLOP/s forward", "forward_tflops", brief=False),
            value_column("TFLOP/s backward", "backward_tflops", brief=False),
            value_column("TFLOP/s", "both_tflops"),
            value_column("before backward (GiB)", "before_backward_gib"),
            value_column("by formula (GiB)", "predicted_before_backward_gib", brief=False),
            value_column("peak (GiB)", "peak_gib"),
            value_column("peak by formula (GiB)", "predicted_peak_gib"),
            value_column("score matrices at the peak", "score_matrices_at_peak", brief=False),
            value_column("error of o", "o_error", digits=2, brief=False),
            value_column("check and compilation (s)", "check_s", digits=2, brief=False),
            value_column("graphs compiled", "compilations", brief=False),
            value_column("recompiled while timed", "recompilations_timed", brief=False),
            OUTCOME,
        ),
    ),
    "collective": (
        "Collectives: time on the slowest rank; bus bandwidth is bytes on each link of a ring over that time",
        (
            *(case_column(name, name) for name in ("backend", "dtype", "collective")),
            case_column("ranks", "world_size"),
            case_column("MB", "size_mb"),
            Column("n", lambda row: number(row.values.get("n")), setting=True),
            median_column("time (ms) [95 %]", "time"),
            mean_column("mean ± std", "time"),
            value_column("fastest rank (ms)", "fastest_rank_ms", brief=False),
            value_column("slowest rank (ms)", "slowest_rank_ms", brief=False),
            value_column("algorithm GB/s", "algorithm_gb_s"),
            value_column("bus GB/s", "bus_gb_s"),
            OUTCOME,
        ),
    ),
    "collective fit": (
        "What a call costs: an overhead, and bytes on each link at a bandwidth",
        (
            *(case_column(name, name) for name in ("backend", "dtype", "collective")),
            case_column("ranks", "world_size"),
            value_column("overhead (µs)", "overhead_us"),
            value_column("bus GB/s", "bus_gb_s"),
            value_column("sizes", "sizes"),
            value_column("worst error (%)", "worst_error", 100, digits=2),
        ),
    ),
    "ceiling": (
        "What this device reaches",
        (
            case_column("operation", "what"),
            value_column("TFLOP/s", "tflops"),
            value_column("GB/s, read + written", "gb_s"),
        ),
    ),
    "dtype": (
        "The dtype of everything in a training step; alike modules as one row",
        (
            *SETTINGS,
            case_column("module", "module"),
            value_column("class", "class"),
            value_column("modules", "modules"),
            *(value_column(name, name) for name in ("parameters", "inputs", "outputs", "gradients")),
            OUTCOME,
        ),
    ),
    "accumulation": (
        "0.01 added a thousand times",
        (
            case_column("accumulator", "accumulator"),
            case_column("addend", "addend"),
            Column("sum", lambda row: f"{row.values['total']:.4f}"),
            value_column("why", "why"),
        ),
    ),
}
"""For every kind of record: its table's caption and columns."""
