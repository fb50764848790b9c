"""Scripts under `trainstep run`: what their steps consist of, what they wait for, and how ranks differ."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

from trainstep.base import advice
from trainstep.base.stats import Trend, rising
from trainstep.report import columns
from trainstep.report.blocks import Chart, Charts, Section, section
from trainstep.report.charts import KINDS
from trainstep.report.charts.steps import neighbours, rank_map, steps_in_order
from trainstep.report.columns import Cell, Column, value_cell
from trainstep.report.findings import Claim, Finding, found, listed, literal
from trainstep.report.numbers import as_float, number, numeric, percent
from trainstep.report.tables import define, page_table
from trainstep.rows import ChangeRow, HabitRow, LineRow, PeakRow, ProfileRow, RecompilationRow, ScriptRow, WaitRow
from trainstep.rows.records import Row, Scalar, Times, of_kind
from trainstep.rows.run import OfScript

Rule = Callable[[Sequence[Row]], Iterator[Finding]]
PHASES = {
    "data": "data wait",
    "copies": "copies to the device",
    "forward": "forward",
    "loss": "loss and other",
    "backward": "backward",
    "communication": "communication",
    "optimizer": "optimizer",
    "evaluation": "evaluation",
    "other": "everything else",
}
"""Phase → its name in words, in the order of a step."""
ROLES = dict(zip(PHASES, (*KINDS, "neutral"), strict=True))
APART = {
    "left out": ("rule", "the first steps"),
    "evaluated": ("muted", "with an evaluation"),
    "compiled": ("warn", "in which code was compiled"),
    "skipped": ("series-2", "skipped by a scaler"),
    "instrumented": ("series-1", "looked into"),
}
"""Steps that are not timed: their colour, and the reason in words."""
OTHERS = ("apart", "apart_ms", "apart_why")  # Series of the row on them: the step, its time, and the reason
DATA_BOUND = 0.1  # Share of the step spent waiting for data from which it is remarked on
LINES_BOUND = {"other": 0.25, "loss": 0.5, "data": DATA_BOUND, "workers": DATA_BOUND, "python": 0.25}
"""Share of the step from which the lines of a phase are named; of workers, the share that waits for data."""
WITHIN = {"workers": "data", "python": "forward"}
"""Part of a phase that has lines of its own → that phase."""
PLAIN = 0.5  # Share of the samples before backward, from which plain Python there is what takes the time
LINE, FEWEST, MOST_LINES = 0.1, 10, 3
"""A named line's least share of the phase's samples, the fewest samples of the phase, and the most lines."""
LAUNCH_BOUND = 0.9  # Share of the step for which the GPU may have waited for launches, from which they set its pace
WAITING = 0.02  # Share of a step on a GPU that a line waits for, from which the line is remarked on
PER_STEP = 0.5  # Calls per step of a line that would wait on a GPU, from which it is remarked on
LATE = 0.05  # By how much a rank's own part must exceed the others' median to be late
DEBUGGING = ("anomaly-detection", "deterministic-algorithms", "distributed-debug", "launch-blocking", "own-profiler")
SLOWER = 0.2  # Share by which a step grows, from the first tenth of the steps to the last, from which it slows down
GROWN_MIB = 16.0  # By how much memory grows meanwhile, from which it is remarked on
OVERHEAD = 0.02  # Share of the step that measuring may cost before it is remarked on


UNEVEN = 0.25
"""By how much the mean step must exceed the median one for means to be told in place of medians."""
MISSED = 0.1
"""Share of the median step by which the phases' medians together may miss it, before means are told."""


def mean_of(times: Times) -> float:
    """Milliseconds; of a row that has no mean, the median."""
    return times.median if times.mean is None else times.mean


def is_uneven(row: ScriptRow) -> bool:
    """True if the mean of its steps is much above their median, or the medians of its phases do not add up to that."""
    step, phases = row.times["step"], sum(times.median for name, times in row.times.items() if name in PHASES)
    missed = abs(phases - step.median) if phases else 0.0
    return mean_of(step) > (1 + UNEVEN) * step.median or missed > MISSED * step.median


