"""A change is one file: both ladders, the patch and the report know it by that."""

import sys

import pytest

from tests.ladder.given import Given, ladder_of
from trainstep.base.config import StepConfig
from trainstep.base.stats import Interval, Ratio
from trainstep.ladder import changes
from trainstep.ladder.change import all_changes, changes_of_step, chosen
from trainstep.ladder.ladder import Ladder, Refused, Tried
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
    why_not=lambda settings: "it is toyed with" if settings["checkpoints"] else "",
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
    """Steps that take as long as their changes say, in ms."""

    tries_all_again = True

    def __init__(self, **ms):
        self.ms, self.asked = ms, []

    def skipped(self, change):
        return ""

    def excludes(self, change, other):
        return not change.step.keys().isdisjoint(other.step)

    def measure(self, name, made, top):
        self.asked.append(name)
        own = [*(top.changes if top else ()), *made]
        ms = self.ms["_".join(each.name.split()[0] for each in own) or "baseline"]
        if ms is None:
            raise Refused("wrong", "off by 0.3")
        gain = (top.step_ms if top else ms) / ms
        interval = Ratio(gain, Interval(0.99 * gain, 1.01 * gain))
        return Tried(changes=own, made=list(made), values={"workload": "w"}, gain=interval, step_ms=ms, peak=1.0)

    def row(self, name, values):
        return ChangeRow(**{"change": name, **values})

    def proof(self, first, top, accepted):
        return self.row(FINAL, {"speedup": first.step_ms / top.step_ms, "accepted": True})


def test_a_change_is_tried_first_by_both_ladders_where_its_gain_is_expected_to_be_largest(toy):
    source = WorkloadSource("theirs", lambda step: None)
    assert all_changes("script")[0] is toy
    assert [changes_of_step(source, device, StepConfig())[0] for device in ("cuda", "cpu")] == [toy, toy]
    assert toy.reference == "trainstep.ladder.changes.toy:toy"


def test_it_climbs_in_this_process(toy):
    fused = chosen(all_changes("cpu"), "fused optimizer")
    runner = Steps(baseline=10.0, toy=5.0, toy_fused=4.0)
    rows = list(Ladder([toy, *fused], runner).climb())
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
    fused = chosen(all_changes("cpu"), "fused optimizer")
    runner = Steps(baseline=10.0, toy=None, fused=5.0)
    rows = {row.change: row for row in Ladder([toy, *fused], runner).climb()}
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
    assert toy.skipped({"on_gpu": True, "checkpoints": True}) == "it is toyed with"
    file = tmp_path / "train.py"
    file.write_text("import torch\nmodel = make()\noptimizer = torch.optim.SGD(model.parameters())\n")
    settings = {"optimizers": [{"file": str(file), "line": 3, "names": ["model"]}]}
    found = patch_of(file, [toy], settings)
    assert "model.toy()\noptimizer" in found.texts[str(file)]
    assert found.written == [toy]
