"""A folder for one process at a time, and signals that are noted."""

import fcntl
import os
import signal
import threading

import pytest

from trainstep.base.errors import UsageError
from trainstep.base.guards import StopSignals, held_folder


def test_one_at_a_time_and_the_next_when_it_is_let_go(tmp_path):
    out = tmp_path / "new" / "out"
    with held_folder(out, "a test is"), pytest.raises(UsageError, match=r"^another is in .*out; wait for it"):  # noqa: SIM117
        with held_folder(out, "another is"):
            pass
    with pytest.raises(KeyError), held_folder(out, "a test is"):
        raise KeyError
    with held_folder(out, "a test is"):
        pass


def test_a_place_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match=r"cannot write to .*file/out.*choose another folder with --out"):  # noqa: SIM117
        with held_folder(tmp_path / "file" / "out", "a test is"):
            pass


def test_a_file_system_without_locks_is_not_said_to_be_busy(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(37, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(UsageError, match=r"cannot lock .*No locks available; choose an --out"):  # noqa: SIM117
        with held_folder(tmp_path, "a test is"):
            pass


def test_a_signal_is_noted_and_a_second_ctrl_c_raises():
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with StopSignals(signal.SIGTERM, signal.SIGINT, raises=False) as signals:
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
    with pytest.raises(KeyboardInterrupt), StopSignals(signal.SIGTERM, raises=True) as signals:  # noqa: PT012
        assert signal.getsignal(signal.SIGINT) is before[0], "only what is caught"
        os.kill(os.getpid(), signal.SIGTERM)
    assert signals.received is signal.SIGTERM
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


def test_another_thread_changes_no_handler():
    before, seen = signal.getsignal(signal.SIGTERM), []

    def work():
        with StopSignals(signal.SIGTERM, raises=True):
            seen.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [before]
