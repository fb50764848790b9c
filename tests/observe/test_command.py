"""`trainstep run` as a command: whatever the script does, its output and exit code are its own, and rows are kept."""

import dataclasses
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.observe.measuring import SCRIPTS, run_command, sentences
from trainstep.base.errors import UsageError
from trainstep.commands.cli import parse
from trainstep.commands.run import split_script
from trainstep.observe.command import command_of
from trainstep.observe.supervise import Rank
from trainstep.rows import ChangeRow, DtypeRow, PeakRow, ScriptRow
from trainstep.rows.records import of_kind, read_records


@pytest.mark.parametrize(
    ("words", "own", "script"),
    [
        ("--steps 5 python train.py --steps 7", "--steps 5", "python train.py --steps 7"),
        ("--steps=5 --no-memory train.py --debug", "--steps=5 --no-memory", "train.py --debug"),
        ("--out here -m package.train -x", "--out here", "-m package.train -x"),
        ("--debug -- --odd", "--debug", "--odd"),
        ("--help", "--help", ""),
        ("", "", ""),
    ],
)
def test_options_end_where_the_script_begins(words, own, script):
    assert split_script(words.split()) == (own.split(), tuple(script.split()))


def test_scripts_and_modules_are_told_from_the_interpreter(tmp_path):
    script = tmp_path / "python_train.py"
    script.touch()
    for words in (["python", script], ["python3", script], [sys.executable, script], [script]):
        command = command_of([*map(str, words), "--lr", "3"])
        assert (command.target, command.is_module, command.arguments) == (str(script), False, ("--lr", "3"))
    command = command_of(["python", "-u", "-X", "dev", "-m", "package.train", "5"])
    assert (command.target, command.options, command.arguments) == ("package.train", ("-u", "-X", "dev", "-m"), ("5",))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["uv", "run", "train.py"], "type uv run trainstep run train.py"),
        (["a program", "--lr", "3"], "type trainstep run '.*/a program' --lr 3"),
        (["train.sh", "3"], "and type bash train.sh 3"),
        (["env/bin/python3.9", "train.py"], "has no torch; type trainstep run python train.py"),
        (["env/bin/python", "-m", "package.train"], "has no torch; type trainstep run python -m package.train"),
        (["-m"], "-m is given no module"),
    ],
)
def test_what_is_no_script_is_said(words, said, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path}/env/bin")
    Path("env/bin").mkdir(parents=True)
    for name, text in {"a program": "#! python\n", "uv": "#!/bin/sh\n", "python": "#!/bin/sh\nexit 1"}.items():
        Path("env/bin", name).write_text(text)
        Path("env/bin", name).chmod(0o755)
    Path("env/bin/python3.9").symlink_to("python")
    Path("train.sh").touch()
    with pytest.raises(UsageError, match=said):
        command_of(words)


