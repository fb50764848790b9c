"""What becomes of a run when its output, its disk or its patience ends: results are on disk, and one line says why."""

import ast
import os
import re
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import trainstep
from trainstep.base.errors import UsageError, say
from trainstep.commands.output import STOPPED, console_for_output, run_and_report, show_table
from trainstep.report.tables import text_table
from trainstep.rows import StepRow
from trainstep.rows.records import Times, read_records

SCRIPT = """
import sys, time
from pathlib import Path
from trainstep.commands import cli
from trainstep.commands.output import console_for_output, run_and_report, show_table
from trainstep.commands.plan import Plan
from trainstep.rows import StepRow
from trainstep.rows.records import Times
from trainstep.report.page import Report

def records():
    yield StepRow(workload="toy", times={"step": Times(1.5)}, environment={"device": "a device"})
    try:
        print("measuring", file=sys.stderr, flush=True)
        MEASURE
    finally:
        print("cleaning", file=sys.stderr, flush=True)
        CLEAN

def write(self, folder):
    print("reporting", file=sys.stderr, flush=True)
    time.sleep(REPORT)
    return right(self, folder)

right, Report.write = Report.write, write
Plan.run = lambda self: run_and_report(records(), self.out, "test")
cli.main(["plan", "--out", sys.argv[1]])
"""

CODES = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGHUP: 143}


def start(out, *, measure="pass", clean="pass", report="0", **options):
    program = SCRIPT.replace("MEASURE", measure).replace("CLEAN", clean).replace("REPORT", report)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, "-c", program, str(out)], **(pipes | options))


def signal_at(running, *moments):
    """Send each signal when the word before it was said; what was said, and the exit code."""
    said = ""
    for word, number in moments:
        while word not in said:
            line = running.stderr.readline()
            assert line, said
            said += line
        time.sleep(0.2)
        running.send_signal(number)
    out, err = running.communicate(timeout=60)
    return out, said + err, running.returncode


def test_a_terminal_that_has_gone_changes_no_exit_code():
    begin = "import atexit, signal\nfrom trainstep.commands import cli\n"
    code = begin + "with cli._leaving_at_once(is_program=True): signal.raise_signal(1)"
    ends = begin + "atexit.register(signal.raise_signal, 1); cli.main()"
    assert subprocess.call([sys.executable, "-c", ends, "--version"]) == 0
    output, entry = os.pipe()
    os.close(output)
    with open(entry, "wb") as gone:
        assert subprocess.run([sys.executable, "-c", code], stderr=gone, check=False).returncode == 143


@pytest.mark.parametrize("ended", ["raise", "raise RuntimeError('connection closed by peer')"])
@pytest.mark.parametrize("number", CODES, ids=lambda number: number.name)
def test_a_signal_keeps_the_rows_and_writes_the_report(number, ended, tmp_path):
    """An error that the signal causes is no traceback."""
    slow = f"time.sleep(60)\n    except KeyboardInterrupt:\n        {ended}"
    out, err, code = signal_at(start(tmp_path, measure=slow), ("measuring", number))
    assert (code, err.split()) == (CODES[number], ["measuring", "cleaning", "reporting"])
    assert f"{STOPPED}. 1 rows measured so far are kept" in out
    assert len(read_records(tmp_path / "results.jsonl")) == 1
    assert "toy" in (tmp_path / "report.html").read_text()


def test_a_mistake_in_the_middle_keeps_the_rows_and_writes_the_report(tmp_path):
    wrong = "from trainstep.base.errors import UsageError; raise UsageError('the batches are used up')"
    out, err, code = signal_at(start(tmp_path, measure=wrong))
    assert code == 2
    assert err.splitlines()[:3] == ["measuring", "cleaning", "reporting"]
    assert "the batches are used up" in err
    assert "Traceback" not in err
    assert ("1 rows measured so far are kept" in out, STOPPED in out) == (True, False), "nobody stopped it"
    assert "Written to" in out
    assert len(read_records(tmp_path / "results.jsonl")) == 1
    assert "toy" in (tmp_path / "report.html").read_text()