def comes_in_bursts(row: ScriptRow) -> bool:
    """True if that is for the most part because some steps wait for data and others do not."""
    step, data = row.times["step"], row.times.get("data")
    if data is None or mean_of(step) <= (1 + UNEVEN) * step.median:
        return False
    return mean_of(data) - data.median > (mean_of(step) - step.median) / 2


def as_told(row: ScriptRow, *others: ScriptRow) -> ScriptRow:
    """The row, with means in the place of medians, and no intervals, where its steps or the others' are uneven."""
    if not any(map(is_uneven, (row, *others))):
        return row
    return replace(row, times={phase: Times(mean_of(times)) for phase, times in row.times.items()})


def share_of(row: ScriptRow, phase: str) -> float:
    """The phase's part of the step, by the sums of both over all steps."""
    whole = mean_of(row.times["step"])
    return mean_of(row.times[phase]) / whole if phase in row.times and whole else 0.0


def _average(title: str, phase: str) -> Column:
    """The median; the mean where that of all phases is told. Of the step, the mean alone."""

    def cell(row: Row) -> Cell:
        is_mean = isinstance(row, ScriptRow) and "step" in row.times and is_uneven(row)
        if phase == "step" and not is_mean:
            return Cell(number(None))
        return value_cell(row, f"{phase}_mean_ms" if is_mean else f"{phase}_ms")

    return Column(title, cell)


SCRIPT = define(
    ScriptRow,
    "Steps of a script and their phases, ms",
    *columns.cases({"script": "workload", "rank": "rank", "updates": "updates"}),
    columns.count("n", "n"),
    *(_average(title, name) for name, title in PHASES.items()),
    columns.median("step [95 %]", "step"),
    columns.value("peak (GiB)", "peak_gib"),
    _average("step, mean, as of phases", "step"),
    *(columns.files_only(columns.mean(f"{PHASES.get(name, name)}, mean ± std", name)) for name in (*PHASES, "step")),
    *columns.values({"issue": "issue_ms", "host waits": "wait_ms", "host ahead": "ahead_ms"}, brief=False),
    *columns.values({"waiting for launches, at most": "starved_ms", "first step": "first_step_ms"}, brief=False),
    *columns.values({"forwards": "forwards", "backwards": "backwards"}, brief=False),
    *columns.values({"samples per step": "samples_per_step", "waits per step": "waits"}, brief=False),
    *columns.values({"own part": "own_ms", "latest (%)": "latest_share", "measuring": "hooks_ms"}, brief=False),
    *columns.values({"seen": "steps_seen", "left out": "left_out", "skipped": "skipped"}, brief=False),
    *columns.values({"evaluated": "evaluated", "compiled": "compiled", "instrumented": "instrumented"}, brief=False),
    *columns.values({"batches": "batches", "loaded before": "from_stock"}, brief=False),
    columns.OUTCOME,
)
WAITS = define(
    WaitRow,
    "Lines in which the host waits for the device (on a CPU: would on a GPU)",
    *columns.cases({"script": "workload", "rank": "rank"}),
    *columns.words({"line": "line", "call": "call", "in": "function", "called from": "from_line"}),
    *columns.values({"calls per step": "calls_per_step", "ms per step": "ms_per_step"}),
    columns.count("calls", "calls", brief=False),
    columns.value("ms", "ms", brief=False),
    longest=8,
)
LINES = define(
    LineRow,
    "Lines of your code by phase, 100 samples a second",
    *columns.cases({"script": "workload", "rank": "rank", "phase": "phase"}),
    *columns.words({"line": "line", "in": "function"}),
    *columns.values({"share of the phase": "share", "ms per step": "ms_per_step"}),
    columns.count("samples", "seen", brief=False),
    longest=8,
)
RECOMPILATIONS = define(
    RecompilationRow,
    "Calls that torch.compile compiled again",
    *columns.cases({"script": "workload", "rank": "rank"}),
    *columns.words({"line": "line", "called from": "from_line"}),
    columns.count("compilations", "compilations"),
    *columns.values({"last in step": "last_step", "seconds": "seconds"}),
    columns.word("reason", "why"),
)
TABLES = (SCRIPT, LINES, WAITS, RECOMPILATIONS)


