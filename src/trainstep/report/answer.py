"""The answer in a terminal: at most 25 lines, the verdict and its number in the first three.

Below them stand a bar for each phase, lines to try with their expected gains, the command that proves them, as many
findings as there is room for, and the files. Tables come with -v.
"""

from __future__ import annotations

import re
import textwrap
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from rich.text import Text

from trainstep.base.errors import printable
from trainstep.report.blocks import Breakdown, span, told_apart
from trainstep.report.breakdown import breakdown
from trainstep.report.columns import ratio_cell
from trainstep.report.findings import Finding
from trainstep.report.headlines import headlines
from trainstep.report.numbers import gib, in_ms, number, numeric, percent
from trainstep.report.subjects import run
from trainstep.report.subjects.climbs import climbs, recommended_flags
from trainstep.report.summary import cards
from trainstep.report.verdict import Verdict, judge
from trainstep.rows import ChangeRow, HabitRow, ProfileRow, ScriptRow, StepRow
from trainstep.rows.records import Row, of_kind

LINES, WIDTH = 25, 80
"""Lines of an answer at most, and the width for which that holds."""
MOST_VERDICTS, MOST_TRIED, MOST_STATS, MOST_BARS, MOST_CASES = 3, 3, 6, 9, 9
WHOLE = ("step", "both", "time")
"""Time of a result that its phases are parts of."""
LEAST_SHARE = 0.005  # of the step, below which a phase has no bar
NAME = 31  # characters of a change beside which its figures stand; those of a longer name stand below it
LEAST_GAIN = 1.1  # rough gain from which a change is worth a line
_PART = "▏▎▍▌▋▊▉█"
_PLACE = re.compile(r"[\w-]+\.py:\d+")
_TOLD = ("script.phases", "script.overhead", "script.peak", "waits.would")
"""Findings that stand elsewhere in a script's answer."""
_FIRST = ("script.ended", "script.note", "script.memory-grows", "script.slows-down")
TONES: Mapping[str, str] = {"FASTER": "bold green", "COMPUTE-BOUND": "bold green", "BANDWIDTH-BOUND": "bold cyan"}
"""Style of a verdict; of all others yellow."""


@dataclass(frozen=True)
class Try:
    """A change that no finding asks for, but that may help, with a rough gain before it is tried."""

    code: str
    expected: float
    phase: str = ""
    """Phase of the step that the change shortens, and that no gain of it exceeds; all where it is empty."""


@dataclass(frozen=True)
class Launch:
    """Facts of a launch that its rows do not have."""

    title: str
    written: str = ""  # the sentence on its files
    machine: str = ""  # how busy the machine was
    prove: str = ""  # the command that proves what to try
    tries: Sequence[Try] = ()
    is_brief: bool = True  # -v prints tables and all that does not fit