@pytest.mark.parametrize(
    ("statuses", "code"),
    [
        (["ok", "failed"], 1),
        (["ok", "wrong"], 1),
        (["ok", "out of memory", "unsupported"], 0),
        (["out of memory", "unsupported"], 1),
    ],
)
def test_a_case_that_failed_is_exit_code_1(statuses, code, tmp_path):
    """What this machine cannot do is a result, unless nothing else is."""
    rows = [StepRow(workload=str(number), status=each) for number, each in enumerate(statuses)]
    assert run_and_report(rows, tmp_path, "test") == code


@pytest.mark.parametrize("error", [UsageError, MemoryError, torch.OutOfMemoryError])
def test_a_mistake_before_the_first_row_writes_nothing(error, tmp_path):
    def records():
        raise error("no such model")
        yield

    with pytest.raises(UsageError, match="no such model"):
        run_and_report(records(), tmp_path / "out", "test")
    assert not list((tmp_path / "out").rglob("*.*"))


def test_what_is_measured_now_is_said_with_the_time_so_far(tmp_path, capsys):
    seen = []

    def records(on_part):
        on_part("phases")
        seen.append(capsys.readouterr().err)
        yield StepRow(workload="toy", times={"step": Times(1.5)}, environment={"device": "a device"})
        on_part("ladder: [compiled] blocks")
        seen.append(capsys.readouterr().err)

    assert run_and_report(records, tmp_path, "test") == 0
    first, second = (text.strip().splitlines()[-1] for text in seen)
    assert re.fullmatch(r"\d+ s  phases", first.strip()), "before its row is there"
    assert re.fullmatch(r"\d+ s  ladder: \[compiled\] blocks", second.strip())


def test_a_long_table_is_not_drawn_and_keeps_every_row(capsys, monkeypatch):
    from trainstep.report import terminal

    drawn = []
    right = terminal.to_terminal
    monkeypatch.setattr(
        terminal, "to_terminal", lambda table, width: drawn.append(len(table.rows)) or right(table, width)
    )
    for rows in (1000, 1001):
        cells = [(f"=case {number}\x1b[2J, with a comma", "1.5") for number in range(rows)]
        show_table(console_for_output(), text_table("t", "A caption", ["case", "ms"], cells))
    assert drawn == [1000]
    said = capsys.readouterr().out
    assert "\x1b" not in said
    _, _, csv = said.partition("A caption (1,001 rows, as comma-separated values)\n")
    header, *lines = csv.splitlines()
    assert header == "case,ms"
    assert len(lines) == 1001
    assert lines[-1] == '"\'=case 1000\\x1b[2J, with a comma",1.5'


def test_a_second_ctrl_c_ends_the_cleaning_up(tmp_path):
    running = start(tmp_path, measure="time.sleep(60)", clean="time.sleep(60)")
    _, err, code = signal_at(running, ("measuring", signal.SIGINT), ("cleaning", signal.SIGINT))
    assert (code, err.split()) == (130, ["measuring", "cleaning", "reporting"])
    assert (tmp_path / "report.html").exists()


def test_ctrl_c_while_the_report_is_written_keeps_the_rows(tmp_path):
    running = start(tmp_path, measure="time.sleep(60)", report="60")
    _, err, code = signal_at(running, ("measuring", signal.SIGINT), ("reporting", signal.SIGINT))
    assert (code, err.splitlines()) == (130, ["measuring", "cleaning", "reporting", "trainstep: interrupted"])
    assert len(read_records(tmp_path / "results.jsonl")) == 1


