"""Runs that are only compared go beside one another, and timed ones alone."""

import dataclasses
import time
from types import SimpleNamespace

import pytest

from tests.ladder.given import BY_NAME, FOUND, Given, captured, climbed
from tests.observe.measuring import SCRIPTS, alone
from trainstep.ladder import single
from trainstep.ladder.scripts import ScriptRunner
from trainstep.ladder.single import Script


class Counted(Given):
    """Runs take a moment, and note how many are under way; those beside others may fail."""

    def __init__(self, beside, fail):
        super().__init__(**{"bf16 autocast": {"step_ms": (5.0,) * 7}})
        self.beside, self.fail, self.under_way, self.seen = lambda first: beside, fail, 0, []
        self.leader = SimpleNamespace(is_over=False)

    def run(self, what, changes=(), **more):
        self.under_way += 1
        time.sleep(0.05)
        self.seen.append((self.under_way, "timed" in what or what == "the script as it is"))
        is_beside = self.under_way > 1
        self.under_way -= 1
        found = super().run(what, changes, **more)
        return dataclasses.replace(found, captured=None, failure="no port") if self.fail and is_beside else found


@pytest.mark.parametrize(
    ("fits", "picks_by_time", "fail", "most"), [(3, False, False, 3), (3, False, True, 3), (3, True, False, 1)]
)
def test_only_runs_that_are_compared_have_others_beside_them(fits, picks_by_time, fail, most, monkeypatch):
    """One that fails beside them is made again alone."""
    monkeypatch.setitem(FOUND, "draws", True)
    monkeypatch.setitem(FOUND, "picks_by_time", picks_by_time)
    script = Counted(fits, fail)
    _, rows = climbed(script, BY_NAME["bf16 autocast"])
    assert rows["bf16 autocast"].accepted
    assert max(count for count, _ in script.seen) == most
    assert {count for count, is_timed in script.seen if is_timed} == {1}


@pytest.mark.parametrize(
    ("used_s", "used_gib", "peak_gib", "fits"),
    [(20.0, 1, 2.0, 8), (10.0, 1, 2.0, 16), (10.0, 14, 2.0, 5), (10.0, 1, 40.0, 1), (400.0, 1, 2.0, 1)],
)
def test_as_many_fit_as_the_first_run_leaves_cores_and_memory_for(
    used_s, used_gib, peak_gib, fits, monkeypatch, tmp_path
):
    used = SimpleNamespace(ru_utime=used_s, ru_stime=0.0, ru_maxrss=used_gib * 2**20)
    monkeypatch.setattr(single.resource, "getrusage", lambda whose: used)
    monkeypatch.setattr(single, "free_host_bytes", lambda: 100 * 2**30)
    monkeypatch.setattr(single, "cores", lambda: 16)
    script = Script(alone([str(SCRIPTS / "climbing.py")]), tmp_path, 4, copies=SimpleNamespace())
    script.own_s = 10.0
    log = SimpleNamespace(facts={"environment": {"device_memory_gib": 139.0}})
    first = SimpleNamespace(captured=captured(peak_gib), log=log)
    assert script.beside(first) == fits
    script.is_alone = True
    assert script.beside(first) == 1


def test_runs_beside_one_another_end_when_the_ladder_does(tmp_path):
    file = tmp_path / "waits.py"
    file.write_text("import time\ntime.sleep(60)\n")
    script = Script(alone([str(file)]), tmp_path / "runs", 4)
    script.tell = lambda text: time.sleep(1.0) or 1 / ("second" not in text)
    runner, start = ScriptRunner(script), time.monotonic()
    runner.beside = 2
    with pytest.raises(ZeroDivisionError):
        runner._ahead([("the first", (), None), ("the second", (), None)])
    assert time.monotonic() - start < 30
