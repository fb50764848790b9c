"""Cases that are a line of Python in place of a command, as jobs of a cluster run them too. Needs no torch."""

import json
import os
import signal
import sys
import time
from pathlib import Path

from trainstep.bench.sweep import jobs, run
from trainstep.bench.sweep.cases import Case

ROW = json.dumps({"kind": "step", "case": {"workload": "toy"}, "values": {"step_ms": 1.0}})
PROGRAM = f"""
import os, signal, sys, time
from pathlib import Path
out, row = Path(sys.argv[1]), {ROW!r} + chr(10)
def done():
    (out / "results.jsonl").write_text(row)
exec(sys.argv[2])
"""
LINGERS = "# lingers"
"""At the end of a script whose job goes on when its case has its row."""
ALONE = jobs.run_alone


def cases(folder, *scripts):
    """A case for each script, which knows its folder as `out`, and calls `done()` for a row."""
    return [
        Case("bench step", {"workload": script}, folder / "cases" / str(index)) for index, script in enumerate(scripts)
    ]


def run_scripted(case, timeout_s):
    """`run_alone` in a job."""
    run.command_of = lambda case: [sys.executable, "-c", PROGRAM, str(case.folder), str(case.settings["workload"])]
    ALONE(case, timeout_s)
    if str(case.settings["workload"]).endswith(LINGERS):
        time.sleep(3)


if __name__ == "__main__":  # a sweep that a test ends: python -m … FOLDER "at once"|"later" SCRIPT…
    folder, when, *scripts = sys.argv[1:]
    jobs.run_alone, submit = run_scripted, jobs._submit

    def submit_and_die(*words, **more):
        submit(*words, **more)
        os.kill(os.getpid(), signal.SIGKILL)

    if when == "at once":
        jobs._submit = submit_and_die
    list(jobs.slurm_jobs(cases(Path(folder), *scripts), Path(folder) / "jobs", jobs.Resources(cpus=2)))
