"""Rows of what the ranks' logs say: steps by what they update, lines that wait, and what was compiled again; and of the
kernels in the trace of the steps that the profiler recorded."""

from __future__ import annotations

import dataclasses
import re
import signal
import statistics
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from trainstep.base.commit import commit_of
from trainstep.base.stats import summarize
from trainstep.observe.habits import habits_of
from trainstep.observe.keeping import keeping_lines
from trainstep.observe.lines import shown_line
from trainstep.observe.loaders import main_loader, most_used
from trainstep.observe.log import ENDED, RankLog
from trainstep.observe.sampling import PYTHON
from trainstep.observe.steps import COMMUNICATION, COUNTS, DATA, FORWARD, Step
from trainstep.rows import HabitRow, LineRow, RecompilationRow, ScriptRow, WaitRow, row_of
from trainstep.rows.records import Row, Times, make_row, of_kind
from trainstep.rows.run import LATE

WARMUP = 3  # steps left out of many
MANY = 10  # steps from which that many are; of fewer, the first alone
USUAL = 0.5  # share of steps with an evaluation, or in which code is compiled, above which that is a part of the step
LEAST_SEEN = 0.01  # share of a phase's samples from which a line has a row
WORKERS = "workers"
"""In the place of a phase, the time in which a loader's workers fetch batches."""
INSTRUMENTED = frozenset({"profiled", "recorded", "after the profiler", "searched", "watched by the ladder"})
"""Tags of steps that are not as they would be without us."""


def script_records(logs: Sequence[RankLog], script: str, code: int | None) -> list[Row]:
    """All rows of a run.

    Args:
        logs: of each rank that left one.
        script: what it is called.
        code: this rank's exit code; −n for signal n. None where the script goes on, as after `watch`.
    """
    rows: list[Row] = []
    _share_tags(logs)
    latest = _latest(logs)
    for log in logs:
        _add_commit(log)
        several = log.header.get("world_size", 1) > 1
        rank = log.header.get("rank") if several else None
        own: dict[str, Any] = {"workload": script, "rank": rank, "environment": log.facts.get("environment", {})}
        own_code = code if log.code is None else log.code
        how: dict[str, Any] = {"ended": how_it_ended(log, own_code), "exit_code": own_code}
        if not log.steps:
            rows.append(ScriptRow(**own, **how, status="failed", reason=why_no_step(log, own_code)))
            continue
        share = latest.get(log.header.get("rank", 0))
        rows += [*_step_rows(log, own, {**how, "latest_share": share}), *_wait_rows(log, own)]
        rows += [*_line_rows(log, own), *_recompilation_rows(log, own)]
        rows += [HabitRow(**own, habit=habit, line=line, seen=seen) for habit, line, seen in habits_of(log)]
        environment = {"environment": own["environment"]}
        rows += [row_of(**{**each, **environment}) for each in log.rows]
    return rows


def _add_commit(log: RankLog) -> None:
    """Add the commit to what is known of a rank's machine. This process asks git: a script's must start no child."""
    if "environment" in log.facts:
        log.facts["environment"]["commit"] = commit_of()


def _share_tags(logs: Sequence[RankLog]) -> None:
    """A step that one rank looks into is not as it would be on any: the others wait for that one."""
    looked_into = {step.number for log in logs for step in log.steps if INSTRUMENTED & step.tags}
    for step in (step for log in logs for step in log.steps):
        if step.number in looked_into and not INSTRUMENTED & step.tags:
            step.tags.add("recorded")


def _step_rows(log: RankLog, own: Mapping[str, Any], how: Mapping[str, Any]) -> Iterator[ScriptRow]:
    """A row for the steps of every set of optimizers."""
    groups: dict[tuple[str, ...], list[Step]] = {}
    for step in log.steps:
        groups.setdefault(tuple(step.updated), []).append(step)
    if len(groups) > 1:  # a set that some optimizer of another one misses once, as where one of them is left out
        groups = {names: steps for names, steps in groups.items() if len(steps) > 1} or groups
    for names, steps in groups.items():
        whose = {"updates": ", ".join(names) if len(groups) > 1 else None, "optimizers": names}
        yield _step_row(log, steps, {**own, **how, **whose})


