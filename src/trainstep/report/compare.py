"""Two result files, or two passes of one, row by row: a ratio with its interval, and a verdict only where it is due.

No verdict is given on times of steps that train otherwise, as far as their losses (`report.losses`) and tokens tell.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, compress
from typing import Any

from trainstep.base.config import CASE, settings_with
from trainstep.base.errors import UsageError
from trainstep.base.stats import RUN_SPREAD, WITHIN_RUN, Ratio, in_rounds, ratio_of_passes, ratio_of_runs, verdict
from trainstep.report import breakdown
from trainstep.report.blocks import Headline, Section, Sentences, section
from trainstep.report.columns import Cell
from trainstep.report.headlines import change_of
from trainstep.report.losses import WRITTEN, Losses, hold, tokens_of
from trainstep.report.numbers import gib, number
from trainstep.report.subjects import findings
from trainstep.report.subjects.run import UNEVEN
from trainstep.report.tables import LONGEST, Table, text_table, with_shapes
from trainstep.rows.records import Row, Scalar

ACROSS = ("workload", *settings_with(CASE, without=("seed",)), "mode", "warmup", "timing", "scheme")
"""Columns in which compared rows may be allowed to differ."""
MATCHED_BY = {
    "step": ("kind", *ACROSS),
    "change": ("kind", "workload", "batch", "context", "change"),
    "sweep": (),
    "script": ("kind", "workload", "updates", "rank"),
    "train": ("kind", *ACROSS, "world_size"),
}
"""The kinds of records that carry a step's samples, and the columns by which their rows are matched; none: all."""
CONDITIONS = ("device", "torch", "threads", "ranks")
"""Facts that a ratio of times is a ratio of, too: columns of the environment, and the number of ranks."""

CaseKey = tuple[tuple[str, ...], tuple[Scalar, ...]]  # columns, the kind first, and their values
WINDOWS = 8  # of a run: the least number whose median has an interval in a ratio, and one more
TIMES, LOSSES = ("old (ms)", "new (ms)", "speed-up", "95 % interval"), ("losses differ by", "allowed")
LOSSES_DIFFER, WORK_DIFFERS, BATCH_GREW = "losses differ", "work differs", "moved to batch"
"""Words in the place of a verdict on times."""


@dataclass(slots=True)  # not frozen, which takes twice the time to make
class Comparison:
    """A case in both files."""

    key: CaseKey
    speedup: Ratio  # Old median over new median: above 1 is faster
    old_ms: float
    new_ms: float
    losses: Losses
    """Losses of the later rows against the first old one, in the row where they are worst."""
    tokens: tuple[float, float] | None
    """Tokens per step, old and new, where they differ; of a script samples."""
    batch: tuple[float, float] | None
    """Milliseconds to make the next batch, old and new, where rows have them."""
    rows: tuple[Any, Any]
    """The first row of either file."""
    verdict: str
    """faster, slower or inconclusive. Where that would be of other work, "losses differ" or "work differs"; where the
    batch takes as much longer as the step takes less, so that nothing is left to call faster, "moved to batch"."""

    def __str__(self) -> str:
        case = ", ".join(number(each) for each in self.key[1][1:] if each is not None)
        return f"{case:<20.20} {number(self.old_ms)} → {number(self.new_ms)} ms   {self.ratio}   {self.verdict}"

    @property
    def case(self) -> dict[str, Scalar]:
        """The columns by which it was matched; of many comparisons few are shown."""
        return dict(zip(self.key[0][1:], self.key[1][1:], strict=True))

    @property
    def ratio(self) -> str:
        """Speed-up with its interval."""
        found = self.speedup.interval
        return f"{self.speedup.value:.3f}×" + (f" [{found.low:.3f}–{found.high:.3f}]" if found else "")

    def is_slower_by(self, share: float) -> bool | None:
        """True if the same work certainly takes more than this share longer: the whole interval says so. None where a
        part of the interval does, or there is none."""
        found, least = self.speedup.interval, 1 / (1 + share)
        if self.verdict not in ("slower", "inconclusive"):
            return False
        return None if found is None or found.low < least <= found.high else found.high < least


