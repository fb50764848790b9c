"""Sweeps: cases that end in every way, resumed and interrupted."""

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections import Counter
from pathlib import Path

import pytest

from trainstep.base.errors import UsageError
from trainstep.base.guards import held_folder
from trainstep.bench.sweep import run as processes
from trainstep.bench.sweep.cases import Case, flags, load_grid
from trainstep.bench.sweep.run import run_here
from trainstep.commands.cli import main, parse
from trainstep.commands.sweep import Sweep
from trainstep.rows.records import read_records

REPOSITORY = Path(__file__).parents[3]
HERE = "tests.bench.sweep.workloads"

EIGHT = f"""
command = "bench step"
[fixed]
workload = "{HERE}:mixed"
steps = 7
warmup = 0
device = "cpu"
[axes]
mode = ["forward", "step"]
seed = [1, 2, 3, 4]
"""


def run(*words):
    with pytest.raises(SystemExit) as stop:
        main(list(words))
    return stop.value.code


@pytest.fixture
def _repository(monkeypatch):
    monkeypatch.chdir(REPOSITORY)


@pytest.mark.thorough
@pytest.mark.usefixtures("_repository")
def test_eight_cases_of_which_one_crashes_and_one_runs_out_of_memory(tmp_path, monkeypatch, capsys):
    file, out = tmp_path / "eight.toml", tmp_path / "out"
    file.write_text(EIGHT)
    assert run("sweep", str(file), "--out", str(out)) == 1
    rows = read_records(out / "results.jsonl")
    assert Counter(row.status for row in rows) == {"ok": 6, "failed": 1, "out of memory": 1}
    assert {(row.case["mode"], row.case["seed"]) for row in rows} == {
        (mode, seed) for mode in ("forward", "step") for seed in range(1, 5)
    }
    (crashed,) = (row for row in rows if row.status == "failed")
    assert (crashed.case["mode"], crashed.case["seed"]) == ("step", 2)
    assert "killed by SIGABRT" in crashed.reason
    log = out / "cases" / crashed.values["folder"] / "stderr.txt"
    assert "in crashes" in log.read_text(), "the crash says where"
    (starved,) = (row for row in rows if row.status == "out of memory")
    assert (starved.case["mode"], starved.case["seed"]) == ("forward", 4)
    assert all(len(row.samples["step"]) == row.values["n"] == 7 for row in rows if row.status == "ok")
    said = capsys.readouterr().out
    assert "8 cases of bench step: 0 finished before, 8 to run" in said
    tables = {path.name for path in (out / "tables").iterdir()}
    assert {"sweep.csv", "sweep-by-mode.md", "sweep-by-seed.tex"} <= tables
    assert "Step by seed" in (out / "report.html").read_text()

    monkeypatch.setattr(processes, "command_of", lambda case: pytest.fail("a second run runs nothing"))
    assert run("sweep", str(file), "--out", str(out)) == 1
    again = read_records(out / "results.jsonl")
    assert "8 finished before, nothing to run" in capsys.readouterr().out
    assert sorted(map(repr, again)) == sorted(map(repr, rows))
    assert [row.values["number"] for row in again] == list(range(1, 9))

    assert run("sweep", str(file), "--retry", "failed", "--dry-run", "--out", str(out)) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("--")[-2:] for line in lines if line.startswith("to run")] == [
        ["mode forward ", "seed 4"],
        ["mode step ", "seed 2"],
    ]
    assert lines[-1] == "8 cases of bench step: 6 finished before, 2 to run"


def wait_for(condition, what, seconds=180):
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, f"{what} did not come"
        time.sleep(0.05)
    return found


