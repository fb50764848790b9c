"""Sweeps on a real Slurm: queued, cancelled, out of time or memory, requeued, refused, and killed themselves."""

import functools
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tests.bench.sweep import scripted
from tests.slurm import BY_KERNEL, MEMORY, Cluster
from trainstep.bench.sweep import jobs
from trainstep.bench.sweep import slurm as slurm_files
from trainstep.bench.sweep.jobs import Resources, slurm_jobs
from trainstep.commands.cli import main
from trainstep.rows.records import read_records

pytestmark = pytest.mark.slurm
REPOSITORY = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def _repository(monkeypatch):
    monkeypatch.chdir(REPOSITORY)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def run(*words):
    with pytest.raises(SystemExit) as stop:
        main(list(words))
    return stop.value.code


def test_more_cases_than_fit_onto_the_node_or_into_an_array(slurm, tmp_path, monkeypatch, capsys):
    """Two at once fit, and an array takes four."""
    monkeypatch.setattr(jobs, "run_alone", scripted.run_scripted)
    file, out = tmp_path / "grid.toml", tmp_path / "out"
    file.write_text(f'command = "bench step"\n[axes]\nworkload = {[f"done() # {number}" for number in range(6)]}\n')
    words = ["sweep", str(file), "--executor", "slurm", "--gpus", "0", "--cpus", "2", "--memory", "0.25"]
    assert run(*words, "--out", str(out)) == 0
    rows = read_records(out / "results.jsonl")
    assert [row.status for row in rows] == ["ok"] * 6
    assert {row.values["number"] for row in rows} == set(range(1, 7))
    (name,) = {name for _, name, _, _ in slurm.jobs() if name.startswith("trainstep-sweep-")} - SEEN
    told = slurm.run("squeue", "--noheader", "--states=all", f"--name={name}", "--format=%i|%S|%e|%m").splitlines()
    assert len(told) == 6
    assert len({line.partition("_")[0] for line in told}) == 2, "arrays"
    assert {line.split("|")[3] for line in told} == {"256M"}
    spans = [line.split("|")[1:3] for line in told]
    assert max(sum(start <= other < end for start, end in spans) for other, _ in spans) <= 2, told
    assert run(*words, "--out", str(out)) == 0
    assert "6 finished before, nothing to run" in capsys.readouterr().out


SEEN = set()
"""Names of sweeps of earlier tests."""


@pytest.fixture(autouse=True)
def _seen(slurm):
    yield
    SEEN.update(name for _, name, _, _ in slurm.jobs())


class Sweeping:
    """Scripted cases as jobs, while a test looks on."""

    def __init__(self, slurm, tmp_path, monkeypatch, *scripts, asked=None, **more):
        monkeypatch.setattr(jobs, "run_alone", scripted.run_scripted)
        self.slurm, self.folder = slurm, tmp_path / "jobs"
        self.cases = scripted.cases(tmp_path, *scripts)
        self.error, self.ended, self.told = None, [], []
        self._run = threading.Thread(target=self._sweep, args=(asked or Resources(cpus=1), more), daemon=True)
        self._run.start()

    def _sweep(self, asked, more):
        try:
            for case in slurm_jobs(self.cases, self.folder, asked, tell=self.told.append, **more):
                self.ended.append(case)
        except BaseException as error:
            self.error = error

    @functools.cached_property
    def name(self):
        """What all of its jobs are called."""
        path = self.folder / slurm_files.SUBMITTED
        return self.slurm.until(lambda: path.exists() and path.read_text().strip())

    def jobs(self):
        """The jobs, in the cases' order, once all are submitted."""

        def found():
            told = self.slurm.jobs(f"--name={self.name}")
            return told if len(told) == len(self.cases) else None

        ids = [job for job, *_ in self.slurm.until(found)]
        return sorted(ids, key=lambda job: [int(part) for part in job.split("_")])

    def started(self, *indexes):
        """Wait until these cases run; their folders have a file `started`."""
        self.slurm.until(lambda: all((self.cases[index].folder / "started").exists() for index in indexes))

    def rows(self, seconds=90):
        self._run.join(seconds)
        assert not self._run.is_alive(), f"the sweep waits for ever\n{self.slurm.jobs()}"
        if self.error:
            raise self.error
        assert len(self.ended) == len(self.cases)
        return [row for case in self.cases for row in case.finished()]


