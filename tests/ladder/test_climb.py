"""Which rungs a ladder tries, again and how often, where the runs are given."""

import dataclasses
import math

import pytest

from tests.ladder.given import BY_NAME, FOUND, Given, captured, climbed, ladder_of
from trainstep.rows import FINAL

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


@pytest.mark.parametrize(
    ("share", "fused", "workers", "both", "is_again"),
    [
        (0.01, 9.95, 5.0, 4.4, True),  # what may be a third of a millisecond is little of ten, and something of five
        (0.01, 9.95, 5.0, 4.98, True),  # and is not kept if it is nothing there
        (0.001, 9.99, 9.0, 1.0, False),  # it is nothing of nine either
        (0.001, 9.99, 9.99, 1.0, False),  # nothing was kept since
        (0.01, 11.0, 5.0, 1.0, False),  # it is slower
        (0.01, 8.0, 5.0, 4.0, False),  # it was kept
    ],
)
def test_what_brought_nothing_sure_is_tried_again_on_a_shorter_step(share, fused, workers, both, is_again):
    ms = {"fused optimizer": fused, "loader workers": workers}
    script = Noisy(share, **ms, **{"fused optimizer,loader workers": both, "loader workers,fused optimizer": both})
    ladder, rows = climbed(script, OPTIMIZER, WORKERS)
    assert ("fused optimizer, on the top" in rows) is is_again
    if is_again:
        again = rows["fused optimizer, on the top"]
        assert again.accepted is (both < 4.5), again.verdict
        assert again.gain == pytest.approx(workers / both, rel=share)
        assert [rung.name for rung in ladder.accepted] == ["loader workers", *["fused optimizer"] * again.accepted]


BLOCKS = BY_NAME["compiled blocks"]


@pytest.mark.parametrize(
    ("share", "alone", "both", "is_tried"),
    [
        (0.02, 9.8, 5.0, True),  # each may save some tenths of a millisecond of ten
        (0.02, 9.8, 9.9, True),  # and both together may bring nothing as well
        (0.001, 9.99, 1.0, False),  # what each may save is nothing, and so is the sum
        (0.02, 11.0, 1.0, False),  # each is slower
    ],
)
def test_what_brought_nothing_sure_alone_is_tried_at_once(share, alone, both, is_tried):
    """Where launches set the pace each change leaves enough of them, and only all of them are worth it."""
    ms = {"compiled blocks": alone, "fused optimizer": alone, "compiled blocks,fused optimizer": both}
    ladder, rows = climbed(Noisy(share, **ms), BLOCKS, OPTIMIZER)
    name = "compiled blocks + fused optimizer"
    assert not rows["compiled blocks"].accepted
    assert not rows["fused optimizer"].accepted
    assert (name in rows) is is_tried
    if is_tried:
        row = rows[name]
        assert row.accepted is (both < 9.0), row.verdict
        assert row.gain == pytest.approx(10 / both, rel=2 * share)
        assert row.lines == f"{BLOCKS.line.text}; {OPTIMIZER.line.text}"
        assert [rung.name for rung in ladder.accepted] == ["compiled blocks", "fused optimizer"] * row.accepted
        assert FINAL not in rows, "its gain is against the script as it is already"
    assert not any(each.endswith("on the top") for each in rows), "nothing else was kept since"


def test_of_those_that_take_others_places_the_later_ones_are_tried_at_once():
    model = BY_NAME["compiled model"]
    ms = dict.fromkeys(("compiled blocks", "compiled model", "fused optimizer"), 9.8)
    script = Noisy(0.02, **ms, **{"compiled model,fused optimizer": 5.0})
    ladder, rows = climbed(script, BLOCKS, model, OPTIMIZER)
    assert rows["compiled model + fused optimizer"].accepted
    assert [rung.name for rung in ladder.accepted] == ["compiled model", "fused optimizer"]


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


def test_what_gave_way_to_another_is_told_as_such():
    script = Given(**{"compiled model,fused optimizer": {"step_ms": (5.0,) * 7}})
    _, rows = climbed(script, BLOCKS, BY_NAME["compiled model"], OPTIMIZER, at_once=True)
    assert list(rows) == ["baseline", "compiled model + fused optimizer", "compiled blocks"]
    assert rows["compiled blocks"].reason == "compiled model takes its place"


def test_what_was_tried_at_once_in_vain_is_not_tried_so_again():
    ms = dict.fromkeys(("compiled blocks", "fused optimizer", "compiled blocks,fused optimizer"), 9.8)
    ladder = ladder_of(Noisy(0.02, **ms), (BLOCKS, OPTIMIZER), at_once=True)
    assert [row.change for row in ladder.climb()] == [
        *("baseline", "compiled blocks + fused optimizer", "compiled blocks", "fused optimizer")
    ]


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


def test_what_another_rung_took_the_place_of_is_not_tried_again():
    ms = {"compiled blocks": 9.95, "compiled model": 5.0, "compiled model,loader workers": 2.0}
    script = Noisy(0.01, **ms)
    ladder, rows = climbed(script, BY_NAME["compiled blocks"], BY_NAME["compiled model"], WORKERS)
    assert [rung.name for rung in ladder.accepted] == ["compiled model", "loader workers"]
    assert not any(name.endswith("on the top") for name in rows)


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
