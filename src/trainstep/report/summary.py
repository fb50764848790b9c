"""The page's first screen: what was gained or how long a step takes and how far that can be believed, where the time
goes, what matters most, and what to write for it; then all findings."""

from __future__ import annotations

import re
from collections.abc import Sequence

from trainstep.base.stats import WITHIN_RUN
from trainstep.report.blocks import Advice, Block, Flags, Line, Section, Sentences
from trainstep.report.breakdown import breakdown
from trainstep.report.cards import alarms, cards
from trainstep.report.columns import Cell, ratio_cell
from trainstep.report.findings import TOPICS, Finding
from trainstep.report.headlines import change_of, headlines
from trainstep.report.numbers import gib
from trainstep.report.subjects.climbs import Climb, climbs, credited, flags_of
from trainstep.rows import BASELINE, ChangeRow
from trainstep.rows.records import Row


def summary(records: Sequence[Row], found: Sequence[Finding], sections: Sequence[Section]) -> Section | None:
    """Section on what dominates, what to change, what was gained.

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
    for place, climb in enumerate(climbs(records)):
        suffix, whose = f"-{place}" if place else "", f" ({climb.name})" if climb.name else ""
        if climb.is_script:
            blocks += _of_script(climb)
            continue
        if climb.accepted and not climb.is_disputed and (lines := _lines(climb)):
            note = f"Each gain is over the lines above it, {WITHIN_RUN}, with its 95 % interval; {_TEMPLATE}"
            blocks.append(Advice(f"What to write in your own script{whose}", note, lines, f"lines{suffix}"))
        if flags := flags_of(climb):
            says = f"For trainstep’s own commands, add these flags{whose}"
            blocks.append(Flags(re.split(r" (?=--)", flags), says, f"flags{suffix}"))
    return blocks


def _of_script(climb: Climb) -> list[Block]:
    """Lines for a script that its ladder proved."""
    top, there = climb.top, climb.there
    if top is None or top.speedup_low is None or top.speedup_low <= 1:
        return []
    note = f"Each gain is over the lines above it, between runs, with its 95 % interval; {_TEMPLATE}"
    for row in climb.accepted[1:]:
        if row not in there:
            note += f" {row.change} had brought {ratio_cell(row, 'gain').plain} before another line took its place."
    lines = [_line(row, ratio_cell(row, "gain")) for row in there]
    return [Advice("What to write in the script", note, lines, "script-lines")]


_TEMPLATE = "names and … stand for what your script has."


def _line(row: ChangeRow, gain: Cell) -> Line:
    where = row.where or ("" if row.code else "a change of the ladder’s own")
    return Line(row.change, row.code or row.change, where, gain)


def _lines(climb: Climb) -> list[Line]:
    """A line per accepted change that is still there at the top; before them the first that fitted."""
    lines, first = [], climb.accepted[0]
    if first.change != BASELINE:
        lines.append(_line(first, Cell("fits", note="the baseline does not")))
    for before, row, ratio in credited(climb):
        bounds = (ratio.interval.low, ratio.interval.high) if ratio.interval else None
        low, high = (Cell(f"{end:.2f}", end) for end in bounds) if bounds else (None, None)
        saves = change_of(before, row, "peak_gib", gib, "")
        is_certain = bounds is not None and bounds[0] > 1
        note = f"peak {saves}" if not is_certain and "→" in saves else ""
        lines.append(_line(row, Cell(f"{ratio.value:.2f}×", ratio.value, "gain", low, high, note=note)))
    return lines