def _step_row(log: RankLog, steps: Sequence[Step], known: Mapping[str, Any]) -> ScriptRow:
    compiled = {each["step"] for each in log.recompilations}
    left_out = WARMUP if len(steps) >= MANY else min(1, len(steps) - 1)
    apart = [_what_is_apart(step, compiled) for step in steps]
    usual = {what for what in ("evaluated", "compiled") if sum(what in each for each in apart) > USUAL * len(steps)}
    later = zip(steps[left_out:], apart[left_out:], strict=True)
    reasons = {step.number: next((what for what in own if what not in usual), "") for step, own in later}
    kept = [step for step in steps if reasons.get(step.number) == ""]
    if by_device := [step for step in kept if step.device]:  # the others have the host's times alone
        reasons |= {step.number: "instrumented" for step in kept if not step.device}
        kept = by_device
    counts = Counter(reasons.values())
    most = ", ".join(f"{count} {why}" for why, count in counts.most_common() if why) or "none came after the warm-up"
    others = [step for step in steps if reasons.get(step.number) != ""]
    taken = [_times_of(step) for step in kept]
    phases = list(dict.fromkeys(phase for each in taken for phase in each))
    samples = {phase: [each.get(phase, 0.0) for each in taken] for phase in phases}
    memory = zip(*(step.memory for step in kept), strict=False)
    loaders = log.facts.get("loaders", ())
    return ScriptRow(
        **known,
        times={phase: Times.of(summarize(values)) for phase, values in samples.items()},
        samples=samples,
        series={
            **dict(zip(("process_mib", "allocated_mib"), memory, strict=False)),
            "number": [step.number for step in kept],
            "apart": [step.number for step in others],
            "apart_ms": [sum(step.host) for step in others],
            "apart_why": [reasons.get(step.number, "left out") for step in others],
        },
        n=len(kept),
        world_size=log.header.get("world_size"),
        on_gpu=log.facts.get("on_gpu"),
        steps_seen=len(steps),
        left_out=left_out,
        skipped=counts["skipped"],
        evaluated=counts["evaluated"],
        compiled=counts["compiled"],
        instrumented=counts["instrumented"],
        notes=tuple(dict.fromkeys(log.notes)) or None,
        **_counts(kept),
        samples_per_step=_samples_per_step(kept),
        from_stock=_taken_from_stock(log, kept),
        first_step_ms=sum(steps[0].host),
        load=log.facts.get("load"),
        cpu_share=log.facts.get("cpu_share"),
        keeps=tuple(keeping_lines(log.facts.get("calls", ()))) or None,
        peak_gib=peak / 2**30 if (peak := log.facts.get("peak_bytes")) else None,
        waits=sum(calls for step in kept for calls, _ in step.waits.values()) / len(kept) if kept else None,
        loader=main_loader(loaders),
        worker_start=most_used(loaders).get("start") if loaders else None,
        status="ok" if kept else "failed",
        reason="" if kept else f"no step of {len(steps)} could be timed: {most}",
    )


def _counts(steps: Sequence[Step]) -> dict[str, Any]:
    """Medians of the counts that are columns of the row; batches are those of all steps."""
    medians = {name: statistics.median([getattr(each, name) for each in steps]) for name in _COUNTED if steps}
    medians["forwards"] = medians.get("forwards") or None  # calls of some models are not seen
    return medians | {"batches": sum(each.batches for each in steps)}


_OWN = {each.name for each in dataclasses.fields(ScriptRow)} - {each.name for each in dataclasses.fields(Row)}
_COUNTED = [name for name in COUNTS if name in _OWN]


def _samples_per_step(steps: Sequence[Step]) -> float | None:
    """Median of the samples in loaders' batches: the first step may take more, where a library fetches ahead, and the
    last less.

    None where most steps take none, or where a part of them may be an evaluation's.
    """
    if not steps or any(step.evaluations for step in steps):
        return None
    return statistics.median([step.samples for step in steps]) or None


def _taken_from_stock(log: RankLog, steps: Sequence[Step]) -> int:
    """By how many batches what lay ready in loaders shrank in these steps; below 0 where it grew.

    Steps in which no other batch was asked for in the place of one that was taken do not count: the data are at an end.
    """
    found, stock = 0, {step.number: step.stock for step in log.steps}
    for number in (step.number for step in steps):
        (before, asked_before), (ready, asked) = stock.get(number - 1, (0, 0)), stock[number]
        found += before - ready if asked >= asked_before else 0
    return found


