"""The kernels of the steps that the profiler recorded, as rows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from trainstep.kinds import ScriptRow
from trainstep.records import Row, make_row, of_kind
from trainstep.run.log import RankLog


def kernel_records(log: RankLog, rows: Sequence[Row], folder: Path) -> list[Row]:
    """Rows of the trace in a folder, held against the steps that were timed without the profiler; none without a trace.

    Args:
        log: of the first rank, which recorded it.
        rows: those of `script_records`.
        folder: where the trace is.
    """
    profiled = [step for step in log.steps if "profiled" in step.get("tags", ())]
    timed = next((row for row in of_kind(rows, ScriptRow) if row.status == "ok"), None)
    if not profiled or timed is None:
        return []
    from trainstep.bench.profile import timing_values  # with torch, which the script's rows do without
    from trainstep.bench.profile_rows import profile_rows
    from trainstep.config import PHASES
    from trainstep.kinds import ProfileRow
    from trainstep.measure.profile.chrome import read_chrome_trace
    from trainstep.measure.profile.kernels import profiles_of
    from trainstep.run.instruments import trace_path

    file = trace_path(folder, 0)
    if not file.exists():
        return []
    found: list[Row] = []
    profiles = profiles_of(read_chrome_trace(file))
    phases = [step.get("device", step["host"]) for step in profiled]
    with_it = {name: [each.get(name, 0.0) for each in phases] for name in PHASES}
    with_it["step"] = [sum(each.values()) for each in phases]
    without = {name: list(timed.samples.get(name, ())) or [0.0] for name in (*PHASES, "step")}
    for device, profile in profiles.items():
        case = {"workload": timed.workload, "device": device if len(profiles) > 1 else None}
        last = {name: values[-profile.steps - 1 : -1] or values for name, values in with_it.items()}
        values = timing_values(without, last, profile) | {"trace": file.name}
        samples = {"step": without["step"], "profiled_step": last["step"]}
        found.append(make_row(ProfileRow, case, values, samples=samples, environment=timed.environment))
        found += profile_rows(profile, case, None, timed.environment)
    return found
