"""Bars that show where a step's time goes: phases one after the other, each divided among modules where kernels have
them.

Only what was measured is drawn: without kernels a phase is one piece, and what a phase has beyond its kernels is the
device's idle time.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain

from trainstep.base.config import PHASES
from trainstep.report.blocks import Breakdown, Part, Stack, told_apart
from trainstep.report.numbers import as_float, in_ms, percent
from trainstep.report.subjects import run
from trainstep.report.subjects.climbs import of_steps
from trainstep.report.subjects.steps import analysed_step, is_same_step
from trainstep.rows import ChangeRow, KernelRow, ParallelRow, ProfileRow, ScriptRow
from trainstep.rows.records import Row, belonging, of_kind
from trainstep.rows.row import Timed

MOST_GROUPS = 6  # modules with a colour of their own; the rest is "other modules"
IDLE, BESIDE, OTHERS, UNPLACED = "device idle", "outside of operators", "other modules", "in no known module"
SMALL = 0.01  # share of a phase's kernels below which those without a row are not told
APART = 0.05  # share of the step from which medians of phases are said not to add up to it
NAMED = 0.02  # share of the bar from which a module has a colour of its own
SEEN = 0.001  # share of the bar from which what has no module is drawn
_Captioned = tuple[Stack, str]
_UNNAMED = {"(optimizer)": "optimizer", "(loss)": "loss", "(unknown)": UNPLACED}
_ROLE_OF_PHASE = {"forward": "kind-1", "backward": "kind-2", "optimizer": "kind-3", "loss": "kind-4"}
_ROLES = ("kind-1", "kind-2", "kind-3", "kind-4", "kind-5", "kind-6", "kind-7")
_FIXED = {IDLE: "idle", BESIDE: "idle", OTHERS: "kind-8", UNPLACED: "neutral"}


def breakdown(rows: Sequence[Row]) -> Breakdown | None:
    """The bar of the step that was taken apart, and below it that of the recommended one; None where no row has
    phases."""
    profiled = _profiled(rows)
    first = profiled or _timed(rows)
    if first is None:
        return None
    stack, caption = first
    best = _recommended(rows, role=None if profiled is None else "neutral")
    sums = sorted(_summed(stack).values(), key=lambda part: -part.ms)
    legend = [(part.role, part.name, f"{in_ms(part.ms)}, {_share(part.ms, stack)}") for part in sums]
    if best is not None:
        caption += " The recommended step is drawn to the same scale, by its phases."
    return Breakdown("Where the time goes", caption, [*filter(None, (stack, best))], legend)


def _summed(stack: Stack) -> dict[str, Part]:
    """Parts of a bar by name, each over all phases."""
    sums: dict[str, Part] = {}
    for part in chain.from_iterable(stack.phases.values()):
        sums[part.name] = replace(part, ms=part.ms + (sums[part.name].ms if part.name in sums else 0.0))
    return sums


def before_and_after(old: Timed, new: Timed) -> Breakdown | None:
    """Bars of a step's phases in two files; None where one has no phases."""
    words, said = None, "Medians"
    if isinstance(old, ScriptRow) and isinstance(new, ScriptRow):
        said = "Means" if any(map(run.is_uneven, (old, new))) else said
        words, old, new = run.PHASES, run.as_told(old, new), run.as_told(new, old)
    stacks = [*filter(None, (_of_phases(old, "before", words), _of_phases(new, "after", words)))]
    sums = [*map(_summed, stacks)]
    if len(sums) < 2:
        return None
    parts = sums[0] | sums[1]
    times = {name: " → ".join(in_ms(own[name].ms if name in own else 0) for own in sums) for name in parts}
    legend = [(part.role, name, times[name]) for name, part in parts.items()]
    return Breakdown("Before and after", f"{said} of the first run of a side, to one scale.", stacks, legend)


def _share(ms: float, stack: Stack) -> str:
    share = ms / stack.total
    return percent(share) if share >= SEEN else f"below {SEEN:.1%}"