def _what_is_apart(step: Step, compiled: Collection[int]) -> list[str]:
    """Reasons why a step is not as the others, the weightiest first."""
    found = {
        "instrumented": INSTRUMENTED & step.tags,
        "skipped": step.is_skipped,
        "evaluated": step.evaluations,
        "compiled": step.number in compiled,
    }
    return [what for what, is_so in found.items() if is_so]


def _times_of(step: Step) -> dict[str, float]:
    """Milliseconds of the step's phases and of the whole, as the device had them where there is one."""
    phases, waited = step.ms, sum(ms for _, ms in step.waits.values())
    whole = sum(phases.values())
    found = {**phases, "step": whole, "own": whole - phases.get(COMMUNICATION, 0.0)}
    if step.device:
        issue = max(0.0, sum(step.host) - waited - step.host_ms.get(DATA, 0.0))
        starved = min(issue, step.starved_ms)  # a line that waits does so while the device works
        found |= {"wait": waited, "issue": issue, "ahead": step.ahead_ms, "starved": starved}
    return found


def _latest(logs: Sequence[RankLog]) -> dict[int, float]:
    """Rank → share of the steps in which its own part took longest, of those that all ranks have."""
    if len(logs) < 2:
        return {}
    by_rank = {
        log.header["rank"]: {step.number: _times_of(step)["own"] for step in log.steps if not INSTRUMENTED & step.tags}
        for log in logs
    }
    common = sorted(set.intersection(*(set(each) for each in by_rank.values())))
    common = common[WARMUP:] if len(common) >= MANY else common[1:]
    won = Counter(max(by_rank, key=lambda rank: by_rank[rank][number]) for number in common)
    return {rank: won[rank] / len(common) for rank in by_rank} if common else {}


def _wait_rows(log: RankLog, own: Mapping[str, Any]) -> Iterator[WaitRow]:
    """A row for each line and call, the longest wait first."""
    totals: defaultdict[int, list[float]] = defaultdict(lambda: [0, 0.0])
    later = log.steps[1:] or log.steps  # the first one also waits for what happens once
    steps = [step for step in later if not INSTRUMENTED & step.tags]
    for step in steps:
        for line, (calls, ms) in step.waits.items():
            totals[line][0] += calls
            totals[line][1] += ms
    for line, (calls, ms) in sorted(totals.items(), key=lambda item: (-item[1][1], item[0])):
        timed: dict[str, Any] = {
            "calls": int(calls),
            "calls_per_step": calls / len(steps),
            "ms_per_step": ms / len(steps),
            "ms": ms,
        }
        yield WaitRow(**own, **_place_columns(log, line), **timed)
    known = {(log.lines[line]["file"], log.lines[line]["line"]) for line in totals}
    for line, count in log.syncs.items():  # of one step, and not timed
        if (log.lines[line]["file"], log.lines[line]["line"]) not in known:
            yield WaitRow(**own, **_place_columns(log, line), calls_per_step=float(count))


def _line_rows(log: RankLog, own: Mapping[str, Any]) -> Iterator[LineRow]:
    """A row for each line of the script's that had more than a hundredth of its phase's samples, the most first. A line
    most of whose samples came late is marked so."""
    own_steps = [step for step in log.steps[1:] if not INSTRUMENTED & step.tags]
    later = [step for step in own_steps if not step.evaluations] or own_steps
    found: defaultdict[str, Counter[tuple[str, str]]] = defaultdict(Counter)
    late = Counter[tuple[str, str, str]]()
    for step in later:
        for number, count in step.seen.items():
            place, phase = log.lines[number], log.lines[number]["call"]
            key = shown_line(place["file"], place["line"]) if place["file"] else "", place["function"]
            found[phase.removeprefix(LATE)][key] += count
            late[phase.removeprefix(LATE), *key] += count * phase.startswith(LATE)
    loaders = log.facts.get("loaders", ())
    for worker in log.workers.values():
        if loaders and worker["loader"] == most_used(loaders)["line"]:
            for file, number, function, count, is_late in worker["lines"]:
                key = shown_line(file, number) if file else "", function
                found[WORKERS][key] += count
                late[WORKERS, *key] += count * is_late
    for phase, lines in found.items():
        timed, part = (FORWARD, lines.total() / found[FORWARD].total()) if phase == PYTHON else (phase, 1.0)
        whole_ms = part * sum(step.host_ms.get(timed, 0.0) for step in later) / len(later) if later else 0.0
        for (line, function), count in lines.most_common():
            if line and count > LEAST_SEEN * lines.total():
                share = count / lines.total()
                ms = None if phase == WORKERS else share * whole_ms
                mark = LATE * (late[phase, line, function] > count / 2)
                known: dict[str, Any] = {"line": mark + line, "phase": phase, "function": function}
                yield LineRow(**own, **known, seen=count, share=share, ms_per_step=ms)


