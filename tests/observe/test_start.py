"""A script under `run` starts and ends as plain Python has it; signals reach it, and the parent knows of them."""

import os
import py_compile
import random
import signal
import subprocess
import sys
import time
import zipfile

import pytest

from tests.observe.measuring import run_command, sentences
from trainstep.base.errors import UsageError
from trainstep.observe.command import command_of
from trainstep.observe.log import log_path, read_log
from trainstep.observe.rows import how_it_ended
from trainstep.observe.supervise import Rank, _told, run_script
from trainstep.rows import ScriptRow
from trainstep.rows.records import of_kind

SHOW = """
import sys
loaded = sorted(sys.modules)
import os
print(__name__, __file__, sys.argv, sys.orig_argv, sys.path, list(os.environ.items()), sys.flags, sys.executable)
print(sorted(vars()), __spec__ and __spec__.name, __package__, type(__loader__), sys.warnoptions, sys._xoptions)
print(loaded, __debug__)
import inspect, threading
print(len(inspect.stack()), threading.active_count(), os.open(os.devnull, 0))
print(sorted(os.path.basename(name) for name in sys.path_importer_cache))
"""
PICKLES = """
import atexit, pickle, threading
class Own: pass
def look():
    print(type(pickle.loads(pickle.dumps(Own()))).__module__, flush=True)
atexit.register(look)
threading.Timer(0.3, look).start()
"""
SPAWNS = """
import multiprocessing, os, sys
def look():
    print([name for name in os.environ if "TRAINSTEP" in name or name == "PYTHONPATH"], sys.path, flush=True)
    print([name for name in sys.modules if "trainstep" in name], [str(each) for each in sys.meta_path][:0], flush=True)
if __name__ == "__main__":
    for method in ("spawn", "forkserver", "fork"):
        child = multiprocessing.get_context(method).Process(target=look)
        child.start(); child.join()
        print(child.exitcode)
"""


def both(tmp_path, words, *, env=None, out="out"):
    """The script run plain and under `run_script`: exit code, standard output and error of each, and the log."""
    found = []
    for number in range(2):
        with (tmp_path / "stdout").open("wb") as output, (tmp_path / "stderr").open("wb") as errors:
            options = {"stdout": output, "stderr": errors, "stdin": subprocess.DEVNULL}
            environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | (env or {})
            if number:
                code = run_script(command_of(words), Rank.of({}), tmp_path / out, {}, env=environment, **options)
            else:
                code = subprocess.call(words, env=environment, **options)
        texts = ((tmp_path / name).read_text() if (tmp_path / name).exists() else "" for name in ("stdout", "stderr"))
        found.append((code, *texts))
    return (*found, read_log(log_path(tmp_path / out, 0)))


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder of the script's own, in which it is started."""
    place = tmp_path / "place"
    (place / "pkg").mkdir(parents=True)
    monkeypatch.chdir(place)
    return place


@pytest.mark.parametrize("how", ["script", "-m", "-mpkg", "folder", "zip", "pyc", "options", "cluster"])
def test_a_script_sees_what_plain_python_shows_it(how, tmp_path, folder):
    for name in ("train.py", "pkg/train.py", "pkg/__main__.py"):
        (folder / name).write_text(SHOW)
    with zipfile.ZipFile(folder / "train.zip", "w") as archive:
        archive.writestr("__main__.py", SHOW)
    py_compile.compile("train.py", "compiled.pyc")
    words = {
        "script": ["train.py", "--lr", "3"],
        "-m": ["-m", "pkg.train", "-x"],
        "-mpkg": ["-mpkg"],
        "folder": ["pkg"],
        "zip": ["train.zip", "a b"],
        "pyc": ["compiled.pyc"],
        "options": ["-X", "utf8", "-W", "ignore::UserWarning", "-O", "train.py"],
        "cluster": ["-uBWerror", "--check-hash-based-pycs", "never", "-sm", "pkg.train"],
    }[how]
    own = folder.parent / "own"
    own.mkdir()
    (own / "sitecustomize.py").write_text("print('sitecustomize', __file__)")
    for env in ({}, {"PYTHONPATH": ""}, {"PYTHONPATH": str(own), "LAST": "1"}):
        plain, under, log = both(tmp_path, [sys.executable, *words], env=env)
        assert under == plain
        assert plain[0] == 0, plain
        assert ("sitecustomize" in plain[1]) is ("LAST" in env)
        assert (log.has_begun, log.code, log.ended["how"]) == (True, 0, "returned")