def _profiled(rows: Sequence[Row]) -> _Captioned | None:
    """Module by phase, of the first profile whose kernels have a module."""
    step = analysed_step(rows)
    profiles = [row for row in of_kind(rows, ProfileRow) if row.status == "ok"]
    for profile in [row for row in profiles if step is None or is_same_step(step, row)]:
        own = belonging(rows, KernelRow, profile)
        kernels = [row for row in own if (row.ms or 0.0) > 0 and row.family != "transfer"]
        if kernels and any(not row.module.startswith("(") for row in kernels):
            script = next(map(run.as_told, run.first_rank(rows)), None)
            return _of_kernels(profile, kernels, told_apart(profile, profiles) if len(profiles) > 1 else "", script)
    return None


def _of_kernels(profile: ProfileRow, kernels: Sequence[KernelRow], name: str, script: Timed | None) -> _Captioned:
    names = _short({row.module for row in kernels})
    times = defaultdict[str, Counter[str]](Counter)
    for row in kernels:
        times[row.phase][names[row.module]] += row.ms or 0.0  # type: ignore[assignment]
    # Kernels need not fill a phase: the rest of its time without the profiler is a part of its own.
    empty = BESIDE if profile.on_cpu else IDLE
    wholes = {phase: script.times[phase].median for phase in run.PHASES if phase in script.times} if script else {}
    for phase in dict.fromkeys([*times, *wholes]):  # a script has phases without kernels, in which it waits
        own = times[phase]
        known, listed_ms = as_float(profile.values.get(f"{phase}_kernels_ms")), sum(own.values())
        if known is not None and known - listed_ms > SMALL * known:
            own[UNPLACED] += known - listed_ms  # type: ignore[assignment]  # rows of short kernels may be left out
        whole, busy = (as_float(profile.values.get(f"{phase}{end}")) for end in ("_ms", "_busy_ms"))
        if whole is None and phase in wholes:
            whole, busy = wholes[phase], own.total()
        if whole is not None and busy is not None and whole > busy:
            own[empty] += whole - busy  # type: ignore[assignment]
    total = sum(sum(own.values()) for own in times.values())
    # The same module has one colour in all phases, so the groups to name are chosen by their whole time.
    sums: Counter[str] = sum(times.values(), Counter())
    named = [name for name, ms in sums.most_common() if name not in _FIXED and ms >= NAMED * total][:MOST_GROUPS]
    roles = dict(zip(named, _ROLES, strict=False)) | _FIXED
    if sums[UNPLACED] < SEEN * total:
        del roles[UNPLACED]
    phases = {}
    for phase in _in_order(times):
        merged = Counter[str]()
        for module, ms in times[phase].items():
            merged[module if module in roles else OTHERS] += ms
        if phase in PHASES or merged.total() >= SEEN * total:
            name_of_phase = run.PHASES.get(phase, phase) if wholes else phase.strip("()")
            phases[name_of_phase] = [Part(each, merged[each], roles[each]) for each in roles if merged.get(each)]
    what = "the whole trace" if profile.has_steps is False else "a profiled step"
    gaps = sorted(((part.ms, name) for name, own in phases.items() for part in own if part.name == empty), reverse=True)
    where = ", ".join(f"{in_ms(ms)} in {name}" for ms, name in gaps[:3])
    beyond = f"; {empty} is what phases take beyond them, without the profiler: {where}" if gaps else ""
    caption = f"Kernels of {what}, by the module whose forward made them{beyond}."
    time = in_ms(profile.step_ms) if profile.step_ms is not None else f"{in_ms(total)} of kernels"
    return Stack(name or _settings(profile), time, phases), caption


def _in_order(phases: Iterable[str]) -> list[str]:
    """A step's order; what has no phase last."""
    return sorted(phases, key=lambda phase: [*run.PHASES, phase].index(phase))


