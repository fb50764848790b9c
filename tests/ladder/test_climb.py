"""Which rungs a ladder tries, again and how often, where the runs are given."""

import dataclasses
import math

import pytest

from tests.ladder.given import BY_NAME, FOUND, Given, captured, climbed, ladder_of

OPTIMIZER, WORKERS = BY_NAME["fused optimizer"], BY_NAME["loader workers"]


def test_against_a_script_that_does_not_train_nothing_is_held():
    script = Given()
    script.plain["captured"] = captured(4.0, losses=(2.0, math.nan, math.nan))
    _, rows = climbed(script, OPTIMIZER)
    assert list(rows) == ["baseline"]
    assert (rows["baseline"].status, rows["baseline"].verdict) == ("failed", "not judged")
    assert rows["baseline"].reason.startswith("the loss of update 2 is nan: nothing can be held")


class Noisy(Given):
    """Runs that are timed take turns at being slower and faster by this share."""

    def __init__(self, share, **ms):
        super().__init__(**{names: {"step_ms": (each,) * 7} for names, each in ms.items()})
        self.share = share

    def run(self, what, changes=(), **more):
        found = super().run(what, changes, **more)
        self.share *= 1 if more.get("rounding") else -1
        return dataclasses.replace(found, step_ms=tuple(ms * (1 + self.share) for ms in found.step_ms))


BLOCKS = BY_NAME["compiled blocks"]


@pytest.mark.parametrize(
    ("changed", "kept", "tried"),
    [
        ({"step_ms": (4.0,) * 7}, True, []),
        ({"step_ms": (11.0,) * 7}, False, ["compiled blocks", "fused optimizer"]),  # slower
        ({"failure": "no compiler", "captured": None}, False, ["compiled blocks", "fused optimizer"]),
        ({"captured": captured(4.0, losses=(math.nan,) * 3)}, False, ["compiled blocks", "fused optimizer"]),  # wrong
    ],
)
def test_all_may_be_tried_at_once_and_one_by_one_where_that_is_not_kept(changed, kept, tried, monkeypatch):
    monkeypatch.setitem(FOUND, "recompiles", False)
    script = Given(**{"compiled blocks,fused optimizer": changed, "fused optimizer": {"step_ms": (8.0,) * 7}})
    ladder, rows = climbed(script, BLOCKS, OPTIMIZER, BY_NAME["compiled for any size"], at_once=True)
    row = rows["compiled blocks + fused optimizer"]
    assert row.accepted is kept, row.reason
    assert rows["compiled for any size"].verdict == "not tried", "it is nothing for this script"
    assert sum(each.startswith("compiled blocks,fused") for each in script.asked) <= 2, "no second attempt"
    assert [name for name in rows if name in ("compiled blocks", "fused optimizer")] == tried
    own = ["compiled blocks", "fused optimizer"] if kept else ["fused optimizer"]
    assert [rung.name for rung in ladder.accepted] == own


def test_one_change_alone_is_not_tried_at_once():
    _, rows = climbed(Given(), OPTIMIZER, at_once=True)
    assert list(rows) == ["baseline", "fused optimizer"]


def test_of_what_is_tried_at_once_that_is_told_which_found_its_place():
    """Changes that look for their places as the script runs may find none."""
    script = Given()
    found = {"fused attention": {"train.py:41": "is_causal=True"}}
    changes = [BY_NAME[name] for name in ("fused attention", "fused loss", "fused optimizer")]
    for names in ("fused attention,fused loss,fused optimizer", "fused attention,fused optimizer"):
        script.runs[names] = {"step_ms": (5.0,) * 7, "places": found}
    ladder, rows = climbed(script, *changes, at_once=True)
    assert [rung.name for rung in ladder.accepted] == ["fused attention", "fused optimizer"]
    assert rows["fused attention + fused optimizer"].lines.count("train.py:41: is_causal=True") == 1
    assert (rows["fused loss"].verdict, rows["fused loss"].reason) == ("not tried", changes[1].nothing)


def test_lines_that_a_patch_needs_stay_where_a_later_run_has_compiled_them():
    found, more = {"fused attention": {"train.py:41": "is_causal=True"}}, "fused attention,compiled model"
    script = Given(**{"fused attention": {"step_ms": (5.0,) * 7, "places": found}})
    script.runs[more] = {"step_ms": (2.0,) * 7, "places": {"fused attention": {}}}
    ladder, _ = climbed(script, BY_NAME["fused attention"], BY_NAME["compiled model"])
    assert [each.name for each in ladder.accepted] == more.split(",")
    assert ladder.runner.settings["places"] == found