def is_alive(pid):
    """True if it is there and no zombie, which whoever inherited it has yet to notice."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def hanging_sweep(tmp_path, *before):
    """Start a sweep of workloads, of which the last hangs; returns its file, its folder, it, and the pid that hangs."""
    file, out = tmp_path / "hangs.toml", tmp_path / "out"
    workloads = [f"{HERE}:{name}" for name in (*before, "hangs")]
    file.write_text(f'command = "bench step"\n[axes]\nworkload = {json.dumps(workloads)}\n')
    command = [sys.executable, "-m", "trainstep", "sweep", str(file), "--out", str(out)]
    running = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=REPOSITORY)

    def hanging():
        said = [path.read_text() for path in out.glob("cases/*hangs*/stdout.txt")]
        return next((each.split("hanging as ")[1] for each in said if "hanging as" in each and "." in each), None)

    return file, out, running, int(wait_for(hanging, "the case that hangs").split(".")[0])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP], ids=lambda number: number.name)
def test_an_interrupted_sweep_keeps_its_rows_and_leaves_no_process(number, tmp_path):
    file, out, running, pid = hanging_sweep(tmp_path, "absent")
    running.send_signal(number)
    output, _ = running.communicate(timeout=180)
    assert running.returncode == (130 if number == signal.SIGINT else 143)
    assert "1 rows measured so far are kept" in output
    assert not is_alive(pid)
    (row,) = read_records(out / "results.jsonl")
    assert row.status == "failed"
    assert "absent" in row.reason
    assert [case.is_finished() for case in load_grid(file, parse, out).cases] == [True, False]


STARVED = json.dumps({"kind": "step", "case": {"workload": "toy"}, "status": "out of memory", "reason": "needed 9"})
STEP = json.dumps({"kind": "step", "case": {"workload": "toy"}, "values": {"step_ms": 1.0}})


def scripted(monkeypatch, script):
    """Run `script` in case of trainstep; it knows its folder as `out`."""
    program = "import os, signal, sys, time\nfrom pathlib import Path\nout = Path(sys.argv[1])\n"
    program += f"row, starved = {STEP!r} + chr(10), {STARVED!r} + chr(10)\n" + textwrap.dedent(script)
    monkeypatch.setattr(processes, "command_of", lambda case: [sys.executable, "-c", program, str(case.folder)])


def cases(folder, *settings):
    return [Case("bench step", each, folder / f"case-{number}") for number, each in enumerate(settings or [{}])]


ENDINGS = [
    ("(out / 'results.jsonl').write_text(row)", [("ok", "")]),
    ("(out / 'results.jsonl').write_text(2 * row)", [("ok", ""), ("ok", "")]),
    ("(out / 'results.jsonl').write_text(row); sys.exit('RuntimeError: then this')",
     [("ok", ""), ("failed", "RuntimeError: then this")]),
    ("(out / 'results.jsonl').write_text(starved); sys.exit(1)", [("out of memory", "needed 9")]),
    ("(out / 'results.jsonl').write_text(starved); sys.exit('RuntimeError: then this')",
     [("out of memory", "needed 9"), ("failed", "RuntimeError: then this")]),
    ("sys.exit('trainstep: no such thing; do that')", [("failed", "no such thing; do that")]),
    ("raise MemoryError", [("out of memory", "MemoryError")]),
    ("sys.exit('[rank1]: torch.OutOfMemoryError: CUDA out of memory. Tried\\nChildFailedError: rank 1')",
     [("out of memory", "torch.OutOfMemoryError: CUDA out of memory. Tried")]),
    ("sys.exit(3)", [("failed", "ended with exit code 3 and no word")]),
    ("os.kill(os.getpid(), signal.SIGKILL)", [("failed", "killed by SIGKILL (often the kernel, for want of memory)")]),
    ("pass", [("failed", "wrote no row that a sweep shows; see its results.jsonl")]),
    ("(out / 'results.jsonl').write_text(row + row[:20]); sys.exit(9)", [("failed", "ended with exit code 9")]),
    ("time.sleep(60)", [("failed", "not done after 0.5 s, and ended")]),
]  # fmt: skip


@pytest.mark.parametrize(("script", "expected"), ENDINGS)
def test_however_a_case_ends_it_has_rows(script, expected, tmp_path, monkeypatch):
    scripted(monkeypatch, script)
    timeout = 0.5 if "sleep" in script else 60
    (case,) = run_here(cases(tmp_path), timeout_s=timeout)
    rows = case.finished()
    assert [row.status for row in rows] == [status for status, _ in expected]
    assert all(row.reason.startswith(reason) for row, (_, reason) in zip(rows, expected, strict=True)), rows
    assert len({row.row for row in rows}) == len(rows), "rows of one case are told apart"


def test_a_killed_sweep_leaves_no_case_and_the_next_one_waits_for_it(tmp_path):
    _, out, running, pid = hanging_sweep(tmp_path)
    running.kill()
    running.communicate()
    with held_folder(out, "the case is running", wait_s=5):
        assert not is_alive(pid), "the folder is let go when the case has ended"


def test_the_keeper_itself_is_killed_and_the_case_ends(tmp_path, monkeypatch):
    scripted(monkeypatch, "(out / 'pid').write_text(str(os.getpid()) + '.'); time.sleep(600)")
    (case,) = cases(tmp_path)
    child = processes.Child(case, timeout_s=None)
    path = case.folder / "pid"
    pid = int(wait_for(lambda: path.exists() and path.read_text().endswith(".") and path.read_text(), "it")[:-1])
    os.kill(child._process.pid, signal.SIGKILL)
    wait_for(lambda: not is_alive(pid), "the case's end", 5)
    wait_for(child.poll, "the keeper's end", 5)  # the kernel ends a process's children before it says that it ended
    assert case.finished()[0].reason.startswith("killed by SIGKILL")


@pytest.mark.parametrize("how", ["ends", "is told to end", "lasts too long"])
def test_what_leaves_the_case_s_session_ends_with_it(how, tmp_path, monkeypatch):
    scripted(monkeypatch, f"""
        import subprocess
        daemon = "import os, time; os.fork() and os._exit(0); os.setsid(); os.fork() and os._exit(0);"
        daemon += f"open('{{out}}/pid', 'w').write(str(os.getpid()) + '.'); time.sleep(600)"
        subprocess.Popen([sys.executable, "-c", daemon]).wait()
        while not (out / "pid").exists() or not (out / "pid").read_text():
            time.sleep(0.01)
        (out / "results.jsonl").write_text(row)
        time.sleep({0 if how == "ends" else 600})
    """)  # fmt: skip
    path = tmp_path / "case-0" / "pid"
    if how == "is told to end":
        child = processes.Child(cases(tmp_path)[0], timeout_s=None)
        wait_for(lambda: path.exists() and path.read_text().endswith("."), "the daemon")
        child.end()
    elif how == "ends":
        next(run_here(cases(tmp_path)))
    else:  # a busy machine may take longer than that to start it
        ended = (next(run_here(cases(tmp_path), timeout_s=limit_s)) for limit_s in (2.0, 8.0, 32.0))
        assert any(path.exists() for _ in ended)
    assert not is_alive(int(path.read_text()[:-1]))


def test_of_much_output_the_end_says_what_happened(tmp_path, monkeypatch):
    scripted(monkeypatch, """
        print(*range(300_000), sep=chr(10), file=sys.stderr)
        sys.exit("RuntimeError: after much talk")
    """)  # fmt: skip
    (case,) = run_here(cases(tmp_path))
    assert case.finished()[0].reason == "RuntimeError: after much talk"


def test_a_case_is_known_by_its_words_alone():
    one = Case("bench step", {"seed": 1, "context": 16})
    assert one.identity == Case("bench step", {"context": 16, "seed": 1}).identity
    others = [Case("bench ladder", one.settings), Case("bench step", {"seed": 1, "context": 17}),
              Case("bench step", {**one.settings, "processes": 1})]  # fmt: skip
    assert len({one.identity, *(each.identity for each in others)}) == 4
    assert flags({"num_layers": 2, "peaks": True, "timeline": False, "processes": 2}) == [
        "--num-layers",
        "2",
        "--peaks",
    ]


def test_cases_keep_the_identity_that_folders_of_earlier_sweeps_bear(tmp_path):
    """Computed at commit a746529: another value would run finished cases again."""
    grid = load_grid(REPOSITORY / "examples" / "sweep.toml", parse)
    assert [case.identity for case in grid.cases[:2]] == ["6dd7a9fce731", "720b55cc701e"]
    file = tmp_path / "memory.toml"
    file.write_text(
        'command = "memory"\nprocesses = 2\n[fixed]\npeaks = true\n'
        '[axes]\nsize = ["small"]\n"learning-rate" = [1.0]\nprecision = ["fp32,bf16"]\ntimeline = [true, false]\n'
    )
    assert [case.identity for case in load_grid(file, parse).cases] == ["6e4dc4b47fd8", "ae92d52dbc18"]
    case = Case("plan", {"size": "2025/xl", "batch": 1}).below(Path(), ["size"])
    assert case.folder.name == f"size=2025_xl-{case.identity}"


def test_processes_are_started_by_torchrun(tmp_path):
    settings = {"collective": "all-reduce", "size_mb": 1, "device": "cpu", "steps": 7, "processes": 2}
    (case,) = run_here([Case("bench collectives", settings, tmp_path)])
    (row,) = case.finished()
    assert row.status == "ok", row.reason
    assert row.values["n"] == 7
    assert row.case["processes"] == 2


def test_only_one_sweep_at_a_time_in_a_folder(tmp_path):
    file = tmp_path / "grid.toml"
    file.write_text('command = "bench step"\n[axes]\nsize = ["tiny"]\n')
    with (
        held_folder(tmp_path / "out", "a test is"),
        pytest.raises(UsageError, match=r"out is in use by .*; wait for it"),
    ):
        Sweep(file=file, out=tmp_path / "out").run()


@pytest.mark.thorough
def test_the_example_runs_in_small(tmp_path):
    """The file in the repository, with the first value of each axis."""
    text = (REPOSITORY / "examples" / "sweep.toml").read_text()
    whole = load_grid(REPOSITORY / "examples" / "sweep.toml", parse)
    assert len(whole.cases) == 12
    file = tmp_path / "small.toml"
    file.write_text(re.sub(r"= \[([^,\]]+)[^\]]*\]", r"= [\1]", text))
    assert run("sweep", str(file), "--out", str(tmp_path / "out")) == 0
    (row,) = read_records(tmp_path / "out" / "results.jsonl")
    assert row.status == "ok", row.reason
    assert (row.case, row.row) == (whole.cases[0].columns(), None)


def test_the_files_in_the_document_are_sweeps(tmp_path):
    text = (REPOSITORY / "docs" / "sweep.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```toml\n(.*?)```", text, re.DOTALL)
    assert len(blocks) == 2
    for index, block in enumerate(blocks):
        file = tmp_path / f"{index}.toml"
        file.write_text(block)
        assert len(load_grid(file, parse).cases) == (12, 6)[index]


HEAD = 'command = "bench step"\n'
BAD = [
    ("", "command is None; expected one of analyze, bench attention"),
    ('command = "info"', "command is 'info'"),
    ("command = [", "cannot read the sweep"),
    (HEAD, "an empty grid, as [axes] has no key"),
    (HEAD + "[axes]\nbatch = []", "an empty grid, as [axes] batch has no values"),
    (HEAD + "[axes]\nbatch = 3", "[axes] batch is 3; expected a list"),
    (HEAD + "[axes]\nbatch = [1, 1]", "[axes] batch has 1 twice"),
    (HEAD + '[axes]\nbatch = [1, "1"]', "[axes] batch has 1 twice"),
    (HEAD + "[axes]\nlearning-rate = [1.0]\nlearning_rate = [2.0]", "[axes] spells one flag in two ways"),
    (HEAD + "[axes]\nbatch = [0]", "[axes] batch: batch is 0; expected a positive number"),
    (HEAD + "[axes]\nbatchs = [1]", "[axes] batchs: unknown --batchs; did you mean --batch?"),
    (HEAD + "[axes]\nnum-heads = [4]", "[axes] num_heads: unknown --num-heads (trainstep bench step --help)\n"),
    (HEAD + '[axes]\nbatch = ["many"]', "[axes] batch: Error parsing --batch"),
    (HEAD + '[axes]\nprecision = ["fp32", "fp8"]', "[axes] precision: Error parsing --precision"),
    (HEAD + '[axes]\nsize = ["huge"]', "[axes] size: unknown size 'huge'"),
    ('command = "analyze"\n[axes]\nconfig = ["absent.toml"]', "[axes] config: cannot read the configuration absent"),
    (HEAD + "[axes]\nbatch = [[1]]", "[axes] batch is [1]; expected a string, a number"),
    (HEAD + "[axes]\nprocesses = [0]", "[axes] processes is 0; expected how many"),
    (HEAD + '[axes]\nout = ["a"]', "[axes] out is set by the sweep itself"),
    (HEAD + "[fixed]\nbatch = 1\n[axes]\nbatch = [1]", "batch is both fixed and an axis"),
    (HEAD + "[fixed]\nbatch = [1]\n[axes]\nseed = [1]", "[fixed] batch is a list; move it to [axes]"),
    (HEAD + "axis = 1\n[axes]\nseed = [1]", "unknown table or key 'axis'"),
    (HEAD + "timeout = -1\n[axes]\nseed = [1]", "timeout is -1; expected seconds above 0"),
    (HEAD + "axes = 1", "axes is 1; expected a table"),
]


@pytest.mark.parametrize(("text", "message"), BAD)
def test_a_bad_file_is_one_line_with_the_key(text, message, tmp_path, capsys):
    file = tmp_path / "sweep.toml"
    file.write_text(text)
    assert run("sweep", str(file), "--out", str(tmp_path / "out")) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not (tmp_path / "out").exists(), "nothing was started"


def test_bad_flags(tmp_path, capsys):
    file = tmp_path / "sweep.toml"
    file.write_text(HEAD + "[axes]\nseed = [1]")
    words = ["sweep", str(file), "--out", str(tmp_path / "out")]
    assert run("sweep", str(tmp_path / "absent.toml")) == 2
    assert "cannot read the sweep" in capsys.readouterr().err
    assert run(*words, "--timeout", "0") == 2
    assert "timeout is 0; expected seconds above 0" in capsys.readouterr().err
    assert not (tmp_path / "out").exists(), "nothing was started"
    assert run("sweep", str(file), "--out", "/proc/nope") == 2
    assert "choose another folder with --out" in capsys.readouterr().err