def measured(rows: Sequence[Row]) -> list[ScriptRow]:
    """The rows with times."""
    return [row for row in of_kind(rows, ScriptRow) if row.step_ms]


def first_rank(rows: Sequence[Row]) -> list[ScriptRow]:
    """Rows of rank 0, or of the only one."""
    return [row for row in measured(rows) if not row.rank]


def longest_phases(rows: Sequence[Row]) -> Iterator[Finding]:
    """Findings on the phases of a step."""
    for row in first_rank(rows):
        order = sorted((name for name in PHASES if name in row.times), key=lambda name: -share_of(row, name))
        first, second = [*order, order[0]][:2]
        whose = f" of {row.updates}" if row.updates else ""
        told = as_told(row)
        how = "median of {n:n}" if told is row else "mean of {n:n}; the median is {median_ms:ms}"
        said = f"A step{whose} takes {{step_ms:ms}} ({how}): {PHASES[first]} {{first_share:share}}" + (
            f", {PHASES[second]} {{second_share:share}}." if second != first else "."
        )
        figures: dict[str, Scalar] = {"step_ms": told.step_ms, "n": row.n, "first": first, "second": second}
        figures |= {} if told is row else {"median_ms": row.step_ms}
        if comes_in_bursts(row):
            said += " Some steps wait far longer for their batch than most, as where workers bring batches in bursts."
        shares = {"first_share": share_of(row, first), "second_share": share_of(row, second)}
        yield found("script.phases", said, **figures, **shares)


def how_it_went(rows: Sequence[Row]) -> Iterator[Finding]:
    """Steps that are not as the others, accumulation, and an end that was not the script's own."""
    own = first_rank(rows)
    for row in own:
        whose = f" of {row.updates}" if row.updates else ""
        if row.backwards is not None and row.backwards > 1:
            said = f"Gradients are accumulated: {{backwards:n}} backward passes a step{whose}."
            yield found("script.accumulates", said, backwards=row.backwards)
        if row.skipped:
            said = f"A gradient scaler left out {{skipped:n}} of {{seen:n}} updates{whose}; those steps are not timed."
            yield found("script.skipped", said, skipped=row.skipped, seen=row.steps_seen)
        if row.evaluated:
            said = f"Of {{seen:n}} steps{whose}, {{evaluated:n}} had an evaluation in between; they are not timed."
            yield found("script.evaluated", said, evaluated=row.evaluated, seen=row.steps_seen)
    if len(own) > 1:
        names = tuple(row.updates or "?" for row in own)
        said = "Several optimizers have steps of their own: {names:list}."
        yield found("script.optimizers", said, names=names)
    for row in of_kind(rows, ScriptRow)[:1]:
        if (copies := row.deep_copies_ms) is not None or row.deep_communication_ms is not None:
            told = ["copies to the device take {copies_ms:ms}"] * (copies is not None)
            told += ["communication takes {communication_ms:ms}"] * (row.deep_communication_ms is not None)
            said, figures = f"In a step of the deep run, {' and '.join(told)}.", (copies, row.deep_communication_ms)
            yield found("script.deep", said, copies_ms=figures[0], communication_ms=figures[1])
        is_deep = row.deep or any(isinstance(each, PeakRow | ProfileRow | ChangeRow) for each in rows)
        if row.status == "ok" and row.exit_code is not None and not is_deep:
            yield found("script.no-deep", literal("Kernels, dtypes and the owners of memory: trainstep run --deep."))
        if row.peak_gib is not None:
            whose = "as torch counts it on the GPU" if row.on_gpu else "of the whole process"
            yield found("script.peak", f"Peak memory, {whose}: {{peak_gib:gib}}.", peak_gib=row.peak_gib)
        if row.exit_code and row.status == "ok":
            said = "The script ended with exit code {code}: {ended}. What was measured before is kept."
            yield found("script.ended", said, code=row.exit_code, ended=row.ended)
        for note in row.notes or ():
            yield found("script.note", literal(f"{note[:1].upper()}{note[1:]}."))