def answer(rows: Sequence[Row], found: Sequence[Finding], launch: Launch, width: int = WIDTH) -> list[Text]:
    """The lines of the answer.

    Args:
        rows: of one launch.
        found: findings of these rows.
        launch: what they are of.
        width: of a line.
    """
    script = next(iter(run.first_rank(rows)), None)
    judged, step = ([], None) if climbs(rows) else judge(rows, found)
    first, cases = headlines(rows, found), cases_of(rows)
    head = [Text(f" {_title(rows, script, launch)}", "dim"), Text()]
    if judged and step is not None:
        head += [*_judged(judged, width), *_step(step)]
    elif cases and all(row.status != "ok" for row in cases):
        reasons = "The reason:" if len(cases) == 1 else f"The first of {len(cases)} reasons:"
        head.append(Text.assemble(" ", ("Nothing could be measured.", "bold red"), f" {reasons}"))
        head += _wrapped(f"{cases[0].status}: {cases[0].reason}", width)
    elif first:
        head += _beside(first[0].figure.plain, "bold green", first[0].says, width)
        head += _wrapped(first[0].detail, width)[:2]
    else:
        head += _wrapped(found[0].sentence if found else f"{len(cases)} results", width, "bold")
        found = found[1:]
    tries, prove = _tries(rows, found, launch), list[Text]()
    if launch.prove and script is not None and judged and judged[0].word != "TOO-FEW-STEPS":
        how = " Prove it on this script and get a patch (a few runs per change):"
        prove = [Text(how), Text(f"   {launch.prove}")]
    flags = recommended_flags(rows)
    foot = _wrapped(f"Recommended: {flags}", width) if flags else []
    foot += [*_overhead(script, found, launch), *_wrapped(launch.written, width)]
    room = LINES - len(foot) - sum(len(block) + 1 for block in (head, tries, prove) if block)
    changes = _changes(rows, launch)[: max(0, room - 1)]
    room -= len(changes) + bool(changes)
    # A script's bars are of all its steps, as its verdict is, and not of the few that were profiled.
    bars = _bars(breakdown([row for row in rows if script is None or not isinstance(row, ProfileRow)]), script, width)
    if not bars and not changes and not (first and first[0].figure.name.endswith("_ms")):
        bars = _cases(rows, launch)
    if not bars and first:
        bars = [Text(f"   {name:<26} {value:>14}   {note}") for name, value, note in first[0].stats[:MOST_STATS]]
    bars = bars if len(bars) < room else []
    room -= len(bars) + bool(bars)
    found = [each for each in found if each.id not in (_TOLD if judged else ())]
    told = _findings(found, rows, width, room - 1, launch)
    blocks = [head, bars, changes, tries, prove, told]
    for line in (line for block in blocks for line in block if launch.prove not in line.plain or not launch.prove):
        line.truncate(width, overflow="ellipsis")
    lines = [line for block in [*blocks, foot] if block for line in (*block, Text())][:-1]
    return [line if printable(line.plain) == line.plain else Text(printable(line.plain)) for line in lines]


def cases_of(rows: Sequence[Row]) -> list[Row]:
    """Results without those that are there whatever fails."""
    return [row for row in rows if row.kind not in ("workload", "ceiling")]


def _title(rows: Sequence[Row], script: ScriptRow | None, launch: Launch) -> str:
    known = next((row.environment for row in rows if row.environment), {})
    parts = [launch.title]
    if script is not None and script.steps_seen:
        parts.append(f"{script.n} of {script.steps_seen} steps timed")
    parts += [str(known["device"]).partition(" @")[0][:24]] if known.get("device") else []
    parts += [f"torch {str(known['torch']).partition('+')[0]}"] if known.get("torch") else []
    return " · ".join(parts)


def _judged(judged: Sequence[Verdict], width: int) -> list[Text]:
    """The verdict, and beside it others that hold."""
    first, *others = judged[:MOST_VERDICTS]
    lines = _beside(first.word, TONES.get(first.word, "bold yellow"), first.says, width)
    return [*lines, *(line for each in others for line in _beside(f"also {each.word}", "dim", each.says, width))]


def _beside(word: str, style: str, says: str, width: int) -> list[Text]:
    """A word, and a clause beside it."""
    indent = " " * (len(word) + 4)
    first, *others = textwrap.wrap(says, max(width, len(indent) + 20), initial_indent=indent, subsequent_indent=indent)
    return [Text.assemble(" ", (word, style), first[len(word) + 1 :]), *map(Text, others)]


def _step(row: ScriptRow | StepRow | ProfileRow) -> list[Text]:
    """The step's time with its interval, its rate and its peak."""
    step = (run.as_told(row) if isinstance(row, ScriptRow) else row).times["step"]
    interval = f"  [{number(step.low)}–{number(step.high)}]" if step.low is not None else ""
    parts = [f"Step {in_ms(step.median)}{interval}"]
    if step.median:
        rate, samples = 1e3 / step.median, row.values.get("samples_per_step")
        parts += [f"{number(rate)} steps/s", *([f"{number(numeric(samples) * rate)} samples/s"] if samples else [])]
    peak = row.values.get("peak_gib")
    parts += [f"peak {gib(peak)}"] if peak is not None else []
    parts += [f"(rank {row.rank})"] if isinstance(row, ScriptRow) and (row.world_size or 1) > 1 else []
    return [Text(f" {'   '.join(parts)}")]