def _short(modules: Iterable[str]) -> dict[str, str]:
    """Module → its group's name: the path to the part of a block, `blocks.*.attention`, by its last word where that
    names one group alone."""
    groups = {module: _UNNAMED.get(module) or _group(module) for module in modules}
    last = Counter(group.rpartition(".")[2] for group in set(groups.values()))
    return {
        module: group if last[word := group.rpartition(".")[2]] > 1 or word == "*" else word
        for module, group in groups.items()
    }


def _group(module: str) -> str:
    parts = module.split(".")
    deep = parts.index("*") + 2 if "*" in parts else 2
    return ".".join(parts[:deep])


def _timed(rows: Sequence[Row]) -> _Captioned | None:
    """The phases of a ladder's first step, of the step that was taken apart, of a script, or of one process alone."""
    climb = next((each.accepted for each in of_steps(rows)), [])
    alone = [row for row in of_kind(rows, ParallelRow) if row.status == "ok" and row.scheme == "single"]
    steps: list[Timed] = [row for row in (*climb[:1], analysed_step(rows)) if row is not None]
    said, own = "Medians of the step’s phases", run.first_rank(rows)[:1]
    of_script = "Means of the step’s phases" if any(map(run.is_uneven, own)) else said
    known: list[tuple[Timed, str, str, Mapping[str, str] | None]] = [
        *((row, _settings(row), f"{said}; no profile says which modules take them.", None) for row in steps),
        *((run.as_told(row), row.updates or row.workload, f"{of_script}.", run.PHASES) for row in own),
        *((row, f"one process: {_settings(row)}", f"{said}, without communication.", None) for row in alone[:1]),
    ]
    # The first that has phases is shown: they stand in the order of how much they tell of the step in question.
    for row, name, caption, words in known:
        if (stack := _of_phases(row, name, words)) is not None:
            is_apart = row.step_ms is not None and abs(stack.total - row.step_ms) > APART * row.step_ms
            apart = f" Medians need not add up: the phases’ together are {in_ms(stack.total)}."
            return stack, caption + apart * is_apart
    return None


def _recommended(rows: Sequence[Row], role: str | None) -> Stack | None:
    """The phases of the one ladder's top, if it is another step than the first, and its speed-up is not disputed.

    Args:
        role: of all its parts, where colours stand for modules in the bar above.
    """
    every = of_steps(rows)
    accepted = every[0].accepted if len(every) == 1 else []
    if len(accepted) < 2 or every[0].is_disputed:
        return None
    stack = _of_phases(accepted[-1], f"recommended: {_settings(accepted[-1], accepted[0])}")
    if stack is None or role is None:
        return stack
    phases = {phase: [replace(part, role=role) for part in parts] for phase, parts in stack.phases.items()}
    return replace(stack, phases=phases)


def _of_phases(row: Timed, name: str, words: Mapping[str, str] | None = None) -> Stack | None:
    names, roles = (words, run.ROLES) if words else ({phase: phase for phase in PHASES}, _ROLE_OF_PHASE)
    known = {phase: row.times[phase].median for phase in names if phase in row.times and row.times[phase].median > 0}
    phases = {names[phase]: [Part(names[phase], ms, roles[phase])] for phase, ms in known.items()}
    whole = row.step_ms or sum(known.values())
    return Stack(name, in_ms(whole), phases) if phases else None


def _settings(row: Row, first: ChangeRow | None = None) -> str:
    """Settings that the step runs with: `fp32, eager attention`; of a change, what differs from the first."""
    forms = {"precision": "{}", "attention": "{} attention", "compile": "{} compiled", "optimizer": "{}",
             "loss": "{} loss"}  # fmt: skip
    names, own = (forms, first.case) if first is not None else (("precision", "attention"), {})
    told = {name: row.case[name] for name in names if row.case.get(name) not in (None, own.get(name))}
    return ", ".join(forms[name].format(value) for name, value in told.items()) or str(row.case.get("workload", ""))
