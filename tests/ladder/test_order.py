"""The order of changes by what they may bring, which are not worth a try, and when turns end."""

import dataclasses

import pytest

from tests.ladder.given import BY_NAME, FOUND, Given, climbed
from tests.ladder.test_ladders import FUSED, ROOM, Steps
from tests.ladder.test_turns import turns
from trainstep.ladder.ladder import Ladder
from trainstep.ladder.scripts import why_no_half
from trainstep.rows import FINAL

OPTIMIZER, WORKERS = BY_NAME["fused optimizer"], BY_NAME["loader workers"]


ONE, TWO = dataclasses.replace(FUSED, name="one", step={"loss": "chunked"}), dataclasses.replace(ROOM, name="two")


@pytest.mark.parametrize("first", ["one", "two"])
def test_what_is_expected_to_gain_most_comes_first(first):
    runner = Steps(baseline=10.0, one=9.0, two=8.0, one_two=7.0, two_one=7.0)
    runner.gains = {first: 1.3}
    names = [row.change for row in Ladder([ONE, TWO], runner).climb()]
    assert names == ["baseline", first, {"one": "two", "two": "one"}[first], FINAL]


@pytest.mark.parametrize(
    ("shares", "first"),
    [
        ({"data": 0.4, "optimizer": 0.1}, "loader workers"),
        ({"data": 0.1, "optimizer": 0.4}, "fused optimizer"),
        ({"data": 0.4, "optimizer": 0.009}, "loader workers"),
    ],
)
def test_a_change_of_one_phase_gains_at_most_what_that_takes(shares, first, monkeypatch):
    monkeypatch.setattr("trainstep.ladder.scripts.phase_shares", lambda steps: shares)
    _, rows = climbed(Given(), OPTIMIZER, WORKERS)
    assert list(rows)[1] == first
    is_tried = shares["optimizer"] > 0.01
    assert (rows["fused optimizer"].verdict != "not tried") is is_tried
    assert OPTIMIZER.gain("script", shares) == pytest.approx(1 / (1 - shares["optimizer"]))
    assert climbed(Given(), OPTIMIZER, are_named=True)[1]["fused optimizer"].verdict != "not tried"


def test_where_launches_set_the_pace_graphs_come_before_another_precision(monkeypatch):
    gains = [
        BY_NAME[name].gain("script", {"launches": 0.9}) for name in ("compiled model with CUDA graphs", "bf16 autocast")
    ]
    assert gains == pytest.approx([10.0, 1 / (0.9 + 0.1 / 1.9)])


@pytest.mark.parametrize("is_named", [False, True])
def test_bf16_is_tried_on_a_cpu_without_instructions_for_it_only_if_named(is_named, monkeypatch):
    monkeypatch.setitem(FOUND, "on_gpu", False)
    monkeypatch.setattr("trainstep.ladder.scripts.why_no_half", lambda device: "this CPU computes less in bf16")
    _, rows = climbed(Given(), BY_NAME["bf16 autocast"], are_named=is_named)
    assert (rows["bf16 autocast"].reason == "this CPU computes less in bf16") is not is_named
    assert why_no_half.__wrapped__ is not None, "products are timed once"


@pytest.mark.parametrize(
    ("b_ms", "spread", "order"),
    [
        (12.0, 0.08, "BAAB"),  # every run is slower than all others
        (10.0, 0.08, "BAAB" * 3),
        (8.5, 0.08, "BAAB" * 2),  # faster, and not for certain: more runs may tell
    ],
)
def test_a_clear_loss_ends_after_a_round(b_ms, spread, order):
    assert turns(b_ms, spread=spread)[0] == order