STAYS = "(out / 'started').touch(); time.sleep(100)"
ONCE = f"(out / 'again').exists() and (done(), sys.exit()); (out / 'again').touch(); {STAYS}"


@pytest.mark.thorough
def test_however_slurm_ends_a_job_its_row_says_so(slurm, tmp_path, monkeypatch):
    starved = "x = bytearray(900 * 2**20); time.sleep(100)"
    dies = (
        "os.kill(int(Path(f'/proc/{os.getppid()}/stat').read_text().split()[3]), signal.SIGKILL)"  # the job's process
    )
    one = Sweeping(slurm, tmp_path, monkeypatch, STAYS, STAYS, ONCE, starved, "done()", dies)
    one.started(0, 1, 2)
    ids = one.jobs()
    soon = time.strftime("%FT%T", time.localtime(time.time() + 1))
    slurm.run("scontrol", "update", f"jobid={ids[0]}", f"EndTime={soon}")
    slurm.run("scancel", ids[1])
    slurm.requeue(ids[2])
    late, cancelled, requeued, starved, well, dead = one.rows()
    assert (late.status, late.reason) == (
        "failed", f"job {ids[0]} ended as TIMEOUT: not done in the 60 minutes that --time gives",
    )  # fmt: skip
    assert (cancelled.status, cancelled.reason) == ("failed", f"job {ids[1]} ended as CANCELLED")
    assert (requeued.status, well.status) == ("ok", "ok"), requeued
    assert starved.status == "out of memory", starved
    assert "exceeded memory limit" in starved.reason
    assert dead.status == "failed", dead
    assert dead.reason.startswith(f"job {ids[5]} ended as FAILED"), dead


@pytest.mark.parametrize("how", ["Ctrl-C", "killed", "killed before it knew of its jobs", "killed with its guard"])
def test_jobs_do_not_outlive_the_sweep(how, slurm, tmp_path):
    when = "at once" if "before" in how else "later"
    words = [sys.executable, "-m", "tests.bench.sweep.scripted", str(tmp_path), when, STAYS, STAYS, STAYS]
    sweep = subprocess.Popen(words, stderr=subprocess.DEVNULL)
    submitted = tmp_path / "jobs" / slurm_files.SUBMITTED
    if when == "later":
        slurm.until(lambda: any(tmp_path.glob("cases/*/started")))
    if "guard" in how:
        children = Path(f"/proc/{sweep.pid}/task/{sweep.pid}/children").read_text().split()
        (guard,) = [int(pid) for pid in children if b"slurm.py" in Path(f"/proc/{pid}/cmdline").read_bytes()]
        os.kill(guard, signal.SIGKILL)
    if when == "later":
        sweep.send_signal(signal.SIGINT if how == "Ctrl-C" else signal.SIGKILL)
    sweep.wait(60)
    if "guard" in how:  # then nothing can cancel them but the next sweep into the folder
        name = submitted.read_text().strip()
        assert "RUNNING" in states(slurm, name)
        list(slurm_jobs([], tmp_path / "jobs", Resources()))
        assert set(states(slurm, name)) == {"CANCELLED"}
    elif how != "Ctrl-C":
        slurm.until(lambda: not submitted.exists())
    assert not slurm.run("squeue", "--noheader")
    assert not submitted.exists()
    assert not list(tmp_path.glob("cases/*/rows.jsonl"))


def states(slurm, name):
    return [state for _, _, state, _ in slurm.jobs(f"--name={name}")]


REFUSED = [
    (["--partition", "nope"], "Invalid partition name specified"),
    (["--gpus", "1"], "Invalid generic resource (gres) specification"),
    (["--memory", "99"], "Requested node configuration is not available"),
]


@pytest.mark.parametrize(("words", "why"), REFUSED)
def test_what_slurm_refuses_is_one_line(words, why, slurm, tmp_path, capsys):
    file, out = tmp_path / "grid.toml", tmp_path / "out"
    file.write_text('command = "plan"\n[axes]\nbatch = [1, 2, 3]\n')
    given = ["--executor", "slurm", "--gpus", "0", "--cpus", "1", *words]
    assert run("sweep", str(file), *given, "--out", str(out)) == 2
    error = capsys.readouterr().err
    assert why in error
    assert error.count("\n") == 1
    assert not slurm.run("squeue", "--noheader")


