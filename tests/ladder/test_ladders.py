"""A change is one file: both ladders, the patch and the report know it by that."""

import sys
from dataclasses import replace

import pytest

from tests.ladder.given import Given, ladder_of
from trainstep.base.config import StepConfig
from trainstep.base.stats import Interval, Ratio
from trainstep.ladder import changes
from trainstep.ladder.change import all_changes, changes_of_step, chosen
from trainstep.ladder.ladder import Ladder, Refused, Tried, is_open
from trainstep.ladder.patch import patch_of
from trainstep.report.page import Report
from trainstep.report.subjects.climbs import of_steps, tried
from trainstep.rows import FINAL, ChangeRow
from trainstep.step.workload import WorkloadSource

TOY = """
from trainstep.base.advice import Line
from trainstep.ladder.change import Change
from trainstep.ladder.patch import before_optimizer


def toy(trial):
    trial.on_first_call.append(lambda module: module.toy())


CHANGE = Change(
    "toy change",
    Line("model.toy()", "before the optimizer"),
    {"script": 9.0, "cuda": 9.0, "cpu": 9.0},
    answers=("launches.bound",),
    step={"compile": "model"},
    script=toy,
    why_not=lambda settings: "it is toyed with" if settings.get("toys") else "",
    write=before_optimizer("{}.toy()"),
)
"""


@pytest.fixture
def toy(tmp_path, monkeypatch):
    """The change, found in the one file that has it."""
    folder = tmp_path / "changes"
    folder.mkdir()
    (folder / "toy.py").write_text(TOY)
    monkeypatch.setattr(changes, "__path__", [*changes.__path__, str(folder)])
    yield chosen(all_changes("script"), "toy change")[0]
    del sys.modules["trainstep.ladder.changes.toy"]


class Steps:
    """Steps that take as long as their changes say, in ms, with a peak and a relative error of their gain."""

    tries_all_again = True

    def __init__(self, peaks=None, error=0.01, too_large=(), **ms):
        self.ms, self.peaks, self.error, self.too_large, self.asked = ms, peaks or {}, error, too_large, []
        self.gains, self.costs = {}, {}

    def skipped(self, change):
        return ""

    def gain(self, change):
        return self.gains.get(change.name, 1.0)

    def cost_s(self, made, top):
        return sum(self.costs.get(each.name, 0.0) for each in made)

    def excludes(self, change, other):
        return not change.step.keys().isdisjoint(other.step)

    def measure(self, name, made, top):
        self.asked.append(name)
        own = [*(top.changes if top else ()), *made]
        key = "_".join(each.name.split()[0] for each in own) or "baseline"
        if key in self.too_large:
            raise Refused("out of memory", "no room")
        ms = self.ms[key]
        if ms is None:
            raise Refused("wrong", "off by 0.3")
        gain = (top.ms if top else ms) / ms
        interval = self.error and Interval((1 - self.error) * gain, (1 + self.error) * gain)
        peak, values = self.peaks.get(key, 1.0), {"workload": "w"}
        tried = Tried(changes=own, made=list(made), values=values, gain=Ratio(gain, interval), peak=peak)
        tried.ms = ms
        return tried

    def row(self, name, values):
        return ChangeRow(**{"change": name, **values})

    def proof(self, first, top, accepted):
        return self.row(FINAL, {"speedup": first.ms / top.ms, "accepted": True})


ROOM, FUSED = chosen(all_changes("cpu"), "fused attention,fused optimizer")


@pytest.mark.parametrize(
    ("ms", "peak", "error", "accepted"),
    [
        (10.0, 0.97, 0.01, True),  # no slower, and smaller
        (10.0, 0.985, 0.01, False),  # by no more than runs differ
        (10.15, 0.5, 0.01, False),  # 0.975 to 0.995 times as fast
        (10.0, 0.5, None, False),  # nothing is certain
        (10.0, None, 0.01, False),
        (9.5, 2.0, 0.01, True),
    ],
)
def test_faster_is_accepted_and_smaller_where_it_is_certainly_no_slower(ms, peak, error, accepted):
    runner = Steps({"fused": peak}, error, baseline=10.0, fused=ms)
    _, row, *_ = Ladder([FUSED], runner).climb()
    assert row.accepted is accepted
    if error is not None:
        assert (row.speedup_low, row.speedup_high) == pytest.approx((row.gain_low, row.gain_high), rel=1e-9)


@pytest.mark.parametrize(
    ("value", "low", "high", "expected"),
    [
        (1.0, 0.95, 1.04, True),
        (1.0, 0.97, 1.04, False),  # narrow: there is no difference
        (1.5, 0.99, 1.105, False),  # by its part of the gain
        (1.5, 1.2, 1.9, False),  # it decides
    ],
)
def test_more_turns_may_tell_where_a_wide_interval_decides_nothing(value, low, high, expected):
    assert is_open(Ratio(value, Interval(low, high))) is expected


