"""The deep run of a script, after the run that is timed: it adds rows, and takes none where it fails."""

import math
import os

import pytest

from tests.observe.measuring import SCRIPTS, measure, run_command, sentences
from tests.torchrun import torchrun
from trainstep.commands import deep
from trainstep.commands.deep import DeepRun
from trainstep.observe.command import command_of
from trainstep.observe.instruments import steps_needed
from trainstep.observe.supervise import Rank
from trainstep.report.subjects.run import how_it_went
from trainstep.rows import DtypeRow, KernelRow, PeakRow, ProfileRow, ScriptRow
from trainstep.rows.records import of_kind, read_records

ONCE = """
import os, sys
os.makedirs("out")  # a run that found what another one wrote would fail
open("data.txt", "a").write("more")
print("trained in", os.getcwd(), sys.stdin.read())
"""


def test_a_deep_run_adds_rows_and_leaves_the_folder_and_the_timed_steps_alone(tmp_path):
    (tmp_path / "script.py").write_text(ONCE + (SCRIPTS / "climbing.py").read_text())
    (tmp_path / "data.txt").write_text("data")
    words = ["--deep", "--steps", "14", "--profile-after", "6", "script.py"]
    ended, rows = run_command(tmp_path / "results", *words, cwd=tmp_path, input="some text")
    assert ended.stdout == f"trained in {tmp_path} some text\n"
    assert "--deep starts the script once more, for 10 steps, in a copy of this folder" in sentences(ended)
    assert (tmp_path / "data.txt").read_text() == "datamore"
    (row,) = of_kind(rows, ScriptRow)
    assert (row.steps_seen, row.instrumented, row.exit_code, row.notes) == (14, 0, 0, None)
    assert (0.05 < row.peak_gib < 4, [each.profiled_n for each in of_kind(rows, ProfileRow)]) == (True, [2])
    assert all(of_kind(rows, kind) for kind in (KernelRow, PeakRow, DtypeRow))
    assert of_kind(rows, ProfileRow)[0].step_ms == pytest.approx(row.step_ms), "that of the first run"
    folder = tmp_path / "results" / "deep"
    assert (folder / "output.txt").read_text() == f"trained in {folder / 'copy' / tmp_path.name} \n"
    left = {"ended-0.json", "output.txt", "rank-0", "rank-0.jsonl", "trace.json.gz"}
    assert {each.name for each in folder.iterdir()} <= left
    assert of_kind(rows, ProfileRow)[0].trace == "deep/trace.json.gz"


@pytest.fixture(scope="module")
def timed(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("sys.argv", ["plain.py"])
        return measure("plain.py", tmp_path_factory.mktemp("timed"))


@pytest.fixture
def deep_run(timed, tmp_path, monkeypatch):
    """What is left of a script's rows after a deep run whose process does what is given."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "plain.py").write_text("")
    log, rows = timed
    monkeypatch.setattr(deep, "console_for_output", lambda **_: os)
    monkeypatch.setattr(os, "print", lambda text: None, raising=False)

    def left(process, code=0, took_s=0.0, **plan):
        monkeypatch.setattr("trainstep.ladder.ranks.run_script", process)
        plan = {"is_deep": True, "profiled_steps": 2, "profile_after": 8, "has_memory": True} | plan
        run = DeepRun(command_of(["plain.py"]), Rank.of({}), tmp_path / "out", plan, is_in_place=False)
        run._start -= took_s
        found = run.rows([log], rows, code)
        run.close()
        assert not (tmp_path / "out/deep/copy").exists()
        assert found[1:] == rows[1:]
        assert "script.no-deep" not in {each.id for each in how_it_went(found)}
        return (found[0].notes or ())[: -len(rows[0].notes or ()) or None]  # those of the deep run

    return left


def raising(error):
    def process(*_, **__):
        raise error

    return process


@pytest.mark.parametrize(
    ("process", "code", "notes"),
    [
        (lambda *_, **__: 0, 0, ()),
        (lambda *_, **__: 3, 0, "deep run: it ended with exit code 3; its output is in "),
        (lambda *_, **__: -9, 0, "deep run: it ended with signal 9; its output is in "),
        (raising(TimeoutError("it was ended after 120 s")), 0, "deep run: it was ended after 120 s; its output is in "),
        (raising(OSError(28, "No space left on device")), 0, "deep run: [Errno 28] No space left on device"),
        (raising(KeyboardInterrupt), 0, "the deep run was interrupted"),
        (raising(AssertionError("it was started")), 7, "deep run: left out, as the script failed"),
    ],
)
def test_a_deep_run_that_fails_is_one_line_and_the_rest_stands(process, code, notes, deep_run):
    found = deep_run(process, code)
    assert [each[: len(notes)] for each in found] == ([notes] if notes else [])


def test_a_folder_that_cannot_be_copied_is_one_line(deep_run, monkeypatch):
    monkeypatch.setattr("trainstep.observe.copying.MOST_FILES", 0)
    (note,) = deep_run(raising(AssertionError("it was started")))
    assert "files to copy for each run" in note


@pytest.mark.parametrize(("took_s", "limit_s"), [(0.0, 120.0), (11.0, 120.0), (30.0, 300.0), (500.0, 5000.0)])
def test_it_may_take_ten_times_the_first_run_to_the_same_step(took_s, limit_s, deep_run):
    limits = []
    deep_run(lambda *_, limit_s=math.inf, **__: limits.append(limit_s) or 0, took_s=took_s)
    assert limits == [pytest.approx(limit_s, rel=0.05)]


@pytest.mark.parametrize(("plan", "steps"), [((2, 8), 12), ((2, 40), 44), ((0, 8), 6), ((1, 1), 9)])
def test_a_deep_run_takes_a_few_steps(plan, steps):
    assert steps_needed(*plan) == steps


@pytest.mark.distributed
def test_all_ranks_take_part_in_a_deep_run(tmp_path):
    words = ["--deep", "--steps", 7, "--out", "out", "--profiled-steps", 0, SCRIPTS / "ranks.py"]
    ended = torchrun("trainstep", "run", *words, cwd=tmp_path, LATE="0")
    assert ended.returncode == 0, ended.stderr
    rows = read_records(tmp_path / "out/results.jsonl")
    ranks = of_kind(rows, ScriptRow)
    assert [(row.rank, row.steps_seen, row.instrumented) for row in ranks] == [(0, 7, 0), (1, 7, 0)]
    assert all(row.deep_communication_ms > 0 for row in ranks)
    assert len(of_kind(rows, PeakRow)) == 1
    assert ended.stderr.count("--deep starts the script once more, for 6 steps") == 1
    assert not list((tmp_path / "out/deep").glob("orders-*"))