def deep_records(logs: Sequence[RankLog], rows: Sequence[Row]) -> tuple[list[Row], list[Row]]:
    """The rows of the run that was timed, with columns of the deep run's, and further rows of that.

    Args:
        logs: of the deep run.
        rows: those of `script_records`, of the run that was timed.
    """
    name, deep = of_kind(rows, ScriptRow)[0].workload, script_records(logs, "", 0)
    known = {(row.rank, row.line) for row in of_kind(rows, WaitRow)}
    by_case = {(row.rank, row.updates): row for row in of_kind(deep, ScriptRow)}
    joined = list(rows)
    for place, row in enumerate(joined):
        if isinstance(row, ScriptRow) and (own := by_case.get((row.rank, row.updates))):
            joined[place] = dataclasses.replace(
                row,
                notes=(*(row.notes or ()), *(own.notes or ())) or None,
                deep_copies_ms=own.times["copies"].median if "copies" in own.times else None,
                deep_communication_ms=own.times[COMMUNICATION].median if COMMUNICATION in own.times else None,
            )
    further: list[Row] = []
    for row in deep:
        if isinstance(row, WaitRow) and row.ms_per_step is None and (row.rank, row.line) not in known:
            further.append(dataclasses.replace(row, workload=name))
        elif not isinstance(row, ScriptRow | WaitRow | RecompilationRow):
            further.append(row)
    return joined, further


def _place_columns(log: RankLog, line: int) -> dict[str, Any]:
    """Columns that say where a line is, and what it calls."""
    place = log.lines[line]
    user = place.get("user_file")
    return {
        "line": shown_line(place["file"], place["line"]),
        "call": place["call"],
        "function": place["function"],
        "from_line": shown_line(user, place["user_line"]) if user else None,
        "on_gpu": log.facts.get("on_gpu"),
    }


def _recompilation_rows(log: RankLog, own: Mapping[str, Any]) -> Iterator[RecompilationRow]:
    """A row for each call whose function was compiled more than once, the most often first."""
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for each in log.recompilations:
        groups.setdefault((each["function"], *each["called"][:2], *each["user"]), []).append(each)
    for (function, file, line, user, user_line), times in sorted(groups.items(), key=lambda item: -len(item[1])):
        reasons = [each["reason"] for each in times if each["reason"]]
        if len(times) < 2 or not reasons:
            continue
        yield RecompilationRow(
            **own,
            function=str(function),
            line=shown_line(file, line),
            from_line=shown_line(user, user_line) if user else None,
            compilations=len(times),
            last_step=times[-1]["step"],
            why=_shortened(reasons[-1]),
            reasons=len(set(reasons)),
            seconds=sum(each["seconds"] or 0.0 for each in times),
        )


def _shortened(reason: str) -> str:
    """Dynamo's reason without its number, the code that it cites and the stack."""
    line = reason.split("\n", 1)[0].split("  #", 1)[0]
    return re.sub(r"^\d+/\d+: ", "", line).strip()


