import fcntl

import pytest

from trainstep.errors import UsageError
from trainstep.held_folder import held_folder


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