def test_each_reason_to_wait_is_said_once(slurm, tmp_path, monkeypatch):
    node = f"nodename={slurm.host}"
    slurm.run("scontrol", "update", node, "state=drain", "reason=tests")
    one = Sweeping(slurm, tmp_path, monkeypatch, "done()", "done()")
    try:
        slurm.until(lambda: one.told)
        time.sleep(2 * jobs.ASK_S)
    finally:
        slurm.run("scontrol", "update", node, "state=resume")
    assert [row.status for row in one.rows()] == ["ok", "ok"]
    assert len(set(one.told)) == len(one.told)
    for line in one.told:
        assert re.match(r"Slurm has jobs wait \(\d now\) for: .*(ReqNodeNotAvail|DOWN, DRAINED)", line), line


def test_slurm_may_be_away_for_a_while_and_jobs_holds_over_all_arrays(slurm, tmp_path, monkeypatch):
    # The first waits for a second one, however late that starts on a busy machine.
    noted = "begun = time.time(); (out / 'started').touch()\n"
    noted += "while len(list(out.parent.glob('*/started'))) < 2 and time.time() < begun + 60: time.sleep(0.1)\n"
    noted += "time.sleep(1); (out / 'span').write_text(f'{begun} {time.time()}'); done()"
    one = Sweeping(slurm, tmp_path, monkeypatch, *[noted] * 5, jobs=2)
    one.started(0)
    slurm.stop("slurmctld")
    time.sleep(2 * jobs.ASK_S)
    slurm.start("slurmctld")
    # A job that ended meanwhile is running to Slurm until its node says so again, which took more than 90 s once.
    rows = one.rows(seconds=240)
    assert [row.status for row in rows] == ["ok"] * 5, ([row.reason for row in rows], slurm.logs())
    spans = [tuple(map(float, path.read_text().split())) for path in tmp_path.rglob("span")]
    assert len(spans) == 5
    assert max(sum(start <= other < end for start, end in spans) for other, _ in spans) == 2, spans


def test_where_one_may_submit_no_more_the_rest_follows(slurm, tmp_path, monkeypatch):
    """As an account's limit does, which needs Slurm's database, and so is played here: two jobs at most.

    Jobs count until they have ended, which is after their cases have rows: nothing of ours runs then, and yet Slurm
    refuses.
    """
    submit, sizes = jobs._submit, []

    def limited(executor, batch, *words, is_needed):
        if len(batch) + len(slurm.run("squeue", "--noheader", "--array").splitlines()) > 2:
            assert not is_needed
            return None
        sizes.append(len(batch))
        return submit(executor, batch, *words, is_needed=is_needed)

    monkeypatch.setattr(jobs, "_submit", limited)
    scripts = [f"done() {scripted.LINGERS}"] * 4
    assert [row.status for row in Sweeping(slurm, tmp_path, monkeypatch, *scripts).rows()] == ["ok"] * 4
    assert max(sizes) == 2
    assert sum(sizes) == 4


def test_a_job_that_slurm_has_forgotten_ends_the_wait(slurm, tmp_path, monkeypatch):
    one = Sweeping(slurm, tmp_path, monkeypatch, STAYS)
    one.started(0)
    monkeypatch.setattr(slurm_files, "states", lambda name: {})
    monkeypatch.setattr(jobs, "SETTLE_S", 0.5)
    (row,) = one.rows()
    assert row.reason.endswith("ended as GONE: Slurm has forgotten it, and keeps no accounting"), row


@pytest.mark.skipif(not os.access(MEMORY, os.W_OK), reason=f"needs cgroups of version 1, writable: no {MEMORY}")
def test_a_case_that_the_kernel_kills_for_its_memory(tmp_path, monkeypatch):
    """The job lives on, and writes of its case that it was killed; Slurm knows what for."""
    with Cluster(tmp_path / "slurm", BY_KERNEL) as slurm:
        for name, value in slurm.environment.items():
            monkeypatch.setenv(name, value)
        (row,) = Sweeping(slurm, tmp_path, monkeypatch, "x = bytearray(900 * 2**20); done()").rows()
    assert row.status == "out of memory", row
    why, _, words = row.reason.partition(": ")
    assert why == "killed, as the job had no more memory", row
    assert not words or jobs.OUT_OF_MEMORY.search(words), row