@dataclass(frozen=True)
class Unmatched:
    """A case that was not compared."""

    case: CaseKey
    old: str
    """State of the case in the first file: `measured`, `no row`, or a status with its reason."""
    new: str
    """The same of the second file."""
    is_lost: bool
    """True if the first file has its times and the second has a row without any: it went wrong, or failed."""

    def __str__(self) -> str:
        return f"{told(self.case)}: {self.old} in the first file, {self.new} in the second"


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
    # The error names the side that has nothing, as the remedy is another there.
    if not (before and after):
        which = "the first file" if after else "the second file" if before else "either file"
        raise UsageError(
            f"no timed step in {which}: compare reads measured rows of the kinds {', '.join(MATCHED_BY)}, which "
            f"the commands bench, analyze, sweep, run and train write{_lost(old, new, across)}"
        )
    shared = [key for key in before if key in after]
    if not shared:
        differing = _differing(old, new)
        advice = f"; they differ in {', '.join(differing)}: --across {','.join(differing)} compares them"
        ranks = [each for each in other_conditions(old, new) if each.startswith("ranks ")]
        advice = f"; {ranks[0]}: compare runs with as many ranks" if ranks else advice if differing else ""
        raise UsageError(
            "the two files have no measured case in common "
            f"(the first has {len(before)} cases, the second {len(after)}){advice}"
            f"{_lost(old, new, across)}"
        )
    return [_compare_case(key, before[key], after[key], spread) for key in shared]


def _lost(old: Sequence[Row], new: Sequence[Row], across: Collection[str]) -> str:
    """Ends an error with the first case that the second file has without times; empty where there is none."""
    return next((f"; {each}" for each in unmatched(old, new, across) if each.is_lost), "")


def _cases(records: Sequence[Row], across: Collection[str]) -> dict[CaseKey, list[Row]]:
    if unknown := sorted(set(across) - set(ACROSS)):
        raise UsageError(f"cannot compare across {unknown[0]!r}; expected some of {', '.join(ACROSS)}")
    found, every = dict[CaseKey, list[Row]](), _passes(records)
    for key, passes in every.items() if across else ():
        kept = without(key, across)
        if kept in found:
            raise UsageError(
                f"--across {','.join(across)} would take several cases of one file for the same; give files in which "
                "these columns have one value each"
            )
        found[kept] = passes
    return found if across else every


def _differing(old: Sequence[Row], new: Sequence[Row]) -> list[str]:
    """The columns that have one value in each file, and another in the other, if leaving them out makes cases match."""
    sides = [[*_passes(old)], [*_passes(new)]]
    values = {name: [{dict(zip(*key, strict=True)).get(name) for key in keys} for keys in sides] for name in ACROSS}
    apart = [name for name, (a, b) in values.items() if len(a) == len(b) == 1 and a != b]
    before, after = ({without(key, apart) for key in keys} for keys in sides)
    return apart if before & after else []


def repeatability(records: Sequence[Row], spread: float = RUN_SPREAD) -> list[Comparison]:
    """Every later pass over a case against its first: ratios whose interval should contain 1."""
    found = _passes(row for row in records if row.case.get("run") is None).items()
    return [_compare_case(key, passes[:1], [later], spread) for key, passes in found for later in passes[1:]]


def _passes(records: Iterable[Row]) -> dict[CaseKey, list[Row]]:
    found: dict[CaseKey, list[Row]] = {}
    for record in records:
        if is_measured(record):
            times = (*record.samples["step"], *record.samples.get("batch", ()))
            if bad := [each for each in times if each is None or not 0 < each < math.inf]:
                case = told((tuple(record.case), tuple(record.case.values())))
                raise UsageError(
                    f"the {record.kind} row of {case} has samples that are no times: {bad[0]}; expected milliseconds "
                    "above 0"
                )
            found.setdefault(key_of(record), []).append(record)
    return found


def _compare_case(key: CaseKey, old: Sequence[Row], new: Sequence[Row], spread: float) -> Comparison:
    ratio, old_ms, new_ms = _ratio_of(old, new, "step", spread)
    first, *others = *old, *new
    held = [hold(first, row) for row in others]
    losses = max(held, key=lambda each: each.severity) if len(held) > 1 else held[0]
    tokens = next(filter(None, [_other_tokens(first, row) for row in others]), None)
    batch = None
    said: str = verdict(ratio)
    if first.samples.get("batch") and all(row.samples.get("batch") for row in others):
        of_batch, before, after = _ratio_of(old, new, "batch", spread)
        batch = before, after
        grown_ms = after - before if verdict(of_batch) == "slower" else 0.0
        # Work that moved from the step into drawing its batch is no gain, as both are waited for.
        if said == "faster" and ratio.interval and ratio.interval.low * new_ms <= new_ms + grown_ms:
            said = BATCH_GREW
    said = LOSSES_DIFFER if losses.differ else WORK_DIFFERS if tokens else said
    return Comparison(key, ratio, old_ms, new_ms, losses, tokens, batch, (old[0], new[0]), said)


