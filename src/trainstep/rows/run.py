"""Rows of scripts that `trainstep run` measured: their steps, the lines that wait, what was compiled again."""

from __future__ import annotations

from trainstep.rows.row import Row, Timed, setting

LATE = "code at or before "
"""In front of a line most of whose samples came late, and of the phase of each of these."""


class OfScript(Row):
    """Script of a row, and the rank of it."""

    workload: str = setting()  # the script's file name, or its module
    rank: int | None = setting(None)  # None where there is one
    run: int | None = setting(None)  # which launch of several that are compared


class ScriptRow(OfScript, Timed, kind="script"):
    """Steps of a script: the whole ("step") and its phases, which follow one another: "data" (waiting for it), "copies"
    (from host to device), "forward", "loss" (from forward to backward), "backward", "communication" (waiting for other
    ranks after backward, and collectives), "optimizer", "evaluation" and "other".

    On a GPU these are the device's times. Beside them "own" (the step but for communication), "starved" (the most that
    the device can have waited for launches), and the host's: "issue" (without waiting for data or the device; of a host
    that is far ahead, with waits for room in the device's queue), "wait" (for the device, in lines of code) and "ahead"
    (by how much later the device ends the step). Series are of the memory at each step's end: "process_mib" (without
    files) and, on a GPU, "allocated_mib" (that torch has given out); of the "number" of each; and of the steps that are
    not timed: "apart" (their numbers), "apart_ms" and "apart_why".
    """

    updates: str | None = setting(None)  # which optimizers, where not all steps update the same
    world_size: int | None = None
    on_gpu: bool | None = None
    optimizers: tuple[str, ...] | None = None
    steps_seen: int | None = None
    left_out: int | None = None  # the first steps, which also pay for what happens once
    skipped: int | None = None  # by a gradient scaler; not among those that are timed
    evaluated: int | None = None  # with an evaluation in between; not timed unless most steps have one
    compiled: int | None = None  # in which torch.compile compiled something; not timed unless most steps are such
    instrumented: int | None = None  # profiled, or recorded otherwise, or after the profiler on a GPU; not timed
    forwards: float | None = None  # per step
    backwards: float | None = None
    samples_per_step: float | None = None  # in loaders' batches, the median; None with an evaluation in most steps
    batches: int | None = None  # that loaders gave in the timed steps
    from_stock: int | None = None  # by how many what lay ready in loaders shrank in them; below 0 where it grew
    first_step_ms: float | None = None
    load: float | None = None  # the system's load average as it began
    cpu_share: float | None = None  # of the time in which its first thread could run, the part in which it did
    keeps: tuple[str, ...] | None = None  # lines around its steps that keep something from one to the next
    peak_gib: float | None = None  # torch's count on a GPU, else the most that the process had resident
    waits: float | None = None  # calls per step in which the host waits for the device, or on a CPU would
    latest_share: float | None = None  # of steps in which this rank's own part took longest
    hooks_ms: float | None = None  # per step, the time that the observer's own code takes
    deep: bool | None = None  # whether a deep run was asked for, however it went
    deep_copies_ms: float | None = None  # per step of the deep run, from host to device
    deep_communication_ms: float | None = None  # per step of the deep run, in collectives that Python calls too
    loader: str | None = None  # that most batches came from: its line, workers, and whether it pins memory
    worker_start: str | None = None  # how that loader's workers start, if not by a fork: the observer is not in them
    notes: tuple[str, ...] | None = None  # what an instrument could not do, as sentences
    ended: str | None = None  # how the script ended
    exit_code: int | None = None  # −n for signal n


class WaitRow(OfScript, kind="wait"):
    """A line of code in which the host waits until the device is done; on a CPU, in which it would on a GPU."""

    line: str = setting()  # `train.py:31`
    call: str = setting()  # item, cpu, print …
    function: str | None = None
    from_line: str | None = None  # the user's own, where `line` is a library's
    on_gpu: bool | None = None
    calls: int | None = None
    calls_per_step: float | None = None
    ms_per_step: float | None = None
    ms: float | None = None  # of all calls


class LineRow(OfScript, kind="line"):
    """A line of the user's own that was under way in a phase, by samples; "code at or before" it where most
    samples came late."""

    line: str = setting()  # `train.py:31`, or `code at or before train.py:31`
    phase: str = setting()  # or "workers", in which loaders fetch batches, or "python", a part of a joined forward
    function: str | None = None
    seen: int | None = None  # samples
    share: float | None = None  # of the phase's samples
    ms_per_step: float | None = None  # that share of the phase


class HabitRow(OfScript, kind="habit"):
    """A setting left on, or a habit of the script's, that slows every step, and the line that brings it."""

    habit: str = setting()  # as its finding is called
    line: str | None = setting(None)  # None where no file of the user's does
    seen: float | None = None  # share of the steps with it, or how often the line had it


class RecompilationRow(OfScript, kind="recompilation"):
    """A line of code whose call torch.compile compiled more than once."""

    line: str = setting()
    function: str = setting()  # what dynamo began at; for a module a function of torch's
    from_line: str | None = None  # the user's own, where `line` is a library's
    compilations: int | None = None
    last_step: int | None = None  # in which it was compiled
    why: str | None = None  # of the last, as dynamo gives it
    reasons: int | None = None  # how many different ones
    seconds: float | None = None  # of all
