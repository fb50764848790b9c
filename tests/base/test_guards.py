"""A folder for one process at a time, and signals that are noted."""

import fcntl
import os
import signal
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from trainstep.base.errors import UsageError
from trainstep.base.guards import StopSignals, held_folder, launch_folder
from trainstep.commands.bench import BenchFused
from trainstep.commands.memory import Memory
from trainstep.commands.plan import Plan
from trainstep.commands.profile import Dtypes
from trainstep.commands.run import Run


def test_one_at_a_time_and_the_next_when_it_is_let_go(tmp_path):
    out = tmp_path / "new" / "out"
    said = rf"out is in use by trainstep one \(process {os.getpid()} on .*\); wait for it, or choose another folder"
    with held_folder(out, "trainstep one"), pytest.raises(UsageError, match=said):  # noqa: SIM117
        with held_folder(out, "trainstep two"):
            pass
    with pytest.raises(KeyError), held_folder(out, "trainstep one"):
        raise KeyError
    with held_folder(out, "a test"):
        child = os.fork()  # as a loader's worker that stays: it has the lock's file, too
        if not child:
            signal.pause()
    with held_folder(out, "a test"):
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


@pytest.mark.parametrize(
    "command", [Plan(), Memory(), Dtypes(), BenchFused(), Run()], ids=lambda each: type(each).__name__
)
def test_each_launch_has_a_folder_of_its_own(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with command.in_folder("a/b c") as first, command.in_folder() as second:
        (first.out / "results.jsonl").write_text("")
        (second.out / "results.jsonl").write_text("")
        assert [first.out, second.out] == [command.out / "01-a-b-c", command.out / "02"]
        assert (command.out / "latest").readlink() == Path("02")
    with command.in_folder("empty"):
        assert (command.out / "latest").readlink() == Path("03-empty")
    assert (command.out / "latest").readlink() == Path("02"), "where nothing was kept there is no folder"
    with replace(command, out=second.out).in_folder() as again:
        assert again.out == second.out, "a folder that is named is the folder"
        with pytest.raises(UsageError, match="in use by trainstep "), replace(command, out=second.out).in_folder():
            pass
    with (
        pytest.raises(UsageError, match="latest is the link to"),
        replace(command, out=command.out / "latest").in_folder(),
    ):
        pass


def test_ranks_of_one_start_share_a_folder(tmp_path):
    def folder(launch, rank, name="it"):
        return launch_folder(tmp_path, "a test", name, launch=launch, rank=rank)

    with folder("a", 1) as first, folder("a", 0) as second, folder("b", 0) as other, folder("b", 1) as beside:
        assert (first.name, second, other.name, beside) == ("01-it", first, "02-it", other)
        (first / "rank-1.jsonl").write_text("")
        (other / "rank-1.jsonl").write_text("")
    with folder("b", 1) as third, folder("b", 0) as fourth:
        assert (third.name, fourth) == ("03-it", third), "a start that is named alike shares none of before"
    with folder("a", 0, None), folder("a", 1, None), pytest.raises(UsageError, match="in use by a test"):  # noqa: SIM117
        with folder("b", 1, None):
            pass


def test_a_place_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match=r"cannot write .*file/out.*choose another folder with --out"):  # noqa: SIM117
        with held_folder(tmp_path / "file" / "out", "a test is"):
            pass


def test_a_file_system_without_locks_is_not_said_to_be_busy(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(37, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(UsageError, match=r"cannot lock .*No locks available; .*a file system with locks"):  # noqa: SIM117
        with held_folder(tmp_path, "a test is"):
            pass


def test_a_signal_is_noted_and_a_second_ctrl_c_raises():
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with StopSignals(raises=False) as signals:
        assert signals.received is None
        os.kill(os.getpid(), signal.SIGTERM)
        assert signals.received is signal.SIGTERM
        os.kill(os.getpid(), signal.SIGINT)
        assert signals.received is signal.SIGINT
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


def test_a_signal_is_noted_and_raised_where_that_is_asked():
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt), StopSignals(raises=True) as signals:
        os.kill(os.getpid(), signal.SIGTERM)
    assert signals.received is signal.SIGTERM
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


def test_a_signal_that_is_ignored_stays_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup starts a command
    try:
        with StopSignals(raises=True):
            os.kill(os.getpid(), signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)


def test_another_thread_changes_no_handler():
    before, seen = signal.getsignal(signal.SIGTERM), []

    def work():
        with StopSignals(raises=True):
            seen.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [before]