def _ratio_of(old: Sequence[Row], new: Sequence[Row], name: str, spread: float) -> tuple[Ratio, float, float]:
    """Ratio of one kind of samples: old over new, and the medians of both in milliseconds."""
    sides = [[row.samples[name] for row in rows] for rows in (old, new)]
    every = sides[0] + sides[1]
    # Batches of a loader's workers come in bursts, which a median step leaves out and a window of steps does not.
    if old[0].kind == "script" and any(statistics.fmean(run) > (1 + UNEVEN) * statistics.median(run) for run in every):
        sides = [[[*map(statistics.fmean, in_rounds(run, min(WINDOWS, len(run))))] for run in side] for side in sides]
    before, after = sides
    old_ms, new_ms = statistics.median(chain.from_iterable(before)), statistics.median(chain.from_iterable(after))
    # Only runs in processes of their own show how far runs differ; passes of one process are alike by more.
    if all(len(rows) > 1 and len({row.case.get("run") for row in rows} - {None}) == len(rows) for rows in (old, new)):
        return ratio_of_runs(before, after), old_ms, new_ms
    return ratio_of_passes(old_ms / new_ms, before, after, spread), old_ms, new_ms


def _other_tokens(old: Row, new: Row) -> tuple[float, float] | None:
    """Tokens per step of both, where they differ by more than figures in files are rounded."""
    before, after = tokens_of(old), tokens_of(new)
    if before is None or after is None or abs(before - after) <= 2 * WRITTEN * before:
        return None
    return before, after


def _said(compared: Comparison) -> str:
    """The verdict, which one run a side, or losses that do not tell, never give without saying so."""
    if compared.verdict not in ("faster", "slower"):
        return compared.verdict
    where = "" if compared.speedup.between_runs else f" {WITHIN_RUN}"
    return f"{compared.verdict}{where}{', not checked' if compared.losses.not_told else ''}"


def overall(comparisons: Sequence[Comparison]) -> str:
    """The verdict on all cases, with the figures of the first that is slower, or else faster."""
    first, where, cases = _told_first(comparisons)
    return f"{first.verdict.upper()}   speed-up {first.ratio} {where}   {cases}"


def _told_first(comparisons: Sequence[Comparison]) -> tuple[Comparison, str, str]:
    """The case that decides, what its interval covers, and how many cases have its verdict."""
    first = max(comparisons, key=lambda each: (each.verdict == "slower", each.verdict == "faster"))
    alike = sum(each.verdict == first.verdict for each in comparisons)
    where = "between runs" if first.speedup.between_runs else WITHIN_RUN
    return first, where, f"{alike} of {len(comparisons)} cases"


def before_and_after(
    comparisons: Sequence[Comparison], old: Sequence[Row], new: Sequence[Row], notes: Sequence[str], caption: str
) -> list[Section]:
    """The page: the verdict, the phases of the case that decides, findings that went and came, and every case.

    Args:
        notes: on cases that were left out and conditions that differ.
    """
    first, where, cases = _told_first(comparisons)
    stats = [("Step", f"{number(first.old_ms)} → {number(first.new_ms)} ms", told(first.key))]
    stats += [("Peak memory", peak, "of one step")] if (peak := change_of(*first.rows, "peak_gib", gib, "")) else []
    figure = Cell(f"{first.speedup.value:.2f}×", first.speedup.value, "speedup")
    before, after = findings(old), findings(new)
    ids = [{each.id for each in side} for side in (before, after)]
    gone = [each.sentence for each in before if each.id not in ids[1]]
    came = [each.sentence for each in after if each.id not in ids[0]]
    topics = {"Gone": gone, "New": came, "Comparison": notes}
    said = Sentences({topic: sentences for topic, sentences in topics.items() if sentences})
    head = Headline(figure, first.verdict, cases, stats, f"{first.ratio}, 95 % interval {where}.")
    blocks = head, breakdown.before_and_after(*first.rows), said
    every = section("cases", "Cases", "Every case of both files", "", comparison_table(comparisons[:LONGEST], caption))
    return [each for each in (section("summary", "Summary", "Summary", "", *blocks), every) if each is not None]


