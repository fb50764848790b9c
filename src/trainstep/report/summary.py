"""The page's first screen: what was gained or how long a step takes and how far that can be believed, where the time
goes, what matters most, and what to write for it; then all findings."""

from __future__ import annotations

import re
from collections.abc import Sequence

from trainstep.base.config import CHANGES, Change
from trainstep.base.stats import WITHIN_RUN
from trainstep.report.blocks import TOPICS, Advice, Block, Finding, Flags, Line, Section, Sentences
from trainstep.report.breakdown import breakdown
from trainstep.report.cards import alarms, cards
from trainstep.report.columns import Cell, ratio_cell
from trainstep.report.headlines import change_of, headlines
from trainstep.report.numbers import gib
from trainstep.report.subjects import script_ladder
from trainstep.report.subjects.ladder_findings import (
    BASELINE,
    base_name,
    base_names,
    climbs,
    credited,
    disputing,
    kept_rungs,
    recommended_flags,
    with_controls,
)
from trainstep.rows import RungRow, ScriptRungRow
from trainstep.rows.records import Row


def summary(records: Sequence[Row], found: Sequence[Finding], sections: Sequence[Section]) -> Section | None:
    """What dominates, what to change, what was gained.

    Args:
        records: all rows.
        found: what the rules say of them.
        sections: the page's others, for links to the evidence.
    """
    blocks: list[Block] = [
        block
        for block in (alarms(found, sections), *headlines(records, found), breakdown(records))
        if block is not None
    ]
    chosen = cards(records, found, sections)
    blocks += [chosen] if chosen is not None else []
    blocks += _advice(records)
    if found:
        topics: dict[str, list[str]] = {}
        for finding in found:
            topic = TOPICS[finding.topic]
            topics.setdefault(topic, []).append(finding.sentence.removeprefix(f"{topic}: "))
        blocks.append(Sentences(topics, is_folded=chosen is not None))
    return Section("summary", "Summary", "Summary", "", blocks) if blocks else None


def _advice(records: Sequence[Row]) -> list[Block]:
    """Lines for the user's own script, with what each was measured to bring, and flags for trainstep's commands."""
    blocks: list[Block] = []
    for place, (name, climb) in enumerate(climbs(records).items()):
        own, suffix = with_controls(climb, records), f"-{place}" if place else ""
        whose, kept = f" ({name})" if name else "", kept_rungs(climb)
        if kept and disputing(kept, own) is None and (lines := _lines(kept)):
            note = f"Each gain is over the lines above it, {WITHIN_RUN}, with its 95 % interval; {_TEMPLATE}"
            blocks.append(Advice(f"What to write in your own script{whose}", note, lines, f"lines{suffix}"))
        if flags := recommended_flags(own):
            says = f"For trainstep’s own commands, add these flags{whose}"
            blocks.append(Flags(re.split(r" (?=--)", flags), says, f"flags{suffix}"))
    last = script_ladder.top(records)
    if last is not None and last.speedup_low is not None and last.speedup_low > 1:
        there, gone = script_ladder.kept_lines(records)
        note = f"Each gain is over the lines above it, between runs, with its 95 % interval; {_TEMPLATE}"
        for row in gone:
            note += f" {row.rung} had brought {ratio_cell(row, 'gain').plain} before another line took its place."
        blocks.append(Advice("What to write in the script", note, [_script_line(row) for row in there], "script-lines"))
    return blocks


_TEMPLATE = "names and … stand for what your script has."


def _lines(kept: Sequence[RungRow]) -> list[Line]:
    """One line per kept rung whose change is still there at the top; before them the first rung that fitted."""
    lines = []
    if kept[0].rung != BASELINE:
        change = _change(kept[0])
        lines.append(Line(kept[0].rung, change.code, change.where, Cell("fits", note="the baseline does not")))
    for before, row, ratio in credited(kept):
        bounds = (ratio.interval.low, ratio.interval.high) if ratio.interval else None
        low, high = (Cell(f"{end:.2f}", end) for end in bounds) if bounds else (None, None)
        saves = change_of(before, row, "peak_gib", gib, "")
        is_certain = bounds is not None and bounds[0] > 1
        note = f"peak {saves}" if not is_certain and "→" in saves else ""
        change, gain = _change(row), Cell(f"{ratio.value:.2f}×", ratio.value, "gain", low, high, note=note)
        lines.append(Line(row.rung, change.code, change.where, gain))
    return lines


def _change(row: RungRow) -> Change:
    return CHANGES.get(base_name(row)) or Change(row.rung, "a change of the ladder’s own")


def _script_line(row: ScriptRungRow) -> Line:
    names = base_names(row)
    known = CHANGES.get(names[0]) if len(names) == 1 else None
    change = known if known is not None and row.lines in (None, known.text) else Change(row.lines or row.rung, "")
    return Line(row.rung, change.code, change.where, ratio_cell(row, "gain"))