def test_what_makes_room_comes_first_and_what_had_none_is_tried_on_the_top():
    """Without fused attention the baseline is too large, or the optimizer alone."""
    begun, changes = [], [replace(FUSED, name="optimizer"), replace(ROOM, name="attention")]
    runner = Steps(too_large=("baseline",), attention=10.0, attention_optimizer=5.0)
    rows = list(Ladder(changes, runner, on_part=lambda name, made: begun.append((name, len(made)))).climb())
    assert [(row.change, row.status, row.verdict) for row in rows[:3]] == [
        ("baseline", "out of memory", "out of memory"),
        ("attention", "ok", "first that fits"),
        ("optimizer", "ok", "faster"),
    ]
    assert begun == [("baseline", 0), ("attention", 1), ("optimizer", 1), (FINAL, 2)]
    runner = Steps(too_large=("optimizer",), baseline=10.0, attention=5.0, attention_optimizer=4.0)
    names = [row.change for row in Ladder(changes, runner).climb()]
    assert names == ["baseline", "optimizer", "attention", "optimizer, on the top", FINAL]
    runner = Steps(too_large=("baseline", "optimizer", "attention"))
    assert [row.status for row in Ladder(changes, runner).climb()] == ["out of memory"] * 3


def test_what_brought_nothing_is_tried_again_alone_where_a_try_costs_seconds():
    changes = [
        replace(FUSED, name="one", step={"loss": "chunked"}),
        replace(FUSED, name="two"),
        replace(ROOM, name="top"),
    ]
    runner = Steps(baseline=10.0, one=10.0, two=10.0, top=5.0, top_one=5.0, top_two=5.0)
    names = [row.change for row in Ladder(changes, runner).climb()]
    assert names == ["baseline", "one", "two", "top", "one, on the top", "two, on the top", FINAL]


def test_of_a_script_several_gains_are_proven_together(toy):
    """One after another: the product of ratios between runs is held against runs of the script as it is."""
    script = Given(**{"toy change": {"step_ms": (5.0,) * 7}, "toy change,fused optimizer": {"step_ms": (4.0,) * 7}})
    rows = list(ladder_of(script, [toy, FUSED]).climb())
    assert [row.change for row in rows] == ["baseline", "toy change", "fused optimizer", FINAL]
    assert (rows[-1].speedup, rows[-1].verdict, rows[-1].accepted) == (pytest.approx(2.5), "faster", True)
    assert rows[-1].lines == f"{toy.line.text}; {FUSED.line.text}"
    (once,) = [row for row in ladder_of(script, [toy]).climb() if row.change != "baseline"]
    assert once.change == "toy change", "its gain is over the script as it is already"


def test_a_change_is_tried_first_by_both_ladders_where_its_gain_is_expected_to_be_largest(toy):
    source = WorkloadSource("theirs", lambda step: None)
    assert all_changes("script")[0] is toy
    assert [changes_of_step(source, device, StepConfig())[0] for device in ("cuda", "cpu")] == [toy, toy]
    assert toy.reference == "trainstep.ladder.changes.toy:toy"


def test_it_climbs_in_this_process(toy):
    runner = Steps(baseline=10.0, toy=5.0, toy_fused=4.0)
    rows = list(Ladder([toy, FUSED], runner).climb())
    assert [(row.change, row.verdict, row.accepted) for row in rows[:3]] == [
        ("baseline", "baseline", True),
        ("toy change", "faster", True),
        ("fused optimizer", "faster", True),
    ]
    assert (rows[2].gain, rows[2].speedup, rows[3].change, rows[3].speedup) == (1.25, 2.5, FINAL, 2.5)
    assert rows[2].speedup_low == pytest.approx(2.5 * 0.99**2**0.5, rel=1e-3), "errors of both gains"
    assert (rows[1].code, rows[1].where, rows[1].answers) == (
        "model.toy()",
        "before the optimizer",
        ("launches.bound",),
    )
    (climb,) = of_steps(rows)
    assert [row.change for row in climb.there] == ["toy change", "fused optimizer"]
    assert tried(rows, "launches.bound", "w")[1] == {"gain of toy change": 2.0}, "the report knows it by its row"


def test_what_is_wrong_is_not_built_upon_in_this_process(toy):
    runner = Steps(baseline=10.0, toy=None, fused=5.0)
    rows = {row.change: row for row in Ladder([toy, FUSED], runner).climb()}
    assert (rows["toy change"].status, rows["toy change"].accepted, rows["toy change"].code) == ("wrong", False, None)
    assert rows["fused optimizer"].accepted
    assert runner.asked == ["baseline", "toy change", "fused optimizer"], "wrong once is wrong on the top"


def test_it_climbs_in_processes(toy):
    script = Given(**{"toy change": {"step_ms": (5.0,) * 7}})
    ladder = ladder_of(script, [toy])
    rows = {row.change: row for row in ladder.climb()}
    assert (rows["toy change"].gain, rows["toy change"].accepted) == (pytest.approx(2.0), True)
    assert rows["toy change"].lines == "model.toy() (before the optimizer)"
    lines = [each for each in Report(list(rows.values())).findings if each.id == "gain.line"]
    assert [each.figures["change"] for each in lines] == ["toy change"]
    assert ladder.accepted == [toy]


def test_it_is_skipped_where_it_says_so_and_written_where_it_can_be(toy, tmp_path):
    assert toy.skipped({"on_gpu": True, "toys": True}) == "it is toyed with"
    file = tmp_path / "train.py"
    file.write_text("import torch\nmodel = make()\noptimizer = torch.optim.SGD(model.parameters())\n")
    settings = {"optimizers": [{"file": str(file), "line": 3, "names": ["model"]}]}
    found = patch_of(file, [toy], settings)
    assert "model.toy()\noptimizer" in found.texts[str(file)]
    assert found.written == [toy]