HABITS = {
    "keeps-graphs": "The model is evaluated with gradients on{where}. Each call keeps its graph, and no backward pass "
    "follows. Put with torch.no_grad(): around it, which takes less memory and time.",
    "anomaly-detection": "Anomaly detection is on{where}. It keeps a stack of each operation and checks each node of "
    "backward. Remove it once the fault is found.",
    "deterministic-algorithms": "Deterministic algorithms are on{where}. Some operations have slower kernels then. "
    "Remove them unless you need equal bits.",
    "distributed-debug": "TORCH_DISTRIBUTED_DEBUG is DETAIL{where}. Each collective first compares its shapes between "
    "all ranks. Leave it out once the fault is found.",
    "launch-blocking": "CUDA_LAUNCH_BLOCKING is 1{where}. The host waits for each kernel. Leave it out once the fault "
    "is found.",
    "own-profiler": "A profiler of the script’s own records most steps{where}. Give it a schedule with few active "
    "steps, or remove it.",
    "finds-unused": "DistributedDataParallel looks for unused parameters in each step{where}, and finds none. Leave "
    "out find_unused_parameters=True.",
    "sends-often": "Gradients are sent to other ranks after each backward pass{where}, though several precede an "
    "update. Put with model.no_sync(): around the forward and backward passes before the last.",
    "recompile-limit": "torch.compile reached its limit of recompilations{where}. The function runs uncompiled for "
    "all further inputs. Mark what changes as dynamic, or raise torch._dynamo.config.recompile_limit.",
}
"""Habit of a script → the sentence about it."""


def habits(rows: Sequence[Row]) -> Iterator[Finding]:
    """Settings left on and habits that slow every step. No parameter is unused where no rank has one."""
    ranks = {row.rank for row in measured(rows)}
    for habit, said in HABITS.items():
        own = [row for row in of_kind(rows, HabitRow) if row.habit == habit]
        if own and (habit != "finds-unused" or {row.rank for row in own} == ranks):
            lines = tuple(dict.fromkeys(row.line for row in own if row.line))
            where = ", at {lines:list}" if lines else ", set by the environment or a library"
            yield found(f"script.{habit}", said.replace("{where}", where), lines=lines, seen=own[0].seen)


def overhead(rows: Sequence[Row]) -> Iterator[Finding]:
    """Findings on the cost of measuring."""
    for row in first_rank(rows)[:1]:
        if row.hooks_ms is None or row.step_ms is None:
            continue
        share = row.hooks_ms / mean_of(row.times["step"])
        too_much = " That is more than it should be: steps this short are better measured several at a time."
        said = "Measuring costs about {hooks_ms:ms} a step, {share:share} of it." + too_much * (share > OVERHEAD)
        yield found("script.overhead", said, hooks_ms=row.hooks_ms, share=share)


def slowing(row: ScriptRow) -> Trend | None:
    """Describe how its steps grow; None where they do not, or by less than `SLOWER`."""
    found = rising([each for each in row.samples.get("step", ()) if each is not None])
    return found if found and found.last >= (1 + SLOWER) * found.first else None


