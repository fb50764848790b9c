"""Two result files, or two passes of one, row by row: a ratio with its interval, and a verdict only where it is due."""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from trainstep.errors import UsageError
from trainstep.records import Row, Scalar
from trainstep.report.numbers import number
from trainstep.report.tables import Table, text_table
from trainstep.stats import RUN_SPREAD, WITHIN_RUN, Interval, Ratio, ratio_interval_of, ratio_of_runs, verdict

ACROSS = (
    *("workload", "batch", "context", "precision", "compile", "attention", "loss", "fused", "optimizer"),
    *("checkpointing", "mode", "warmup", "timing"),
)  # The columns in which compared rows may be allowed to differ
MATCHED_BY = {"step": ACROSS, "rung": ("workload", "batch", "context", "rung"), "sweep": ()}
"""The kinds of records that carry a step's samples, and the columns by which their rows are matched; none: all."""

CaseKey = tuple[tuple[str, Scalar], ...]


@dataclass(frozen=True)
class Comparison:
    """One case in both files."""

    kind: str
    case: Mapping[str, Scalar]
    speedup: Ratio  # Old median over new median: above 1 is faster
    old_ms: float
    new_ms: float
    loss_difference: float | None
    """The largest relative difference of the training losses, step by step; None where they cannot be compared."""
    verdict: str


def compare(
    old: Sequence[Row], new: Sequence[Row], spread: float = RUN_SPREAD, across: Collection[str] = ()
) -> list[Comparison]:
    """Compare the step times of every case that ran in both.

    Where each file has several runs of a case (rows with a `run`, each a process of its own), the interval holds
    between runs. Otherwise it is true within the run alone; passes over one case (`--repeat`) are then each compared
    with each of the other file's, and the interval covers all of them.

    Args:
        spread: relative difference by which intervals within a run are widened.
        across: columns in which the two files may differ, such as precision.

    Raises:
        UsageError: the files have no case in common, or columns in `across` tell cases of one file apart.
    """
    before, after = _cases(old, across), _cases(new, across)
    if not (before and after):
        which = "the first file" if after else "the second file" if before else "either file"
        raise UsageError(
            f"no timed step in {which}: compare reads measured rows of the kinds {', '.join(MATCHED_BY)}, which "
            "the commands bench, analyze and sweep write"
        )
    shared = [key for key in before if key in after]
    if not shared:
        differing = _differing(old, new)
        advice = f"; they differ in {', '.join(differing)}: --across {','.join(differing)} compares them"
        raise UsageError(
            "the two files have no measured case in common "
            f"(the first has {len(before)} cases, the second {len(after)}){advice if differing else ''}"
        )
    return [_compare_case(key, before[key], after[key], spread) for key in shared]


def _cases(records: Sequence[Row], across: Collection[str]) -> dict[CaseKey, list[Row]]:
    if unknown := sorted(set(across) - set(ACROSS)):
        raise UsageError(f"cannot compare across {unknown[0]!r}; expected some of {', '.join(ACROSS)}")
    found: dict[CaseKey, list[Row]] = {}
    for key, passes in _passes(records).items():
        kept = tuple((name, value) for name, value in key if name not in across)
        if kept in found:
            raise UsageError(
                f"--across {','.join(across)} would take several cases of one file for the same; give files in which "
                "these columns have one value each"
            )
        found[kept] = passes
    return found


def _differing(old: Sequence[Row], new: Sequence[Row]) -> list[str]:
    """The columns that have one value in each file, and another in the other, if leaving them out makes cases match."""
    before, after = ([dict(key) for key in _passes(records)] for records in (old, new))
    values = {name: [{case.get(name) for case in cases} for cases in (before, after)] for name in ACROSS}
    apart = [name for name, (a, b) in values.items() if len(a) == len(b) == 1 and a != b]
    rest = [
        {tuple(item for item in case.items() if item[0] not in apart) for case in cases} for cases in (before, after)
    ]
    return apart if rest[0] & rest[1] else []


def repeatability(records: Sequence[Row], spread: float = RUN_SPREAD) -> list[Comparison]:
    """Every later pass over a case against its first: ratios whose interval should contain 1."""
    found = _passes(row for row in records if row.case.get("run") is None).items()
    return [_compare_case(key, passes[:1], [later], spread) for key, passes in found for later in passes[1:]]


