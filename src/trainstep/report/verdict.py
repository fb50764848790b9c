"""The verdict on the time of a script's step, or of a workload's: one word from a rule with its threshold.

A rule gives a figure and a clause made from it, and holds where the figure reaches the threshold. Rules that leave no
other figure standing come first, in their order. Of the rules for lost time, the largest share of the step is the
verdict. Where none holds, the verdict names the work itself. What grows from step to step stands beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from trainstep.report.findings import Finding, listed
from trainstep.report.numbers import in_ms, numeric, percent
from trainstep.report.subjects import run
from trainstep.report.subjects.kernel_findings import FUSABLE
from trainstep.report.subjects.steps import analysed_step
from trainstep.rows import FamilyRow, HabitRow, ProfileRow, RecompilationRow, ScriptRow, StepRow
from trainstep.rows.records import Row, of_kind
from trainstep.rows.run import LATE

Step = ScriptRow | StepRow | ProfileRow
Evidence = tuple[float, str]
"""A figure, and the clause that says it."""
MEMORY_FAMILIES = (*FUSABLE, "softmax", "optimizer")
"""Families of kernels that do little arithmetic for each byte. All others are matmuls, convolutions and attention."""
ENOUGH = 6  # Timed steps from which a median has a 95 % interval


@dataclass(frozen=True)
class Verdict:
    """A word, the clause beside it, and the figure that reached the threshold."""

    word: str
    says: str
    figure: float | None = None


class Seen:
    """Results of one run, as rules ask for them."""

    def __init__(self, rows: Sequence[Row], found: Sequence[Finding]) -> None:
        self.rows, self.found = rows, found
        self.script: ScriptRow | None = next(iter(run.first_rank(rows)), None)
        self.profile = next((row for row in of_kind(rows, ProfileRow) if row.status == "ok" and row.step_ms), None)
        self.profiled_ms = (self.profile and self.profile.profiled_step_ms) or 0.0
        self.step: Step | None = self.script or analysed_step(rows) or self.profile

        self.on_gpu = self.script is not None and bool(self.script.on_gpu)

    @property
    def whole_ms(self) -> float:
        """Mean time of a step."""
        assert self.step is not None
        return run.mean_of(self.step.times["step"])

    def phases(self, *names: str) -> float:
        """Share of a script's step in these phases."""
        return 0.0 if self.script is None else sum(run.share_of(self.script, name) for name in names)

    def figures(self, *ids: str) -> list[Finding]:
        """Findings with these ids."""
        return [each for each in self.found if each.id in ids]

    @cached_property
    def families(self) -> Mapping[str, float]:
        """Family of kernels → share of a profiled step's kernel time."""
        own = [row for row in of_kind(self.rows, FamilyRow) if row.phase == "step" and row.share is not None]
        device = own[0].device if own else None
        return {row.family: row.share or 0.0 for row in own if row.device == device}


def _too_few(seen: Seen) -> Evidence | None:
    n = ENOUGH if seen.step is None or seen.step.n is None else seen.step.n
    return ENOUGH - n, f"{n} timed steps tell nothing certain; {ENOUGH} give an interval"


def _unsteady(seen: Seen) -> Evidence | None:
    times = seen.step.times["step"] if seen.step is not None else None
    if times is None or times.low is None or times.high is None or not times.median:
        return None
    if seen.script is not None and (run.comes_in_bursts(seen.script) or seen.figures("script.slows-down")):
        return None  # steps differ by their wait for data, or grow, which are causes and no noise
    width = (times.high - times.low) / times.median
    return width, f"the step's 95% interval spans {width:.0%} of its median: run it on an idle machine"


def _debugging(seen: Seen) -> Evidence | None:
    own = (row for row in of_kind(seen.rows, HabitRow) if row.habit in run.DEBUGGING)
    if (most := max(own, key=lambda row: row.seen or 0.0, default=None)) is None:
        return None
    return most.seen or 0.0, f"{most.habit.replace('-', ' ')} is on{f' at {most.line}' if most.line else ''}"