def _cases(rows: Sequence[Row], launch: Launch) -> list[Text]:
    """The first results of the kind that most rows are of, each with its time and its peak; none of a single one."""
    times = {id(row): next((name for name in WHOLE if name in getattr(row, "times", {})), "") for row in rows}
    measured = [row for row in rows if row.status == "ok" and (times[id(row)] or row.values.get("peak_gib"))]
    kinds = Counter(row.kind for row in measured).most_common(1)
    own = [row for row in measured if row.kind == kinds[0][0]]
    lines = []
    for row in own[:MOST_CASES] if len(own) > 1 else ():
        whole, peak = times[id(row)], row.values.get("peak_gib")
        time, memory = span(row, whole) if whole else "", "" if peak is None else gib(peak)
        lines.append(Text(f"   {told_apart(row, own):<38.38} {time:<25} {memory}"))
    return [*lines, *_more(len(own) - MOST_CASES, "", launch)]


def _more(count: int, what: str, launch: Launch) -> list[Text]:
    """The line that says how many are left for -v, if there are any."""
    return [Text(f"   {count} more{what}: -v", "dim")] if count > 0 and launch.is_brief else []


def _bars(made: Breakdown | None, script: ScriptRow | None, width: int) -> list[Text]:
    """A bar for each phase of the first step, to one scale, with its time and its share."""
    if made is None:
        return []
    stack = made.stacks[0]
    phases = {name: sum(part.ms for part in parts) for name, parts in stack.phases.items()}
    shares = {name: ms / stack.total for name, ms in phases.items()}
    if script is not None:  # as the verdict has them, by sums over all steps
        shares |= {name: run.share_of(script, phase) for phase, name in run.PHASES.items() if name in phases}
    shown = {name: ms for name, ms in phases.items() if shares[name] >= LEAST_SHARE}
    longest = max(shown.values(), default=0.0)
    place = (script.loader or "").partition(",")[0] if script is not None else ""
    most = max(10, min(40, width - 60))
    lines = []
    for name, ms in list(shown.items())[:MOST_BARS]:
        where = f"   {place}" if place and name == run.PHASES["data"] else ""
        share = (f"{shares[name]:>5.0%}", "bold" if ms == longest else "")
        bar = (f"{_bar(ms / longest * most):<{most}}", "cyan")
        lines.append(Text.assemble(f"   {name:<20} ", bar, f" {in_ms(ms):>9} ", share, where))
    return lines


