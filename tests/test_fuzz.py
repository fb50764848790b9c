"""A few damaged files of each kind; `python -m tools.trust.fuzz` does thousands."""

import sys

import pytest
import torch.distributed as dist

from tools.trust.fuzz import SUBJECTS, damaged_snapshot, judge, random
from tools.trust.fuzz import _hook as watch


@pytest.mark.parametrize("subject", list(SUBJECTS))
def test_damaged_files_end_in_rows_or_one_line(tmp_path, subject):
    sys.addaudithook(watch)
    wrong = {seed: found for seed in range(1, 41) if (found := judge(subject, seed, tmp_path))}
    assert wrong == {}
    assert not dist.is_initialized(), "what reads checkpoints would refuse all after the first"


@pytest.mark.parametrize("subject", [each for each in SUBJECTS if each != "checkpoint"])  # which is never undamaged
def test_undamaged_files_are_read(tmp_path, subject, monkeypatch):
    """Else a mistake in what is damaged would leave nothing to find."""
    for damage in ("of_bytes", "of_values"):
        monkeypatch.setattr(f"tools.trust.fuzz.{damage}", lambda rng, value: value)
    path = tmp_path / SUBJECTS[subject].name
    path.write_bytes(SUBJECTS[subject].damage(random.Random(3)))
    SUBJECTS[subject].read(path, page=False)


def test_the_judge_notices_code_that_runs_and_files_that_change(tmp_path, monkeypatch):
    import pickle

    from tools.trust import fuzz

    def run(path, page):
        pickle.loads(path.read_bytes())

    def change(path, page):
        path.write_bytes(b"")

    def fail(path, page):
        raise KeyError("a traceback")

    def last(path, page):
        while True:
            pass

    sys.addaudithook(watch)
    monkeypatch.setattr(fuzz, "SECONDS", 0.1)
    planted = lambda rng: pickle.dumps(fuzz.Planted())  # noqa: E731
    for read, says in ((run, "ran"), (change, "changed"), (fail, "a traceback"), (last, "more than")):
        monkeypatch.setitem(fuzz.SUBJECTS, "snapshot", fuzz.Subject("s.pickle", planted, read))
        assert says in judge("snapshot", 1, tmp_path)
    assert damaged_snapshot(random.Random(1)) == damaged_snapshot(random.Random(1)), "a seed makes one file"