@pytest.mark.parametrize("words", [["-I", "x.py"], ["-uE", "x.py"], ["-S", "-m", "pkg"]])
def test_options_that_hide_the_observer_are_an_error(words):
    with pytest.raises(UsageError, match="leaves out what brings the observer"):
        command_of(["python", *words])


@pytest.mark.parametrize("text", [PICKLES, SPAWNS], ids=["pickles", "spawns"])
@pytest.mark.parametrize("words", [["train.py"], ["-m", "pkg.train"]], ids=["script", "module"])
def test_the_end_and_the_children_are_pythons_own(text, words, tmp_path, folder):
    for name in ("train.py", "pkg/train.py"):
        (folder / name).write_text(text)
    plain, under, _ = both(tmp_path, [sys.executable, *words])
    assert under == plain
    assert (plain[0], plain[2]) == (0, "")
    assert plain[1].count("\n") > 1


ENDS = {
    "returns": ("print(1)", "it ran to its end"),
    "raises": ("def f(): raise KeyError('https://me:secret@host')\nf()", "it was ended by KeyError"),
    "text": ("import sys; sys.exit('a text')", "it ended by sys.exit"),
    "number": ("import sys; sys.exit(7)", "it ended by sys.exit"),
    "os._exit": ("import os; os._exit(4)", "it ended without Python's own end, as by os._exit or exec"),
    "exec": (
        "import os, sys\nos.execv(sys.executable, [sys.executable, '-c', 'print(5); exit(3)'])",
        "it ended without Python's own end, as by os._exit or exec",
    ),
    "killed": ("import os; os.kill(os.getpid(), 9)", "it was ended by signal 9"),
    "interrupted": ("raise KeyboardInterrupt", "it was ended by KeyboardInterrupt"),
    "hook": ("import sys\nsys.excepthook = lambda *_: print('mine')\n1 / 0", "it was ended by ZeroDivisionError"),
    "outputs": ("import io, sys; sys.stdout = sys.stderr = io.StringIO(); print(1)", "it ran to its end"),
    "closes": ("import os; os.closerange(3, 512); f = open('f', 'w'); print(f.fileno())", None),
    "deletes": ("import os, shutil; shutil.rmtree(os.path.dirname(os.getcwd())); print(2)", "it ran to its end"),
    "daemon": (
        "import os, time\nif os.fork():\n  print('parent', flush=True)\n"
        "else:\n  os.setsid(); os.close(1); os.close(2)\n  time.sleep(0.5)",
        "it ran to its end",
    ),
    "traces": (
        "import sys; sys.settrace(lambda *_: None); sys.setprofile(lambda *_: None); print(3)",
        "it ran to its end",
    ),
    "syntax": ("x = = 1", "it was ended by SyntaxError"),
}


@pytest.mark.parametrize("how", ENDS)
def test_a_script_ends_as_it_does_plain(how, tmp_path, folder):
    text, said = ENDS[how]

    def prepare():
        folder.mkdir(parents=True, exist_ok=True)
        os.chdir(folder)
        (folder / "train.py").write_text(text)

    prepare()
    words = [sys.executable, "train.py"]
    plain = subprocess.run(words, capture_output=True, text=True, check=False)
    prepare()
    (tmp_path / "beside").mkdir(exist_ok=True)
    with (tmp_path / "beside" / "1").open("w+") as output, (tmp_path / "beside" / "2").open("w+") as errors:
        code = run_script(command_of(words), Rank.of({}), folder / "out", {}, stdout=output, stderr=errors)
        output.seek(0), errors.seek(0)
        assert (code, output.read(), errors.read()) == (plain.returncode, plain.stdout, plain.stderr)
    log = read_log(log_path(folder / "out", 0))
    assert log.code == code
    if said is not None:
        assert how_it_ended(log, code) == said
    assert "secret" not in (folder / "out" / "rank-0.jsonl").read_text()
    assert os.listdir(folder / "out") == ["rank-0.jsonl"]
    if how == "closes":
        assert (folder / "f").read_text() == "", "nothing of ours goes to a file of the script's"


