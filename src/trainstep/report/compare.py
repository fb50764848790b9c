"""Two result files, or two passes of one, row by row: a ratio with its interval, and a verdict only where it is due."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from trainstep.errors import UsageError
from trainstep.measure.stats import RUN_SPREAD, Interval, Ratio, ratio_of_medians, verdict
from trainstep.report.numbers import number
from trainstep.report.records import Record, Scalar
from trainstep.report.tables import Table

MATCHED_BY = {
    "step": (
        *("workload", "batch", "context", "precision", "compile", "attention", "loss", "optimizer", "checkpointing"),
        *("mode", "warmup"),
    ),
    "rung": ("workload", "batch", "context", "rung"),
}
"""The kinds of records that carry a step's samples, and the columns by which their rows are matched."""

CaseKey = tuple[tuple[str, Scalar], ...]


@dataclass(frozen=True)
class Comparison:
    """One case in both files."""

    kind: str
    case: Mapping[str, Scalar]
    speedup: Ratio
    """Old median over new median: above 1 is faster."""
    old_ms: float
    new_ms: float
    verdict: str


def compare(old: Sequence[Record], new: Sequence[Record], spread: float = RUN_SPREAD) -> list[Comparison]:
    """Compare the step times of every case that ran in both.

    Passes over one case (`--repeat`) are each compared with each of the other file's, and the interval covers all of
    them: what differs between passes differs for reasons that are not inside a pass.

    Args:
        spread: relative difference between runs of one case, by which every interval is widened.

    Raises:
        UsageError: the files have no case in common.
    """
    before, after = _passes(old), _passes(new)
    shared = [key for key in before if key in after]
    if not shared:
        raise UsageError(
            "the two files have no measured case in common; compare runs of the same workload, settings and kind "
            f"(the first has {len(before)} cases, the second {len(after)})"
        )
    return [_compare_case(key, before[key], after[key], spread) for key in shared]


def repeatability(records: Sequence[Record], spread: float = RUN_SPREAD) -> list[Comparison]:
    """Every later pass over a case against its first: ratios whose interval should contain 1."""
    return [
        _compare_case(key, passes[:1], [later], spread)
        for key, passes in _passes(records).items()
        for later in passes[1:]
    ]


def _passes(records: Iterable[Record]) -> dict[CaseKey, list[Sequence[float]]]:
    found: dict[CaseKey, list[Sequence[float]]] = {}
    for record in records:
        if record.kind in MATCHED_BY and record.status == "ok" and record.samples.get("step"):
            key = (("kind", record.kind), *((name, record.case.get(name)) for name in MATCHED_BY[record.kind]))
            found.setdefault(key, []).append(record.samples["step"])
    return found


def _compare_case(
    key: CaseKey, old: Sequence[Sequence[float]], new: Sequence[Sequence[float]], spread: float
) -> Comparison:
    everything = ratio_of_medians([x for each in old for x in each], [x for each in new for x in each], spread)
    pairs = [ratio_of_medians(a, b, spread).interval for a in old for b in new]
    whole = [interval for interval in pairs if interval is not None]
    interval = None
    if len(whole) == len(pairs):
        interval = Interval(min(each.low for each in whole), max(each.high for each in whole))
    ratio = Ratio(everything.value, interval)
    (_, kind), *case = key
    return Comparison(
        kind=str(kind),
        case=dict(case),
        speedup=ratio,
        old_ms=_median(old),
        new_ms=_median(new),
        verdict=verdict(ratio),
    )


def _median(passes: Sequence[Sequence[float]]) -> float:
    return statistics.median(sample for each in passes for sample in each)


def comparison_table(comparisons: Sequence[Comparison], caption: str) -> Table:
    """The comparisons as a table, with the settings that differ between rows as columns."""
    names = list(dict.fromkeys(name for each in comparisons for name in each.case))
    differing = [name for name in names if len({each.case.get(name) for each in comparisons}) > 1]
    shown = differing or ["workload"]

    def interval(ratio: Ratio) -> str:
        return f"[{ratio.interval.low:.3f}, {ratio.interval.high:.3f}]" if ratio.interval else "needs 7 samples a side"

    return Table(
        name="compare",
        caption=caption,
        columns=("kind", *shown, "old (ms)", "new (ms)", "speed-up", "95 % interval", "verdict"),
        rows=tuple(
            (
                each.kind,
                *(number(each.case.get(name)) for name in shown),
                number(each.old_ms, 4),
                number(each.new_ms, 4),
                f"{each.speedup.value:.3f}×",
                interval(each.speedup),
                each.verdict,
            )
            for each in comparisons
        ),
    )
