"""The page's first screen: what was gained or how long a step takes and how far that can be believed, where the time
goes, what matters most, and what to write for it; then all findings."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence

from trainstep.base.stats import WITHIN_RUN
from trainstep.report.blocks import Advice, Block, Card, Cards, Flags, Line, Section, Sentences, section
from trainstep.report.breakdown import breakdown
from trainstep.report.columns import Cell, ratio_cell
from trainstep.report.findings import TOPICS, Finding
from trainstep.report.headlines import change_of, headlines
from trainstep.report.numbers import as_float, gib, in_gib, in_ms, percent
from trainstep.report.subjects.climbs import GAIN, Climb, changes, climbs, credited, flags_of, of_steps
from trainstep.report.subjects.run import as_told
from trainstep.report.subjects.steps import analysed_step
from trainstep.report.tables import Table
from trainstep.rows import BASELINE, ChangeRow, ProfileRow, ScriptRow
from trainstep.rows.records import Row, of_kind

LEAST = 0.01  # share of the step or of the peak from which something is a card
MOST, FEWEST = 5, 3  # cards; fewer where there is less to say
MOST_OF_MEMORY = 2  # of them, where others are about time


def summary(records: Sequence[Row], found: Sequence[Finding], sections: Sequence[Section]) -> Section | None:
    """Section on what dominates, what to change, what was gained.

    Args:
        records: all rows.
        found: what the rules say of them.
        sections: the page's others, for links to the evidence.
    """
    first, chosen = (alarms(found, sections), *headlines(records, found)), cards(records, found, sections)
    topics: dict[str, list[str]] = {}
    for finding in found:
        topic = TOPICS[finding.topic]
        topics.setdefault(topic, []).append(finding.sentence.removeprefix(f"{topic}: "))
    every = Sentences(topics, is_folded=chosen is not None) if topics else None
    return section("summary", "Summary", "Summary", "", *first, *_advice(records), breakdown(records), chosen, every)


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
    gone = [(row.change, ratio_cell(row, "gain").plain) for row in climb.accepted[1:] if row not in there]
    note = f"Each gain is over the lines above it, between runs, with its 95 % interval; {_TEMPLATE}"
    note += "".join(f" {name} had brought {gain} before another line took its place." for name, gain in gone)
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


def alarms(findings: Sequence[Finding], sections: Sequence[Section]) -> Cards | None:
    """The findings that make the rest worthless, to be told before it."""
    told = [_card(each, None, sections) for each in findings if each.claim.severity == "alarm"]
    return Cards(told, is_alarm=True) if told else None


def cards(rows: Sequence[Row], findings: Sequence[Finding], sections: Sequence[Section]) -> Cards | None:
    """The largest stakes in time, then those in memory: at most `MOST`."""
    step, tried = analysed_step(rows), [row for climb in climbs(rows) for row in climb.rows]
    profile = next((row for row in of_kind(rows, ProfileRow) if row.status == "ok"), None)
    script = next((as_told(row) for row in of_kind(rows, ScriptRow) if row.step_ms), None)
    change = next((row for row in changes(rows) if row.step_ms), None)
    step_ms = next((row.step_ms for row in (step, profile, script, change) if row is not None and row.step_ms), None)
    peak_gib = next((row.peak_gib for row in (step, change) if row is not None and row.peak_gib is not None), None)
    there = {row.names[0] for climb in of_steps(rows) for row in climb.there}
    measured = {None, *(row.workload for row in (step, profile, script) if row is not None)}
    last = {name: row for row in tried for name in row.names}
    own = {name: row for row in tried if row.workload in measured for name in row.names}.values()

    # Of findings with one claim, as of a line that waits for several calls, the largest stake has the card.
    once: dict[str, tuple[Finding, Card]] = {}
    for each in sorted(findings, key=lambda each: (each.claim.gib is not None, -(each.claim.stake or 0.0))):
        claim = each.claim
        whole = None if not claim.is_part else step_ms if claim.gib is None else peak_gib
        if claim.stake is not None and claim.stake > LEAST * (whole or 0.0):
            once.setdefault(claim.said, (each, _card(each, whole, sections, _action(each, there, last, own))))
    ranked = [*once.values()]
    costs = [(each.claim.gib is not None, card) for each, card in ranked if each.claim.severity == "cost"]
    time, memory = ([card for is_memory, card in costs if is_memory is asked] for asked in (False, True))
    memory = memory[: MOST_OF_MEMORY if time else MOST]
    chosen = [*time[: MOST - len(memory)], *memory]
    asides = [card for each, card in ranked if each.claim.severity == "aside"]
    chosen += asides[: max(0, FEWEST - len(chosen))]
    return Cards([card for _, card in ranked if card in chosen]) if chosen else None


def _card(each: Finding, whole: float | None, sections: Sequence[Section], action: str = "") -> Card:
    claim, stake = each.claim, each.claim.stake
    peak_or_step = "the step" if claim.gib is None else "the peak"
    share = f"{percent(stake / whole)} of {peak_or_step}" if stake and whole else ""
    figure = "" if stake is None else in_ms(stake) if claim.gib is None else in_gib(stake)
    gain = whole / (whole - stake) if whole and stake and claim.gib is None and stake < whole else None
    return Card(claim.said, figure, share, each.sentence, _evidence(claim.seen, sections), action, gain)


def _action(each: Finding, there: Collection[str], last: Mapping[str, ChangeRow], tried: Iterable[ChangeRow]) -> str:
    """The code of the change that brought most where a ladder tried some, of those that the top still has where there
    are; none where none helped, or where the step has the change already.

    Args:
        there: the changes that tops of ladders have.
        last: every change by its last try.
        tried: those on ladders of what was measured.
    """
    gains = {
        name.removeprefix(GAIN): as_float(gain) or 0 for name, gain in each.figures.items() if name.startswith(GAIN)
    }
    if gains:
        helped = [name for name, gain in gains.items() if gain > 1]
        best = max([name for name in helped if name in there] or helped or gains, key=gains.__getitem__)
        return (last[best].code or "") if gains[best] > 1 and best in last else ""
    if each.claim.action == "":
        return ""
    own = [row for row in tried if each.id in (row.answers or ())]
    accepted = [row for row in own if row.accepted and row.verdict == "faster"]
    if own:
        return accepted[-1].code or "" if accepted else ""
    return each.claim.action.code if each.claim.action else ""


def _evidence(seen: Sequence[str], sections: Sequence[Section]) -> tuple[str, str]:
    """The anchor and the words of the first that is there; the caption's first clause names a table."""
    there = {section.name: (section.name, section.title) for section in sections} | {
        block.name: (
            f"{section.name}-table-{place}",
            block.caption.partition(":")[0].partition(" (")[0].partition(";")[0],
        )
        for section in reversed(sections)
        for place, block in enumerate(section.blocks, start=1)
        if isinstance(block, Table) and block.name
    }
    return next((there[name] for name in seen if name in there), ("", ""))