def slows_down(rows: Sequence[Row]) -> Iterator[Finding]:
    """Steps that take longer and longer, with the phase that does, and its lines."""
    for row in first_rank(rows)[:1]:
        if (trend := slowing(row)) is None:
            continue
        tenth = -(-len(row.samples["step"]) // 10)
        ends = {name: (row.samples[name][:tenth], row.samples[name][-tenth:]) for name in PHASES if name in row.samples}
        phase = max(ends, key=lambda name: statistics.median(ends[name][1]) - statistics.median(ends[name][0]))
        lines = _shown(_named_lines(rows, row, phase)[0])
        said = (
            "Steps slow down by {per_100_ms:ms} per 100 steps: from {from_ms:ms} to {to_ms:ms} in {n:n} steps. It is "
            f"{PHASES[phase]} that grows"
        ) + (", which runs {lines:list} of its time." if lines else ".")
        figures: dict[str, Scalar] = {"per_100_ms": 100 * trend.slope, "from_ms": trend.first, "to_ms": trend.last}
        ms = mean_of(row.times["step"]) - trend.first
        claim = Claim("Steps slow down: {from_ms:ms} → {to_ms:ms}", ("script",), ms)
        yield found("script.slows-down", said, claim, **figures, n=row.n, phase=phase, lines=lines)


def memory_grows(rows: Sequence[Row]) -> Iterator[Finding]:
    """Memory that grows from step to step: torch's on a GPU, else the process's."""
    for row in first_rank(rows)[:1]:
        for name, whose in (("allocated_mib", "Memory on the GPU"), ("process_mib", "Memory of the process")):
            trend = rising([each for each in row.series.get(name, ()) if isinstance(each, float)])
            if trend is None or trend.last - trend.first < GROWN_MIB:
                continue
            said = f"{whose} grows by {{mib:.3g}} MiB a step, from {{from_mib:.4g}} to {{to_mib:.4g}} MiB."
            said += " Lines that keep something from step to step: {lines:list}." if row.keeps else ""
            said += " Keep numbers (loss.item()) or detached tensors, and drop old ones."
            figures: dict[str, Scalar] = {"mib": trend.slope, "from_mib": trend.first, "to_mib": trend.last, "n": row.n}
            short, grown = "Memory grows by {mib:.3g} MiB a step", (trend.last - trend.first) / 1024
            claim = Claim(short, ("script",), gib=grown, is_part=False)
            yield found("script.memory-grows", said, claim, **figures, lines=(row.keeps or ())[:MOST_LINES])
            break


def data_bound(rows: Sequence[Row]) -> Iterator[Finding]:
    """Steps that wait for their batch."""
    for row in first_rank(rows):
        share = share_of(row, "data")
        if share >= DATA_BOUND:
            where = " (the loader at {loader})" if row.loader else ""
            said = (
                f"A step waits {{data_ms:ms}} on average for its batch{where}, {{share:share}} of it. Try "
                "more workers in the DataLoader, or less work per sample."
            )
            if row.worker_start:
                said += " Lines in workers of this start method were not looked into."
            stake = data = mean_of(row.times["data"])
            action = advice.loader_workers(_workers(row)) if ", no workers" in (row.loader or ", no workers") else None
            if action and row.loader and row.environment.get("cores"):  # workers take a part of it
                stake = min(data, mean_of(row.times["step"]) - data / _workers(row))
            claim = Claim("Steps wait for their batch", ("script",), stake, action=action)
            yield found("data.bound", said, claim, data_ms=data, share=share, loader=row.loader)


def _workers(row: ScriptRow) -> int:
    """Workers that its loader is advised to have, by the cores of its machine."""
    return advice.workers_of(as_float(row.environment.get("cores")))


def slow_lines(rows: Sequence[Row]) -> Iterator[Finding]:
    """The user's own lines in phases that no call of torch's explains, and in loaders."""
    for row in first_rank(rows)[:1]:
        for phase, least in LINES_BOUND.items():
            timed, (named, total) = WITHIN.get(phase, phase), _named_lines(rows, row, phase)
            # No clock tells plain Python from the forward around it, but samples do.
            part = total / max(total, 1, _named_lines(rows, row, timed)[1]) if phase == "python" else 1.0
            share = part * share_of(row, timed)
            if share < least or part < PLAIN or not named:
                continue
            lines, ms = _shown(named), part * mean_of(row.times[timed])
            figures: dict[str, Scalar] = {"lines": lines, "share": share, "ms": ms, "samples": total}
            if phase in ("data", "workers"):
                whose = "a loader’s worker fetches batches" if phase == "workers" else "batches are made"
                said = f"Where {whose}: {{lines:list}} of the time, by {{samples:n}} samples."
                yield found("data.lines", said, **figures)
            else:
                name = PHASES[phase].capitalize() if phase in PHASES else "Plain Python before backward"
                said = (
                    f"{name} takes {{ms:ms}} a step, {{share:share}} of it. It runs "
                    "{lines:list} of that time, by {samples:n} samples. Run that code less often, or on tensors."
                )
                claim = Claim(f"{name}: {named[0].line}", ("script",), ms)
                yield found("script.lines", said, claim, **figures)


def _named_lines(rows: Sequence[Row], row: ScriptRow, phase: str) -> tuple[list[LineRow], int]:
    """Lines that have most samples of a phase, and the number of its samples."""
    own = [each for each in of_kind(rows, LineRow) if each.phase == phase and each.rank == row.rank]
    total = sum(each.seen or 0 for each in own)
    waits_at = f"{row.loader}".partition(",")[0]  # for workers, which is no line of the loader's
    named = [each for each in own if (each.share or 0.0) >= LINE and each.line != waits_at]
    return named[:MOST_LINES] if total >= FEWEST else [], total


def _shown(named: Sequence[LineRow]) -> tuple[str, ...]:
    return tuple(f"{each.line}{_in(each.function)} ({percent(each.share or 0.0)})" for each in named)


def _in(function: str | None) -> str:
    return f" in {function}" if function and not function.startswith("<") else ""


def launch_bound(rows: Sequence[Row]) -> Iterator[Finding]:
    """Steps that the host cannot issue any faster."""
    for row in first_rank(rows):
        if row.on_gpu and "starved" in row.times and row.step_ms:
            step_ms, starved = (as_told(row).times[name].median for name in ("step", "starved"))
            if starved >= LAUNCH_BOUND * step_ms:
                said = (
                    "The GPU may wait for launches for {starved_ms:ms} of a step that takes {step_ms:ms}: they set its "
                    "pace, not the GPU. Larger batches, torch.compile or CUDA graphs help; faster kernels will not."
                )
                claim = Claim("The step is launch-bound", ("script",), starved, action=advice.IN_GRAPHS)
                yield found("launches.script", said, claim, starved_ms=starved, step_ms=step_ms)


def waiting_lines(rows: Sequence[Row]) -> Iterator[Finding]:
    """Lines that wait for long; on a CPU, lines that would wait every step."""
    steps = {row.rank: row for row in first_rank(rows)}
    would: list[str] = []
    for row in of_kind(rows, WaitRow):
        if row.rank or (step := steps.get(row.rank)) is None:
            continue
        from_line = f" (called from {row.from_line})" if row.from_line else ""
        figures: dict[str, Scalar] = {"line": row.line, "call": row.call, "calls": row.calls_per_step}
        if row.ms_per_step is None:
            said = f"The host also waits for the device at {{line}}{from_line}, {{calls:n}} times in one step."
            yield found("waits.seen", said, **figures)
        elif row.on_gpu and row.ms_per_step >= WAITING * mean_of(step.times["step"]):
            share = row.ms_per_step / mean_of(step.times["step"])
            said = (
                f"The host waits {{ms:ms}} a step for the device at {{line}}{from_line}, {{share:share}} of the step, "
                "in {call}: until then it issues nothing. Read it less often, or later."
            )
            claim = Claim("The host waits for the device at {line}", ("wait", "waits"), row.ms_per_step)
            yield found("waits.line", said, claim, **figures, ms=row.ms_per_step, share=share)
        elif not row.on_gpu and (row.calls_per_step or 0) >= PER_STEP:
            caller = f", called from {row.from_line}" if row.from_line else ""
            would.append(f"{row.line} ({row.call}, {number(row.calls_per_step)} times a step{caller})")
    if would:
        said = (
            "Tensors are read on the host at {lines:list}: nothing on a CPU; were they on a GPU, the host would wait "
            "there until the device is done."
        )
        yield found("waits.would", said, lines=tuple(would))


def compiled_again(rows: Sequence[Row]) -> Iterator[Finding]:
    """Calls that are compiled again while the script trains; what the first step alone compiles is its start."""
    for row in of_kind(rows, RecompilationRow):
        if not row.rank and (row.last_step or 0) > 1:
            from_line = f" (called from {row.from_line})" if row.from_line else ""
            said = (
                f"The call at {{line}}{from_line} was compiled {{compilations:n}} times, the last time in step "
                "{last_step:n}, because: {reason}"
            )
            known: dict[str, Scalar] = {"compilations": row.compilations, "last_step": row.last_step}
            yield found("compiled.again", said, line=row.line, **known, reason=row.why)


def late_ranks(rows: Sequence[Row]) -> Iterator[Finding]:
    """The rank whose own part of the step is later than the others', and what in it makes it so."""
    ranks = [row for row in measured(rows) if row.rank is not None]
    by_rank = {row.rank: row for row in ranks if row.updates == ranks[0].updates}
    if len(by_rank) < 2:
        return
    own = {rank: row.times["own"].median for rank, row in by_rank.items()}
    last = max(own, key=lambda rank: own[rank])
    others = sorted(value for rank, value in own.items() if rank != last)
    usual = others[len(others) // 2]
    if (low := by_rank[last].times["own"].low) is None:
        return  # of few steps nothing can be said
    if low < (1 + LATE) * usual:
        said = "All {ranks:n} ranks take as long for their own part of a step: {least_ms:ms} to {most_ms:ms}."
        yield found("ranks.even", said, ranks=len(by_rank), least_ms=min(own.values()), most_ms=own[last])
        return
    excess = {}
    for phase in PHASES:
        if phase != "communication" and phase in by_rank[last].times:
            theirs = [row.times[phase].median for rank, row in by_rank.items() if rank != last and phase in row.times]
            excess[phase] = by_rank[last].times[phase].median - (sorted(theirs)[len(theirs) // 2] if theirs else 0.0)
    why = max(excess, key=lambda phase: excess[phase])
    row, is_data = by_rank[last], why == "data"
    where = f" at the loader of {literal(row.loader)}" if is_data and row.loader else ""
    said = (
        f"Rank {{rank}} is the straggler: {PHASES[why]}{where} ({{excess_ms:ms}} more than others). Its own part of a "
        "step takes {own_ms:ms}, the others’ {usual_ms:ms}, before they wait for one another."
    ) + " More workers in its DataLoader, or less work per sample, would shorten all steps." * is_data
    figures: dict[str, Scalar] = {"rank": last, "own_ms": own[last], "usual_ms": usual, "phase": why}
    figures |= {"excess_ms": excess[why], "latest_share": row.latest_share}
    action = advice.loader_workers(_workers(row)) if is_data else None
    claim = Claim(f"Rank {{rank}} is the straggler: {PHASES[why]}", ("script",), excess[why], action=action)
    yield found("ranks.late_data" if is_data else "ranks.late", said, claim, **figures)


def _of_each_rank(rule: Rule) -> Rule:
    """A rule of one process, for each rank: all findings of the first, and those that only another has."""

    def told(rows: Sequence[Row]) -> Iterator[Finding]:
        ranks, before = sorted({row.rank for row in measured(rows) if row.rank is not None}), set[str]()
        for rank in (*ranks, *([] if ranks else [None])):
            own = [row for row in rows if not isinstance(row, OfScript) or row.rank == rank]
            alone = [replace(row, rank=None) if isinstance(row, OfScript) else row for row in own]
            every = [each for each in rule(alone if ranks else rows) if each.id not in before]
            before |= {each.id for each in every}
            yield from (replace(each, sentence=f"Rank {rank}: {each.sentence}") if ranks else each for each in every)

    return told


RULES = (
    *map(_of_each_rank, (longest_phases, how_it_went, overhead, slows_down, memory_grows, data_bound, slow_lines)),
    *map(_of_each_rank, (launch_bound, waiting_lines, compiled_again)), habits, late_ranks,
)  # fmt: skip


def script(rows: Sequence[Row]) -> Section | None:
    """The steps of a script, phase by phase."""
    lead = ""
    for first in first_rank(rows)[:1]:
        averages = "Means" if is_uneven(first) else "Medians"
        clock = "the device's events" if first.on_gpu else "the host's clock"
        counts = {"a scaler skipped": first.skipped, "were evaluated in": first.evaluated}
        counts["code was compiled in"] = first.compiled
        left = [f"the first {number(first.left_out)} steps"]
        left += [f"{number(count)} that {what}" for what, count in counts.items() if count]
        left += ["those that instruments looked into"] if first.instrumented else []
        lead = (
            f"{averages} of {number(first.n)} steps by {clock}, from the end of one optimizer step to the end of the "
            f"next; left out are {listed(left)}. The script: {first.ended}."
        )
    own = [row for row in measured(rows) if row.samples.keys() & PHASES.keys()]
    title = "Where the script’s steps spend their time"
    charts = [_in_order(row, f"-{place}" if place else "") for place, row in enumerate(first_rank(own))]
    drawn = [Charts([each]) for each in (*charts, *_by_rank(own))]
    return section("script", "Script", title, lead, *drawn, page_table(SCRIPT, rows), page_table(LINES, rows))


def _in_order(row: ScriptRow, suffix: str) -> Chart:
    """Every step: those that were timed by their phases, the others by what sets them apart."""
    timed = [int(numeric(at)) for at in row.series.get("number") or range(1, len(row.samples["step"]) + 1)]
    others = list(zip(*(row.series.get(name, ()) for name in OTHERS), strict=True))
    of_phases = {phase: dict(zip(timed, row.samples[phase], strict=True)) for phase in PHASES if phase in row.samples}
    parts = [(ROLES[phase], PHASES[phase], known) for phase, known in of_phases.items() if any(known.values())]
    for why, (role, words) in APART.items():
        parts.append((role, words, {int(numeric(at)): numeric(ms) for at, ms, reason in others if reason == why}))
    numbers = sorted({at for *_, known in parts for at in known})
    layers = [(role, words, [known.get(at, 0.0) for at in numbers]) for role, words, known in parts if known]
    top, each = 1.05 * max(row.samples["step"]), neighbours(len(numbers))
    caption = f"Each bar is the longest of {each} steps. " if each > 1 else ""
    caption += "What is not timed may go on beyond the frame. Drag over a part to see it closer." if others else ""
    plot, legend = partial(steps_in_order, numbers, layers, top), [(role, name) for role, name, _ in layers]
    whose = f": {row.updates}" if row.updates else ""
    return Chart(f"steps{suffix}", f"Every step, in the order it ran{whose}", caption, plot, legend)


def _by_rank(rows: Sequence[ScriptRow]) -> list[Chart]:
    own = {f"rank {row.rank}": row.samples.get("own", ()) for row in rows if row.updates == rows[0].updates}
    if len(own) < 2 or not all(own.values()):
        return []
    caption = "A rank’s own part of each step, before it waits for the others: the darker, the longer."
    return [Chart("ranks", "Which rank was late, step by step", caption, partial(rank_map, own))]


def waits(rows: Sequence[Row]) -> Section | None:
    """The lines that wait."""
    lead = "A tensor that is read on the host is waited for: nothing more is issued until the device has computed it."
    if not any(row.on_gpu for row in of_kind(rows, WaitRow)):
        lead += " These were counted on a CPU, where nothing is waited for."
    return section("waits", "Host waits", "Lines that wait for the device", lead, page_table(WAITS, rows))


def recompilations(rows: Sequence[Row]) -> Section | None:
    """Section of what was compiled again."""
    table = page_table(RECOMPILATIONS, rows)
    return section("recompilations", "Compiled again", "Calls that were compiled again", "", table)


SECTIONS = (script, waits, recompilations)