def _passes(records: Iterable[Row]) -> dict[CaseKey, list[Row]]:
    found: dict[CaseKey, list[Row]] = {}
    for record in records:
        if record.kind in MATCHED_BY and record.status == "ok" and record.samples.get("step"):
            if bad := [x for x in record.samples["step"] if x is None or not 0 < x < math.inf]:
                told = ", ".join(f"{name} {number(value)}" for name, value in record.case.items())
                raise UsageError(
                    f"the {record.kind} row of {told} has samples that are no times: {bad[0]}; expected milliseconds "
                    "above 0"
                )
            case = record.case
            names = MATCHED_BY[record.kind] or sorted(case)
            key = (("kind", record.kind), *zip(names, map(case.get, names), strict=True))
            found.setdefault(key, []).append(record)
    return found


def _compare_case(key: CaseKey, old: Sequence[Row], new: Sequence[Row], spread: float) -> Comparison:
    before, after = ([row.samples["step"] for row in rows] for rows in (old, new))
    are_runs = all(len({row.case.get("run") for row in rows} - {None}) == len(rows) > 1 for rows in (old, new))
    ratio = ratio_of_runs(before, after) if are_runs else _ratio_of_passes(before, after, spread)
    (_, kind), *case = key
    losses = _loss_difference(old[0], new[0])
    return Comparison(str(kind), dict(case), ratio, _median(before), _median(after), losses, verdict(ratio))


def _ratio_of_passes(before: Sequence[Sequence[float]], after: Sequence[Sequence[float]], spread: float) -> Ratio:
    """The ratio of all samples; its interval covers those of each pass against each, whose ends are the passes' own."""
    value = _median(before) / _median(after)
    sides = [[ratio_interval_of(each) for each in side] for side in (before, after)]
    over, under = ([each for each in side if each is not None] for side in sides)
    if len(over) < len(before) or len(under) < len(after):
        return Ratio(value, None)
    low = min(each.low for each in over) / max(each.high for each in under) / (1 + spread)
    return Ratio(value, Interval(low, max(each.high for each in over) / min(each.low for each in under) * (1 + spread)))


def _median(passes: Sequence[Sequence[float]]) -> float:
    return statistics.median(sample for each in passes for sample in each)


def _loss_difference(old: Row, new: Row) -> float | None:
    """Of one seed, steps see the same batches from the same weights, warm-up included.

    Infinite if a loss is not finite. None where a file has no losses, or where the seeds differ.
    """
    if old.case.get("seed") != new.case.get("seed"):
        return None
    pairs = zip(old.samples.get("training_loss", ()), new.samples.get("training_loss", ()), strict=False)
    return max((_apart(a, b) for a, b in pairs), default=None)


def _apart(old: float | None, new: float | None) -> float:
    """The relative difference of two losses; records have None for one that is not finite."""
    if old is None or new is None or not math.isfinite(old - new):
        return math.inf
    return abs(old - new) / abs(old) if old else abs(new)


def _said(compared: Comparison) -> str:
    """The verdict, which one run a side never gives without saying so."""
    is_qualified = compared.verdict != "inconclusive" and not compared.speedup.between_runs
    return f"{compared.verdict} {WITHIN_RUN}" if is_qualified else compared.verdict


def comparison_table(comparisons: Sequence[Comparison], caption: str) -> Table:
    """The comparisons as a table, with the settings that differ between rows as columns."""
    names = list(dict.fromkeys(name for each in comparisons for name in each.case))
    differing = [name for name in names if len({each.case.get(name) for each in comparisons}) > 1]
    shown = differing or [name for name in ("workload",) if name in names]
    losses = ["losses differ by"] if any(each.loss_difference is not None for each in comparisons) else []

    def interval(ratio: Ratio) -> str:
        if ratio.interval is None:
            return "needs 7 samples a side"
        where = "between runs" if ratio.between_runs else WITHIN_RUN
        return f"[{ratio.interval.low:.3f}, {ratio.interval.high:.3f}] {where}"

    rows = []
    for each in comparisons:
        times = number(each.old_ms, 4), number(each.new_ms, 4), f"{each.speedup.value:.3f}×", interval(each.speedup)
        apart = [number(each.loss_difference, 2)] if losses else []
        rows.append((each.kind, *(number(each.case.get(name)) for name in shown), *times, *apart, _said(each)))
    columns = ("kind", *shown, "old (ms)", "new (ms)", "speed-up", "95 % interval", *losses, "verdict")
    return text_table("compare", caption, columns, rows)