@pytest.mark.parametrize("error", ["KeyError('secret')", "ConnectionError('https://me:secret@host')"])
def test_the_text_of_an_exception_is_reported_where_it_is_asked_for(error, tmp_path, folder):
    (folder / "train.py").write_text(f"raise {error}")
    with (tmp_path / "2").open("wb") as errors:
        command, options = command_of(["train.py"]), {"is_verbatim": True, "stderr": errors}
        assert run_script(command, Rank.of({}), tmp_path / "out", {}, **options) == 1
    said = how_it_ended(read_log(log_path(tmp_path / "out", 0)), 1)
    assert said.startswith(f"it was ended by {error.partition('(')[0]}: ")
    assert "secret" in said
    assert said.endswith(" (train.py:1)")


@pytest.mark.parametrize("words", [["sleep", "30"], [sys.executable, "-c", "import time; time.sleep(30)", "--token=x"]])
def test_a_process_that_a_script_starts_is_named_by_its_program(words):
    with subprocess.Popen(words) as child:
        whole = ""
        while whole in ("", "a process that the script forked"):  # it begins just now
            whole = _told(child.pid, os.getpid(), is_verbatim=True)
        assert whole == f"the command {' '.join(words)!r}"
        program = os.path.basename(words[0])
        assert _told(child.pid, os.getpid(), is_verbatim=False) == f"the command {program!r}"
        child.kill()
    assert _told(child.pid, os.getpid(), is_verbatim=True) == ""


NAMED = ("trainstep", "tomllib", "resource", "typing_extensions", "statistics", "msgspec")
TRAINS = """
import sys, traceback
NAMES = {names}
import trainstep, tomllib
import torch
print(type(torch.__spec__).__name__, [type(each).__name__ for each in sys.meta_path][-3:])
import resource, typing_extensions, statistics, msgspec
for name in NAMES:
    print(name, getattr(sys.modules[name], "OWN", None), sys.modules[name].__file__)
torch.manual_seed(0)
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(6):
    model(torch.ones(3, 2)).mean().backward()
    optimizer.step()
print([name for name in NAMES if sys.modules[name].__file__.startswith(sys.path[0])], model.weight)
sys.exit("done")
"""


@pytest.mark.parametrize("names", [NAMED, ()], ids=["named as ours", "library"])
def test_a_script_has_its_own_modules_and_we_have_ours(names, folder):
    """A `trainstep.py` of its own, or the library itself, once."""
    (folder / "train.py").write_text(TRAINS.format(names=NAMED))
    for name in names:
        real = "import sys\nif 'x' in sys.argv:\n    1 / 0\n"
        if name == "typing_extensions":  # which torch imports, too
            real += "from typing import *\nimport importlib.util\n"
            real += "_path = [p for p in sys.path if p.endswith('site-packages')][0] + '/typing_extensions.py'\n"
            real += "exec(compile(open(_path).read(), _path, 'exec'))\n"
        (folder / f"{name}.py").write_text(f"OWN = {name!r}\nprint('loaded', {name!r})\n{real}")
    elsewhere = folder.parent  # where `python -m trainstep` is ours
    words = [sys.executable, str(folder / "train.py")]
    plain = subprocess.run(words, capture_output=True, text=True, check=False, cwd=elsewhere)
    ended, rows = run_command(folder / "out", *words, cwd=elsewhere)
    assert plain.stderr == "done\n", plain.stderr
    assert (ended.returncode, ended.stdout) == (plain.returncode, plain.stdout), ended.stderr
    (row,) = of_kind(rows, ScriptRow)
    assert (row.steps_seen, row.ended) == (6, "it ended by sys.exit"), ended.stderr