def test_ranks_of_one_start_are_told_from_others():
    torchrun = {"RANK": "1", "WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "a", "MASTER_PORT": "1"}
    assert Rank.of(torchrun) == Rank.of(torchrun | {"LOCAL_RANK": "1"}) != Rank.of(torchrun | {"MASTER_PORT": "2"})
    assert (Rank.of({}).rank, Rank.of({}).world_size) == (0, 1)


@pytest.mark.parametrize(
    ("how", "code", "steps", "said"),
    [
        ("raises", 1, 3, "it was ended by ValueError (ending.py:"),
        ("sys.exit", 7, 3, "it ended by sys.exit"),
        ("os._exit", 5, 2, "as by os._exit or exec"),
        ("updates by hand", 0, None, "but 3 backward passes: a step is found by its optimizer"),
        ("forks", 0, None, "but in a process that the script forked, which is not measured"),
    ],
)
def test_however_a_script_ends_its_steps_are_kept(how, code, steps, said, tmp_path):
    ended, rows = run_command(tmp_path, "python", SCRIPTS / "ending.py", how)
    assert ended.returncode == code, ended.stderr
    assert ended.stdout == "trained\n"
    assert said in sentences(ended)
    (row,) = of_kind(rows, ScriptRow)
    assert row.steps_seen == steps
    if how == "raises":
        assert "Traceback" in ended.stderr
        assert "trainstep/observe" not in ended.stderr.partition("\n trainstep run")[0], (
            "our frames are none of its business"
        )


PARTS = {
    "observe.log.read_logs": "reading the steps failed: ValueError: broken",
    "commands.deep.DeepRun.rows": "the deep run failed: ValueError: broken",
    "rows.records.RecordWriter": "writing results.jsonl failed: ValueError: broken",
    "report.page.Report.write": "the report failed: ValueError: broken",
}


@pytest.mark.parametrize("part", PARTS)
def test_a_part_of_a_report_that_fails_is_a_line_and_the_others_stand(part, tmp_path, monkeypatch, capsys):
    def fail(*_, **__):
        raise ValueError("broken\nwith details")

    (tmp_path / "t.py").write_text("print(1)")
    monkeypatch.setattr(f"trainstep.{part}", fail)
    run = dataclasses.replace(
        parse(["run", *(["--deep"] if "deep" in part else []), "--out", str(tmp_path / "out"), str(tmp_path / "t.py")])
    )
    assert run.run() == 0
    said = capsys.readouterr().err
    assert PARTS[part] in said
    assert said.count("failed: ValueError") == 1
    assert "details" not in said
    assert ("imported no torch" in said) is (part != "observe.log.read_logs")
    assert (tmp_path / "out" / "results.jsonl").exists() is (
        part not in ("observe.log.read_logs", "rows.records.RecordWriter")
    )
    assert (tmp_path / "out" / "report.html").exists() is (
        part not in ("observe.log.read_logs", "report.page.Report.write")
    )


@pytest.mark.parametrize("room", [100, 900, 3000])
def test_a_full_disk_costs_the_files_and_not_the_script(room, tmp_path):
    """Files may have no more bytes than that: then the task does not fit, or the page, or also the rows."""
    (tmp_path / "t.py").write_text("import sys; print(1); sys.exit(3)")
    limit = f"import os, resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, ({room}, {room})); "
    words = ["-m", "trainstep", "run", "--out", str(tmp_path / "out"), str(tmp_path / "t.py")]
    command = [sys.executable, "-c", f"{limit}os.execv(sys.executable, [sys.executable] + {words!r})"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    if room > 100:
        assert (ended.returncode, ended.stdout) == (3, "1\n"), ended.stderr
        assert "failed: " in ended.stderr
    else:
        assert (ended.returncode, ended.stdout) == (2, ""), "it was not started"
        assert "choose another folder with --out" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_what_cannot_be_run_is_told_as_python_does(tmp_path):
    broken = tmp_path / "broken.py"
    broken.write_text("import torch\nx = = 1\n")
    for words in (["-m", "no_such_module"], [str(broken)], ["-m", "trainstep.no_such_module"]):
        ended, _ = run_command(tmp_path / "out", *words)
        plain = subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=60, check=False)
        assert ended.returncode == plain.returncode == 1
        assert ended.stderr.startswith(plain.stderr), ended.stderr


def test_a_script_that_catches_everything_is_stopped(tmp_path):
    command = ("--steps", 4, SCRIPTS / "ending.py", "catches everything")
    ended, rows = run_command(tmp_path, *command)
    assert ended.returncode == 0
    assert ended.stdout == "caught 4\n"
    assert [row.steps_seen for row in of_kind(rows, ScriptRow)] == [4]


def test_a_script_without_torch_that_reads_its_input(tmp_path):
    script = tmp_path / "reads.py"
    script.write_text(
        "import sys\nprint(sys.argv[1:], sys.stdin.read(), __name__, 'torch' in sys.modules, sys.path[0])"
    )
    ended, rows = run_command(tmp_path / "out", script, "--steps", "5", input="some text")
    assert ended.stdout == f"['--steps', '5'] some text __main__ False {tmp_path}\n"
    assert (ended.returncode, rows[0].status) == (0, "failed")
    assert "imported no torch (it ran to its end)" in sentences(ended)


@pytest.mark.parametrize(
    ("place", "said"),
    [
        ("train.py", "a file that is there and no diff"),
        ("missing/out.diff", "where no file can be written"),
        (".", "where no file can be written"),
        ("/dev/null", "where no file can be written"),
    ],
)
def test_a_patch_is_written_over_nothing_of_the_user_s(place, said, tmp_path):
    """Before the first run, which may take long."""
    script = tmp_path / "train.py"
    script.write_text("raise AssertionError('it was started')")
    ended, rows = run_command(tmp_path / "out", "--ladder", "--patch", place, script, cwd=tmp_path)
    assert (ended.returncode, rows) == (2, [])
    assert said in sentences(ended)
    assert script.read_text() == "raise AssertionError('it was started')"


def test_a_module_that_trains_in_a_subprocess(tmp_path):
    (tmp_path / "starts.py").write_text(
        "import subprocess, sys\nsubprocess.run([sys.executable, '-c', 'import time; time.sleep(3); print(1)'])"
    )
    ended, rows = run_command(tmp_path / "out", "-m", "starts", cwd=tmp_path)
    assert (ended.stdout, ended.returncode) == ("1\n", 0)
    assert "it started the command 'python" in rows[0].reason
    assert "secret" not in f"{ended.stderr}{rows}"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_reaches_the_script_and_its_steps_are_kept(number, tmp_path):
    script = tmp_path / "endless.py"
    text = (SCRIPTS / "ending.py").read_text().partition("how = ")[0]
    waits = "    torch.randn(10**5).sort()\n"
    script.write_text(f"{text}\nwhile True:\n    train(1)\n    print('step', flush=True)\n{waits}")
    command = [sys.executable, "-m", "trainstep", "run", "--out", str(tmp_path / "out")]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([*command, str(script)], **pipes) as running:
        for _ in range(40):
            assert running.stdout.readline() == "step\n"
        running.send_signal(number)
        _, errors = running.communicate(timeout=120)
    # A script that has imported torch ends with 1 after Ctrl-C, one that has not by the signal.
    assert running.returncode in ((-number,) if number == signal.SIGTERM else (-number, 1))
    (row,) = of_kind(read_records(tmp_path / "out" / "results.jsonl"), ScriptRow)
    assert row.steps_seen > 20
    assert ("KeyboardInterrupt" in row.ended) is (number == signal.SIGINT)
    assert errors.count("Traceback") == (number == signal.SIGINT), "the script's own"


@pytest.mark.parametrize(
    ("options", "environment", "said"),
    [
        (["--patch", "out.diff"], {}, "--patch belongs to a ladder: add --ladder"),
        (["--in-place"], {}, "--in-place belongs to a ladder or a deep run: add --ladder or --deep"),
        (["--profile-after", "5"], {}, "--profile-after belongs to a deep run: add --deep"),
        (["--no-memory"], {}, "--no-memory belongs to a deep run: add --deep"),
        (["--deep"], {"RANK": "0", "WORLD_SIZE": "2"}, "--deep has 1 of 2 ranks on this host; expected all"),
        (["--ladder", "--steps", "2"], {}, "steps is 2; expected 3 or more"),
        (["--ladder", "--changes", "magic"], {}, "unknown change 'magic'; expected some of TF32 matmuls"),
        (["--ladder"], {"RANK": "0", "WORLD_SIZE": "2"}, "--ladder has 1 of 2 ranks on this host; expected all"),
    ],
)
def test_what_no_ladder_can_do_is_said(options, environment, said, tmp_path):
    ended, rows = run_command(tmp_path, *options, SCRIPTS / "plain.py", env=environment)
    assert (ended.returncode, rows) == (2, [])
    assert said in sentences(ended)


def test_a_ladder_of_a_script_that_fails_has_its_exit_code(tmp_path):
    ended, rows = run_command(tmp_path, "--ladder", "--in-place", "--steps", "4", SCRIPTS / "ending.py", "sys.exit")
    assert ended.returncode == 7
    assert "checkpoints and logs, each run writes again" in sentences(ended)
    assert [(row.kind, row.status) for row in rows] == [("change", "failed")]
    assert "exit code 7" in rows[0].reason


@pytest.mark.thorough
def test_what_a_script_compiles_is_the_same_graphs(tmp_path):
    """A whole step with its update, which comes to hooks between two graphs, and one graph that none may break."""
    script = SCRIPTS / "compiled_step.py"
    plain = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=560, check=True)
    ended, rows = run_command(tmp_path / "out", "--deep", "--profile-after", "6", "python", script, cwd=tmp_path)
    assert plain.stdout.startswith("GRAPHS")
    assert (ended.returncode, ended.stdout) == (0, plain.stdout), ended.stderr
    assert "compiled again" not in sentences(ended)
    assert "failed" not in sentences(ended)
    assert "trainstep" not in ended.stderr.partition("trainstep: --deep")[0], "dynamo warns of what it traces"
    (row,) = of_kind(rows, ScriptRow)
    assert (row.steps_seen, row.backwards) == (16, 1)
    assert row.times["optimizer"].median > row.times["forward"].median, "dynamo's graph of an update is no model"
    assert (tmp_path / "out" / "deep" / "trace.json.gz").exists()