def comparison_table(comparisons: Sequence[Comparison], caption: str) -> Table:
    """The comparisons as a table, with the settings that differ between rows as columns."""
    cases = [each.case for each in comparisons]
    names = list(dict.fromkeys(chain.from_iterable(cases)))
    differing = [name for name in names if len({case.get(name) for case in cases}) > 1]
    shown = differing or [name for name in ("workload",) if name in names]
    tokens = ["tokens or samples per step"] if any(each.tokens for each in comparisons) else []
    batches = ["batch (ms)"] if any(each.batch for each in comparisons) else []

    def interval(ratio: Ratio) -> str:
        if ratio.interval is None:
            return "needs 7 samples a side"
        where = "between runs" if ratio.between_runs else WITHIN_RUN
        return f"[{ratio.interval.low:.3f}, {ratio.interval.high:.3f}] {where}"

    rows = []
    for each in comparisons:
        times = number(each.old_ms, 4), number(each.new_ms, 4), f"{each.speedup.value:.3f}×", interval(each.speedup)
        losses = number(each.losses.difference, 2), number(each.losses.allowed, 2)
        if each.losses.not_told:
            losses = losses[0], f"not checked: {each.losses.not_told}"
        work = [" → ".join(f"{count:,.0f}" for count in each.tokens or ())] if tokens else []
        batch = [" → ".join(number(ms) for ms in each.batch or ())] if batches else []
        settings = (number(each.case.get(name)) for name in shown)
        rows.append((str(each.key[1][0]), *settings, *times, *batch, *work, *losses, _said(each)))
    columns = ("kind", *shown, *TIMES, *batches, *tokens, *LOSSES, "verdict")
    sizes = (str(each.case.get(name)) for each in comparisons for name in shown if name in ("workload", "size"))
    return text_table("compare", with_shapes(caption, sizes), columns, rows)


def key_of(row: Row) -> CaseKey:
    """The kind of a row and the settings by which it is matched; its kind is one of `MATCHED_BY`."""
    names = MATCHED_BY[row.kind] or ("kind", *sorted(row.case))
    return names, (row.kind, *map(row.case.get, names[1:]))


def without(key: CaseKey, across: Collection[str]) -> CaseKey:
    """The key without the columns in which rows may differ."""
    kept = [name not in across for name in key[0]]
    return (tuple(compress(key[0], kept)), tuple(compress(key[1], kept))) if across else key


def told(key: CaseKey) -> str:
    """A key in words; settings that are not set are left out."""
    return ", ".join(f"{name} {number(value)}" for name, value in zip(*key, strict=True) if value is not None)


def is_measured(row: Row) -> bool:
    """True if a row has times of a step."""
    return row.kind in MATCHED_BY and row.status == "ok" and bool(row.samples.get("step"))


def unmatched(old: Sequence[Row], new: Sequence[Row], across: Collection[str] = ()) -> list[Unmatched]:
    """The cases of either file of which not both have times, in order, and those of which a row went wrong."""
    before, after = _states(old, across), _states(new, across)
    pairs = ((key, before.get(key, "no row"), after.get(key, "no row")) for key in before | after)
    apart = (pair for pair in pairs if set(pair[1:]) != {"measured"})
    return [Unmatched(key, was, now, was == "measured" and now != "no row") for key, was, now in apart]


def other_conditions(old: Sequence[Row], new: Sequence[Row]) -> list[str]:
    """In which of `CONDITIONS` the measured rows of both files differ, as `device A → B`."""
    found = []
    sides = [{(id(row.environment), _fact(row)): row for row in rows if is_measured(row)} for rows in (old, new)]
    for name in CONDITIONS:
        before, after = ({_fact(row, name) for row in side.values()} for side in sides)
        if before != after:
            found.append(f"{name} {' → '.join(' and '.join(sorted(map(number, side))) for side in (before, after))}")
    return found


def _fact(row: Row, name: str = "ranks") -> Scalar:
    return getattr(row, "world_size", None) or 1 if name == "ranks" else row.environment.get(name)


def _states(rows: Sequence[Row], across: Collection[str]) -> dict[CaseKey, str]:
    """State of each case: `measured`, or why one of its rows was not."""
    found: dict[CaseKey, str] = {}
    for row in rows:
        if row.kind in MATCHED_BY:
            key = without(key_of(row), across)
            state = "measured" if is_measured(row) else _failed(row)
            if found.setdefault(key, state) == "measured" != state:
                found[key] = state
    return found


def _failed(row: Row) -> str:
    return "no times" if row.status == "ok" else f"{row.status} ({row.reason})" if row.reason else row.status