def _bar(length: float) -> str:
    eighths = max(1, round(length * 8))
    return "█" * (eighths // 8) + (_PART[eighths % 8 - 1] if eighths % 8 else "")


def _changes(rows: Sequence[Row], launch: Launch) -> list[Text]:
    """The changes of the first ladder that ran, each with its time, speed-up and verdict."""
    climb = next(iter(climbs(rows)), None)
    if climb is None:
        return []
    own = [row for row in climb.rows if row.step_ms or row.status != "ok"]
    tried = [row for row in own if row.verdict != "not tried"]
    lines = [Text(f"   {'change':<{NAME}} {'step':>9}   {'gain [95% CI]':<19} verdict", "dim")]
    for row in tried:
        told = change_line(row, row.verdict or row.status).splitlines()
        lines += [Text(line, "green" if row.accepted else "") for line in told]
    return [*lines, *_more(len(own) - len(tried), " not tried", launch)]


def change_line(row: ChangeRow, told: str | None) -> str:
    """A change with its time in ms, its gain over what was accepted before it (of the final configuration and the
    patch the speed-up over the baseline), and its verdict or reason."""
    mark, gain = "✓" if row.accepted else "–", ratio_cell(row, "speedup" if row.gain is None else "gain").plain
    name = f"{row.change:<{NAME}}" if len(row.change) <= NAME else f"{row.change}\n{'':{NAME + 3}}"
    return f" {mark} {name} {in_ms(row.step_ms) if row.step_ms else '–':>9}   {gain:<19} {told}"


def _tries(rows: Sequence[Row], found: Sequence[Finding], launch: Launch) -> list[Text]:
    """Lines that findings ask for, with the most that each can bring, and then changes with a rough gain; of a ladder
    the lines that it accepted."""
    if climb := next(iter(climbs(rows)), None):  # which has tried them
        there = climb.there if climb.top is not None or not climb.is_script else []
        return [Text(f" {'In your code' if at == 0 else '':<14}{row.code}") for at, row in enumerate(there) if row.code]
    chosen, script = cards(rows, found, ()), next(iter(run.first_rank(rows)), None)
    asked = [each for each in (chosen.cards if chosen else ()) if each.action]
    gains = {each.action: f"{each.gain:.1f}×" if each.gain else f"−{each.figure}" for each in asked}
    tried = {each.action: ((_PLACE.search(each.sentence) or [""])[0], f"up to {gains[each.action]}") for each in asked}
    for each in launch.tries if script is not None else ():
        share = run.share_of(script, each.phase) if script is not None and each.phase else 1.0
        most = min(each.expected, 1 / (1 - share)) if share < 1 else each.expected
        if most >= LEAST_GAIN and each.code not in tried:
            tried[each.code] = ("", f"about {most:.1f}×")
    lines = [Text(f" {'Try':<63}expected", "bold")] * bool(tried)
    for place, (code, (where, gain)) in enumerate(list(tried.items())[:MOST_TRIED], start=1):
        code = f"{code}   {where}" if len(code) + len(where) < 56 else code
        shown = Text(code)
        shown.truncate(58, overflow="ellipsis", pad=True)
        lines.append(Text.assemble(f"  {place}  ", shown, " ", (gain, "green")))
    return lines


def _overhead(script: ScriptRow | None, found: Sequence[Finding], launch: Launch) -> list[Text]:
    """The cost of measuring, the number of sync points, and how busy the machine was."""
    by_id = {each.id: each.figures for each in found}
    parts = [f"Overhead {percent(numeric(by_id['script.overhead']['share']))}"] if "script.overhead" in by_id else []
    lines = by_id.get("waits.would", {}).get("lines")
    if isinstance(lines, tuple):
        parts.append(f"{len(lines)} sync points on a GPU: {str(lines[0]).partition(' (')[0]}")
    elif script is not None:
        parts.append(f"{sum(each.id.startswith('waits.') for each in found) or 'no'} sync points")
    parts += ["-v prints tables"] * launch.is_brief
    return [Text(f" {line}") for line in (" · ".join(parts), launch.machine) if line]


def _findings(found: Iterable[Finding], rows: Sequence[Row], width: int, room: int, launch: Launch) -> list[Text]:
    """Findings as far as there is room, alarms and larger stakes first, and how many more there are."""
    ids = {f"script.{row.habit}" for row in of_kind(rows, HabitRow)}

    def weight(each: Finding) -> tuple[bool, bool, bool, float]:
        stake = each.claim.ms or each.claim.gib or 0.0
        return each.claim.severity != "alarm", each.id not in (*_FIRST, *ids), not stake, -stake

    ordered = sorted(found, key=weight)
    lines: list[Text] = []
    for place, each in enumerate(ordered):
        wrapped = textwrap.wrap(each.sentence, width - 4)
        more = place + 1 < len(ordered)
        if len(lines) + len(wrapped) + more > room:
            left = len(ordered) - place
            return [*lines, *_more(left, f" finding{'s' * (left > 1)}", launch)[: max(0, room - len(lines))]]
        lines += [Text(f" {'•' if at == 0 else ' '} {text}") for at, text in enumerate(wrapped)]
    return lines


def _wrapped(text: str, width: int, style: str = "") -> list[Text]:
    lines = textwrap.wrap(text, width - 2, break_long_words=False, break_on_hyphens=False)
    return [Text(f" {line}", style) for line in lines]