@pytest.mark.parametrize("number", CODES, ids=lambda number: number.name)
def test_a_signal_while_torch_is_imported(number, tmp_path):
    words = ["bench", "step", "--device", "cpu", "--out", str(tmp_path)]
    running = subprocess.Popen([sys.executable, "-m", "trainstep", *words], stderr=subprocess.PIPE, text=True)
    while "libtorch" not in Path(f"/proc/{running.pid}/maps").read_text():
        assert running.poll() is None
        time.sleep(0.005)
    running.send_signal(number)
    _, err = running.communicate(timeout=60)
    assert (running.returncode, err) == (CODES[number], "trainstep: interrupted\n")


def test_ctrl_c_while_the_command_itself_is_imported():
    code = (
        "import runpy, sys\n"
        "class Interrupting:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name == 'trainstep.commands.bench': raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Interrupting())\n"
        "runpy.run_module('trainstep', run_name='__main__')\n"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (found.returncode, found.stderr) == (130, "trainstep: interrupted\n")


def test_a_full_output_is_said_when_the_files_are_written(tmp_path):
    with Path("/dev/full").open("w") as full:
        running = start(tmp_path, stdout=full)
        _, err = running.communicate(timeout=60)
    assert running.returncode == 2
    assert err.splitlines()[-1] == (
        "trainstep: cannot write to standard output: No space left on device; what was measured is in files"
    )
    assert "Traceback" not in err
    assert (tmp_path / "report.html").exists()


def test_a_reader_that_has_gone_ends_no_run(tmp_path):
    there, here = os.pipe()
    os.close(there)
    running = start(tmp_path, stdout=here)
    _, err = running.communicate(timeout=60)
    os.close(here)
    assert (running.returncode, err.split()) == (0, ["measuring", "cleaning", "reporting"])
    assert (tmp_path / "report.html").exists()


@pytest.mark.parametrize("closed", ["1", "1 2", "0 1 2"])
def test_outputs_that_are_closed_at_the_start(closed, tmp_path):
    ends = [int(each) for each in closed.split()]
    running = start(tmp_path, stdout=None, stderr=None, preexec_fn=lambda: [os.close(each) for each in ends])
    assert running.wait(60) == 0
    assert len(read_records(tmp_path / "results.jsonl")) == 1, "nothing was printed into a file"
    assert (tmp_path / "report.html").exists()


@pytest.mark.parametrize("environment", [{"PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}, {"LC_ALL": "C"}])
def test_a_terminal_that_knows_ascii_only(environment, tmp_path):
    running = start(tmp_path, env={**os.environ, **environment})
    out, err = running.communicate(timeout=60)
    assert (running.returncode, err.split()) == (0, ["measuring", "cleaning", "reporting"])
    assert " test - a device\n" in out


def test_a_full_disk_is_one_line_and_what_fits_is_kept(tmp_path):
    most = 20_000  # bytes of a file: the row fits, the report does not
    running = start(
        tmp_path, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (most, resource.RLIM_INFINITY))
    )
    out, err = running.communicate(timeout=60)
    assert running.returncode == 2
    assert err.splitlines()[-1].startswith("trainstep: cannot write ")
    assert "File too large; choose another folder with --out" in err
    assert "Traceback" not in err
    assert "1   cases of a step measured" in out, "the answer is printed even so"
    assert len(read_records(tmp_path / "results.jsonl")) == 1
    assert not (tmp_path / "report.html").exists()


def test_everything_is_printed_by_functions_that_clean_it(capsys):
    """`sys.stdout.write` has a launch file alone, which is for a file."""
    found = [
        f"{path.name}:{node.lineno}"
        for path in Path(trainstep.__file__).parent.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
    ]
    assert [each.partition(":")[0] for each in found] == ["errors.py"], found
    say("\x1b[31mred\x1b]0;title\x07")
    console_for_output(to_stderr=True).print("a\x9bb")
    assert capsys.readouterr() == ("\\x1b[31mred\\x1b]0;title\\x07\n", "a\\x9bb\n")