WAITS = """
import os, signal, sys, time
if sys.argv[1] == "handles":
    def leave(number, frame):
        print("handled", flush=True)
        sys.exit(0)
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, leave)
print("begun", flush=True)
deadline = time.monotonic() + float(sys.argv[2])
while time.monotonic() < deadline:
    time.sleep(0.01)
print("done", flush=True)
"""


def begun(folder, *words):
    """`trainstep run` of the waiting script, once that has begun."""
    (folder / "waits.py").write_text(WAITS)
    command = [sys.executable, "-m", "trainstep", "run", "--out", "out", "waits.py", *words]
    running = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert running.stdout.readline() == "begun\n"
    return running


def test_twenty_stops_and_goes_end_nothing(folder):
    """An interrupted wait for signals has no signal to hand on."""
    running = begun(folder, "plain", "7")
    for turn in range(20):
        os.kill(running.pid, signal.SIGSTOP)
        time.sleep(0.6 if turn % 5 == 0 else 0.1)
        os.kill(running.pid, signal.SIGCONT)
        time.sleep(0.02)
    output, errors = running.communicate(timeout=120)
    assert (running.returncode, output) == (0, "done\n"), errors
    assert "Traceback" not in errors
    assert not read_log(log_path(folder / "out", 0)).signals


@pytest.mark.skipif("PYTEST_XDIST_WORKER" in os.environ, reason="a worker of xdist has threads that take the signal")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("how", ["handles", "plain"])
def test_signals_at_random_moments_end_in_documented_codes(number, how, tmp_path, folder):
    """From before the script begins to after its end, in this process, which hands them on as the command does."""
    (folder / "waits.py").write_text(WAITS)
    chance = random.Random(number)
    seen, missed = set(), []
    before = signal.signal(number, lambda *_: missed.append(number))
    try:
        for turn in range(10):
            after_s = chance.uniform(0.0, 0.25)
            killer = subprocess.Popen(["sh", "-c", f"sleep {after_s:.3f}; kill -{int(number)} {os.getpid()}"])
            with (tmp_path / "1").open("w+") as output, (tmp_path / "2").open("w+") as errors:
                command, options = command_of(["waits.py", how, "0.1"]), {"stdout": output, "stderr": errors}
                code = run_script(command, Rank.of({}), folder / "out", {}, **options)
                output.seek(0), errors.seek(0)
                told, written = output.read(), errors.read()
            killer.wait()
            log = read_log(log_path(folder / "out", 0))
            starts = "Fatal Python error: init_" in written  # so Python dies of a Ctrl-C while it starts
            assert code in (0, -number) or (code == 1 and starts), (turn, after_s, written)
            assert "trainstep" not in written, written
            assert [each["number"] for each in log.signals] in ([], [number])
            assert bool(log.signals) or code == 0
            assert code == 0 or how == "plain" or "handled" not in told
            seen.add((code, bool(log.signals)))
    finally:
        signal.signal(number, before)
    assert any(received for _, received in seen)


def test_a_report_says_which_signal_came_and_when(folder):
    running = begun(folder, "handles", "30")
    running.terminate()
    output, errors = running.communicate(timeout=60)
    assert (running.returncode, output) == (0, "handled\n"), errors
    assert "it ran to its end after trainstep received signal 15 at" in " ".join(errors.split())


def test_two_runs_in_one_folder(folder):
    """Each has one of its own by default; the second one is refused where both name the same."""
    first = begun(folder, "plain", "8")
    ended, _ = run_command(folder / "out", "waits.py", "handles", "0")
    assert (ended.returncode, ended.stdout) == (2, "")
    assert "/out is in use by trainstep run (process " in sentences(ended)
    words = [sys.executable, "-m", "trainstep", "run", "waits.py", "handles", "0"]
    here = [subprocess.Popen(words, stderr=subprocess.DEVNULL) for _ in range(2)]
    assert [each.wait(60) for each in here] == [0, 0]
    assert sorted(each.name for each in (folder / "results/run").glob("[!.]*")) == ["01-waits", "02-waits", "latest"]
    first.communicate(timeout=60)