def how_it_ended(log: RankLog, code: int | None) -> str:
    """Say how a script ended.

    Args:
        code: exit code; −n for signal n. None where the script goes on.
    """
    received = ", ".join(f"signal {each['number']} at {each['after_s']:.1f} s" for each in log.signals)
    ended, stopped = log.ended or {}, f" after trainstep received {received}" if received else ""
    if ended.get("how") == "steps":
        return "it was stopped after the steps that were asked for"
    if ended.get("how") == "raised" and code in (None, 1, -signal.SIGINT, 128 + signal.SIGINT):
        text = f": {ended['text']}" if ended.get("text") else ""
        return f"it was ended by {ended['error']}{text}{ended.get('place', '')}{stopped}"
    if code is None:
        return "it goes on" if not ended else "it ran to its end"
    if code < 0:
        return f"it was ended by signal {-code}{stopped}"
    if not ended:
        return f"it ended without Python's own end, as by os._exit or exec{stopped}"
    return f"it ran to its end{stopped}" if code == 0 else f"it ended by sys.exit{stopped}"


def why_no_step(log: RankLog, code: int | None) -> str:
    """A sentence for a script of which no step was seen."""
    elsewhere = list(dict.fromkeys(each["what"] for each in log.elsewhere))
    trains = next((each for each in log.elsewhere if "pid" in each), None)
    how = how_it_ended(log, code)
    if not log.has_begun:
        return (
            "Python did not load the observer before the script, as where its startup fails: its words are above, or "
            "a wrapper of the interpreter drops PYTHONPATH"
        )
    if not log.header:
        return "the log of this run cannot be read: it was removed, or the disk is full"
    if trains is not None:
        return f"no optimizer step in the script's own process ({how}), but in {trains['what']}, which is not measured"
    if elsewhere:
        return (
            f"no optimizer step in the script's own process ({how}); it started {', '.join(elsewhere)}: if that "
            "trains, give that to trainstep run, or torchrun … -m trainstep run train.py where it starts the ranks"
        )
    if "torch" not in log.facts:
        return f"the script imported no torch ({how}): there is nothing to measure"
    if steps := log.facts.get("waiting"):
        return f"of {steps} steps none has a time ({how}): a profiler or a graph of the script's own was recording"
    if ended := next((each for each in log.notes if each.startswith(ENDED)), ""):
        return f"{ended} ({how})"
    seen = f"no step of a torch.optim optimizer was seen ({how})"
    if backwards := log.facts.get("backwards"):
        return (
            f"{seen}, but {backwards} backward passes: a step is found by its optimizer, and an update that is written "
            "out has none; torch.optim.SGD subtracts lr times the gradient too"
        )
    return f"{seen}: there is nothing to measure"


def kernel_records(log: RankLog, rows: Sequence[Row], folder: Path) -> list[Row]:
    """Rows of the trace in a folder, held against the steps that were timed without the profiler; none without a trace.

    Args:
        log: of the first rank, which recorded it.
        rows: those of `script_records`.
        folder: where the trace is.
    """
    profiled = [step for step in log.steps if "profiled" in step.tags]
    timed = next((row for row in of_kind(rows, ScriptRow) if row.status == "ok"), None)
    if not profiled or timed is None:
        return []
    from trainstep.base.config import PHASES
    from trainstep.measure.profile.chrome import read_chrome_trace  # with torch, which the script's rows do without
    from trainstep.measure.profile.kernels import profiles_of
    from trainstep.measure.profile.ranges import WARMUP as WARMUP_STEPS
    from trainstep.measure.profile.rows import profile_rows, timing_values
    from trainstep.observe.instruments import trace_path
    from trainstep.rows import ProfileRow

    file = trace_path(folder, 0)
    if not file.exists():
        return []
    found: list[Row] = []
    profiles = profiles_of(read_chrome_trace(file))
    phases = [step.ms for step in profiled]
    with_it = {name: [each.get(name, 0.0) for each in phases] for name in PHASES}
    with_it["step"] = [sum(each.values()) for each in phases]
    without = {name: list(timed.samples.get(name, ())) or [0.0] for name in (*PHASES, "step")}
    for device, profile in profiles.items():
        case = {"workload": timed.workload, "device": device if len(profiles) > 1 else None}
        last = {name: values[WARMUP_STEPS:][: profile.steps] or values for name, values in with_it.items()}
        values = timing_values(without, last, profile) | {"trace": file.name}
        samples = {"step": without["step"], "profiled_step": last["step"]}
        found.append(make_row(ProfileRow, case, values, samples=samples, environment=timed.environment))
        found += profile_rows(profile, case, None, timed.environment)
    return found