@pytest.mark.parametrize("shares", [{"launches": 0.9}, {"launches": 0.2}])
def test_of_those_that_take_others_places_one_is_tried_at_once(shares, monkeypatch):
    """Whichever is expected to gain more."""
    monkeypatch.setattr("trainstep.ladder.scripts.phase_shares", lambda steps: {"optimizer": 0.2, **shares})
    changes = [BY_NAME[name] for name in ("compiled model", "compiled model with CUDA graphs", "fused optimizer")]
    rows = climbed(Given(), *changes, at_once=True)[1]
    (name,) = (each for each in rows if " + " in each)
    assert sorted(name.split(" + ")) == ["compiled model with CUDA graphs", "fused optimizer"]


def test_what_gave_way_to_another_is_told_as_such():
    script = Given(**{"compiled model,fused optimizer": {"step_ms": (5.0,) * 7}})
    _, rows = climbed(script, BLOCKS, BY_NAME["compiled model"], OPTIMIZER, at_once=True)
    assert list(rows) == ["baseline", "compiled model + fused optimizer", "compiled blocks"]
    assert rows["compiled blocks"].reason == "compiled model takes its place"


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["fused attention", "fused optimizer"], ["baseline", "fused optimizer", "fused attention"]),
        (
            ["fused attention", "fused loss"],
            ["baseline", "fused attention + fused loss", "fused attention", "fused loss"],
        ),
    ],
)
def test_of_what_is_tried_at_once_one_or_none_may_find_its_place(names, expected):
    ladder = ladder_of(Given(), [BY_NAME[name] for name in names], at_once=True)
    assert [row.change for row in ladder.climb()] == expected


@pytest.mark.parametrize("on_gpu", [True, False])
def test_on_a_gpu_runs_that_are_only_timed_leave_nothing_to_judge(on_gpu, monkeypatch):
    """On a CPU what a judged run copies slows its steps, so that all have to copy."""
    monkeypatch.setitem(FOUND, "on_gpu", on_gpu)
    script = Given(**{"fused optimizer": {"step_ms": (8.0,) * 7}})
    _, rows = climbed(script, BY_NAME["fused optimizer"])
    assert rows["fused optimizer"].accepted
    own = [judged for names, judged in zip(script.asked, script.judged, strict=True) if names]
    assert own == [True, not on_gpu], "the first one was judged"
    assert script.asked[-3:] == ["", "", "fused optimizer"]
    assert script.judged[-3:] == [not on_gpu] * 3
    assert all(script.judged[:-3])


def test_what_cannot_be_in_a_script_costs_no_run(monkeypatch):
    monkeypatch.setitem(FOUND, "operators", ["LogSoftmaxBackward0", "MmBackward0"])
    script = Given()
    before = len(script.asked)
    names = ("fused attention", "our FlashAttention", "fused loss")
    _, rows = climbed(script, *(BY_NAME[name] for name in names))
    assert not any(script.asked[before:]), "no run with a change"
    assert [rows[name].verdict for name in names] == ["not tried"] * 3


@pytest.mark.parametrize(("fourth", "verdict"), [(37.0, "inconclusive"), (17.0, "faster")])
def test_workers_that_bring_batches_in_bursts_are_as_fast_as_their_totals(fourth, verdict):
    """Three steps of four wait for nothing: their median says nothing of the loop."""
    ms = (1.0, 1.0, 1.0, fourth)
    _, rows = climbed(Given(**{"loader workers": {"step_ms": ms * 4}}), WORKERS)
    row = rows["loader workers"]
    assert (row.verdict, row.accepted) == (verdict, verdict == "faster")
    assert row.gain == pytest.approx(10.0 * 4 / sum(ms))
    assert row.step_ms == pytest.approx(sum(ms) / 4), "what is shown is what the ratio is of"
    assert row.samples["runs"] == [row.step_ms] * row.runs
    assert row.samples["step"] == list(ms) * 4 * row.runs


@pytest.mark.parametrize(("share", "runs"), [(0.001, 2), (0.3, 6)])
def test_a_patch_is_decided_by_as_many_runs_as_its_change(share, runs):
    script = Noisy(share, **{"fused optimizer": 9.0})
    ladder, rows = climbed(script, OPTIMIZER)
    script.share = 0.0  # so that one round would do
    patched = [ladder.runner.check_sources({}, written).runs for written in ([OPTIMIZER], [])]
    assert (rows["fused optimizer"].runs, patched) == (runs, [runs, 2])