def _recompiling(seen: Seen) -> Evidence | None:
    for row in of_kind(seen.rows, HabitRow):
        if row.habit == "recompile-limit":
            return 1.0, f"torch.compile reached its limit of recompilations at {row.line}"
    own = [row for row in of_kind(seen.rows, RecompilationRow) if not row.rank and (row.last_step or 0) > 1]
    if seen.script is None or not own or not seen.script.steps_seen:
        return None
    again = sum((row.compilations or 1) - 1 for row in own)
    where = own[0].from_line or own[0].line
    return again / seen.script.steps_seen, f"{again} recompilations in {seen.script.steps_seen} steps, at {where}"


def _straggler(seen: Seen) -> Evidence | None:
    for each in seen.figures("ranks.late", "ranks.late_data"):
        own, usual, phase = (each.figures[name] for name in ("own_ms", "usual_ms", "phase"))
        says = f"rank {each.figures['rank']} takes {in_ms(each.figures['excess_ms'])} more for {run.PHASES[str(phase)]}"
        return numeric(own) / numeric(usual) - 1, says
    return None


def _data(seen: Seen) -> Evidence | None:
    at = ((seen.script.loader if seen.script is not None else None) or "").partition(",")[0]
    lines = [line for each in seen.figures("data.lines")[:1] for line in _lines(each, 1)]
    runs = "".join(f", which runs {line}" for line in lines if not at or at not in line)
    return _share(seen.phases("data"), "waits for {}", (f"the DataLoader at {at}" if at else "its batch") + runs)


def _launches(seen: Seen) -> Evidence | None:
    if seen.on_gpu and "starved" in seen.script.times:  # type: ignore[union-attr]
        told = run.as_told(seen.script).times  # type: ignore[arg-type]
        share = told["starved"].median / (told["step"].median or 1.0)
        return share, f"the GPU may wait for launches for {percent(share)} of each step"
    for each in seen.figures("launches.bound"):
        share = numeric(each.figures["forward_issue_ms"]) / numeric(each.figures["forward_ms"])
        return share, f"the host needs {percent(min(share, 1.0))} of forward to launch it"
    return None


def _python(seen: Seen) -> Evidence | None:
    own = seen.figures("script.lines")
    most = max(own, key=lambda each: numeric(each.figures["share"]), default=None)
    if most is None:
        return None
    return _share(numeric(most.figures["share"]), "runs your {}", _code(most, 1))


def _sync(seen: Seen) -> Evidence | None:
    """Waits count only as far as the GPU then waits for launches."""
    own = seen.figures("waits.line")
    if not own or not seen.on_gpu or "starved" not in seen.script.times:  # type: ignore[union-attr]
        return None
    starved = run.mean_of(seen.script.times["starved"])  # type: ignore[union-attr]
    share = min(sum(numeric(each.figures["ms"]) for each in own), starved) / seen.whole_ms
    return share, f"the host waits for the GPU at {own[0].figures['line']}, then launches late"


def _copies(seen: Seen) -> Evidence | None:
    ms = seen.script.deep_copies_ms if seen.script is not None and seen.on_gpu else None
    exposed = [each.claim.ms or 0.0 for each in seen.figures("kernels.transfers")]
    return _share(max([ms or 0.0, *exposed]) / seen.whole_ms, "copies between host and {}", "device")


def _communication(seen: Seen) -> Evidence | None:
    exposed = [each.claim.ms or 0.0 for each in seen.figures("kernels.communication")]
    share = max([seen.phases("communication"), *(ms / max(seen.whole_ms, seen.profiled_ms) for ms in exposed)])
    return _share(share, "waits for {}", "communication between ranks")


def _compute(seen: Seen) -> Evidence | None:
    for each in seen.figures("utilisation.high", "utilisation.low"):
        share = numeric(each.figures["share"])
        return share, f"the step reaches {percent(share)} of the matmul peak"
    if seen.families:
        share = sum(share for name, share in seen.families.items() if name not in MEMORY_FAMILIES)
        return share, f"matmuls, convolutions and attention take {percent(share)} of the kernel time"
    return _share(seen.phases("forward", "loss", "backward", "evaluation"), "is {}", "the model's forward and backward")


def _bandwidth(seen: Seen) -> Evidence | None:
    if seen.families:
        share = sum(share for name, share in seen.families.items() if name in MEMORY_FAMILIES)
        return share, f"kernels that only move memory take {percent(share)} of the kernel time"
    return _share(seen.phases("optimizer"), "is {}", "the optimizer, which moves memory")


