"""Two arms of `bench ab`: their ratio, with an interval that holds between runs, and what would have been found."""

from __future__ import annotations

from collections.abc import Sequence

from trainstep.report import columns
from trainstep.report.blocks import Section, section
from trainstep.report.findings import Finding, found, literal
from trainstep.report.numbers import numeric
from trainstep.report.tables import define, page_table
from trainstep.rows import RatioRow
from trainstep.rows.records import Row, of_kind

RATIOS = define(
    RatioRow,
    "Arms against each other, each run a process of its own",
    *columns.SETTINGS,
    *columns.cases({"mode": "mode", "warm-up": "warmup"}),
    *columns.words({"flag": "flag", "old": "old", "new": "new"}),
    *columns.values({"old (ms)": "old_ms", "new (ms)": "new_ms"}, digits=4),
    columns.ratio("speed-up", "speedup", between_runs=True),
    columns.value("runs a side", "runs"),
    columns.value("runs differ by, std (%)", "run_deviation", digits=2),
    columns.value("found 9 times of 10 (%)", "smallest_found", digits=2),
    columns.word("verdict", "verdict"),
    columns.OUTCOME,
)
TABLES = (RATIOS,)


def between_runs(rows: Sequence[Row]) -> list[Finding]:
    """Findings on what each pair of arms comes to."""
    every = []
    for row in of_kind(rows, RatioRow):
        if row.verdict is None or row.speedup_low is None or row.speedup_high is None:
            continue
        old, new = (literal(each if row.flag == "nothing" else f"--{row.flag} {each}") for each in (row.old, row.new))
        figures = {"low": row.speedup_low, "high": row.speedup_high, "runs": row.runs, "found": row.smallest_found}
        told = f"{new} is {{speedup:.3f}}× as fast as {old}"
        if row.verdict == "inconclusive":
            told = f"no difference between {old} and {new} was found ({{speedup:.3f}}×)"
        said = (
            f"{told[0].upper()}{told[1:]}, 95 % interval between runs {{low:.3f}}–{{high:.3f}}, from {{runs}} runs "
            "each."
        )
        if row.smallest_found is not None:
            said += " So many runs, differing as these do, find a difference of {found:share} 9 times of 10."
        every.append(found(f"ratio.{row.verdict}", said, speedup=numeric(row.speedup), **figures))
    return every


RULES = (between_runs,)


def ratios(rows: Sequence[Row]) -> Section | None:
    """The table of all pairs."""
    lead = "One process is one sample of an arm; the interval is Welch’s, for the logarithms of the runs’ medians."
    return section("ratios", "Between runs", "Arms against each other", lead, page_table(RATIOS, rows))


SECTIONS = (ratios,)