@pytest.mark.thorough
def test_what_is_compiled_in_the_step_that_is_recorded_runs_as_it_is_written(tmp_path):
    """There torch would compile nothing, and raise; and the models are found late."""
    script = SCRIPTS / "compiled_late.py"
    plain = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=560, check=True)
    ended, rows = run_command(tmp_path / "out", "--deep", "--profiled-steps", 0, "python", script, cwd=tmp_path)
    assert plain.stdout.startswith("SEEN")
    assert (ended.returncode, ended.stdout) == (0, plain.stdout), ended.stderr
    assert "failed" not in sentences(ended)
    (peak,) = of_kind(rows, PeakRow)
    assert peak.peak_gib > 0
    assert {row.class_name for row in of_kind(rows, DtypeRow)} == {"Linear"}


def test_a_script_that_compiles_its_step_is_judged(tmp_path):
    """Roundings are drawn under a mode in which torch compiles nothing, and raises where it must."""
    words = ["--ladder", "--steps", "4", "--changes", "bf16 autocast"]
    ended, rows = run_command(tmp_path, *words, "python", SCRIPTS / "compiled_step.py", cwd=tmp_path)
    assert "Each run has a copy of this folder" in sentences(ended)
    assert ended.returncode == 0, ended.stderr
    baseline, other = of_kind(rows, ChangeRow)
    assert baseline.verdict == "baseline", baseline.reason
    assert "outside of compiled code" in other.reason