def _slowing(seen: Seen) -> Evidence | None:
    first, last, where = _ends(seen, "script.slows-down", "ms")
    return last / first - 1, f"steps grow from {in_ms(first)} to {in_ms(last)}{where}"


def _growing(seen: Seen) -> Evidence | None:
    first, last, where = _ends(seen, "script.memory-grows", "mib")
    return last - first, f"it grows from {first:.0f} to {last:.0f} MiB{where}"


def _ends(seen: Seen, id: str, unit: str) -> tuple[float, float, str]:
    """First and last figure of what grows, equal where nothing does, and the lines that bring it."""
    for each in seen.figures(id):
        where = f", in {_code(each)}" if each.figures["lines"] else ""
        return numeric(each.figures[f"from_{unit}"]), numeric(each.figures[f"to_{unit}"]), where
    return 1.0, 1.0, ""


def _lines(each: Finding, most: int | None = None) -> list[str]:
    """The lines that a finding names, without their shares."""
    lines = each.figures["lines"]
    assert isinstance(lines, tuple)
    return [str(line).partition(" (")[0] for line in lines[:most]]


def _code(each: Finding, most: int | None = None) -> str:
    """`code at train.py:31`; the line of a sample that came late is `code at or before train.py:31` already."""
    return f"code at {listed(_lines(each, most))}".replace(f"code at {LATE}", LATE)


def _share(share: float, does: str, what: str) -> Evidence:
    return share, f"{percent(share)} of each step {does.format(what)}"


@dataclass(frozen=True)
class Rule:
    """The rule of one word: it holds where the figure is at least the threshold."""

    word: str
    least: float
    evidence: Callable[[Seen], Evidence | None]
    group: Literal["first", "lost", "work", "beside"]


RULES = (
    Rule("TOO-FEW-STEPS", 1, _too_few, "first"),  # timed steps fewer than ENOUGH
    Rule("UNSTEADY", 0.5, _unsteady, "first"),  # width of the step's interval over its median
    Rule("DEBUG-ON", 0.5, _debugging, "first"),  # share of the steps with the setting
    Rule("RECOMPILING", 0.1, _recompiling, "first"),  # recompilations per step
    Rule("STRAGGLER", 0.05, _straggler, "first"),  # a rank's own part beyond the others'
    Rule("DATA-BOUND", 0.1, _data, "lost"),  # from here on shares of the step, but for launches of a workload
    Rule("LAUNCH-BOUND", 0.9, _launches, "lost"),
    Rule("PYTHON-BOUND", 0.25, _python, "lost"),
    Rule("SYNC-BOUND", 0.1, _sync, "lost"),
    Rule("COPY-BOUND", 0.1, _copies, "lost"),
    Rule("COMMUNICATION-BOUND", 0.1, _communication, "lost"),
    Rule("COMPUTE-BOUND", 0.5, _compute, "work"),  # of the step; of the matmul peak or the kernel time where known
    Rule("BANDWIDTH-BOUND", 0.5, _bandwidth, "work"),  # of the step, or of the kernel time where known
    Rule("SLOWS-DOWN", run.SLOWER, _slowing, "beside"),  # share by which a step grows
    Rule("MEMORY-GROWS", run.GROWN_MIB, _growing, "beside"),  # MiB
)
MIXED = "MIXED"
"""The word where no rule holds."""


def judge(rows: Sequence[Row], found: Sequence[Finding]) -> tuple[list[Verdict], Step | None]:
    """Every verdict that holds, the one to act on first, and the step that they are of; none where no step was timed.

    Args:
        rows: of one run.
        found: findings of these rows.
    """
    seen = Seen(rows, found)
    if seen.step is None or "step" not in seen.step.times:
        return [], None
    hold: dict[str, list[Verdict]] = {"first": [], "lost": [], "work": [], "beside": []}
    for rule in RULES:
        evidence = rule.evidence(seen)
        if evidence is not None and evidence[0] >= rule.least:
            hold[rule.group].append(Verdict(rule.word, evidence[1], evidence[0]))
    lost, work = (sorted(hold[group], key=lambda each: -(each.figure or 0.0)) for group in ("lost", "work"))
    every = [*hold["first"], *(lost or work)] or [Verdict(MIXED, "no single cause takes enough of the step")]
    return [every[0], *hold["beside"], *every[1:]], seen.step
