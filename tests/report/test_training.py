"""The section of training runs: curves with marks, the late rank, what waiting takes, on both sides of each rule."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.report import sample
from tests.report.test_charts import drawn, ends
from trainstep.report.blocks import Charts, Facts
from trainstep.report.numbers import number
from trainstep.report.subjects import findings
from trainstep.report.subjects.training import LATE, MOST_RANKS, WAITING, headline, training
from trainstep.report.tables import Table
from trainstep.rows import TrainRow
from trainstep.rows.records import Times


def run(name: str = "mine.model:make", *, series: dict[str, Any] | None = None, **changes: Any) -> TrainRow:
    """A run of 40 updates of 60, saved every 10, started again at 21 on other ranks."""
    steps = list(range(1, 41))
    curves: dict[str, Any] = {
        "step": steps,
        "loss": [5.0 - step / 20 for step in steps],
        "learning_rate": [1e-3] * 40,
        "gradient_norm": [1.0 + step % 3 for step in steps],
        "step_ms": [20.0] * 40,
        "tokens_per_s": [1000.0 + step for step in steps],
        "utilisation": [0.4] * 40,
        "validation_step": [20, 40],
        "validation_loss": [4.2, 3.2],
        "saved_step": [10, 20, 30],
        "saved_loss": [4.5, 4.0, 3.5],
        "start_step": [1, 21],
        "start_ranks": [2, 4],
        "start_again": [0, 3],
        "start_scheme": ["ddp", "fsdp"],
        "start_ms": [20.0, 10.0],
        "ranks_own_ms": [10.0, 10.0, 10.0, 10.0],
        "ranks_data_ms": [1.0, 1.0, 1.0, 1.0],
    }
    values = {"done": 40, "starts": 2, "trained_again": 3, "last_loss": 3.0, "first_loss": 4.95, "utilisation": 0.4}
    values |= {"validation_loss": 3.2, "tokens": 4000, "tokens_per_s": 1030.0, "n": 20}
    values |= {"validation_share": 0.01, "checkpoint_share": 0.01, "times": {"step": Times(20.0, 19.0, 21.0)}}
    case: dict[str, Any] = {"workload": name, "scheme": "fsdp", "world_size": 4, "steps": 60}
    return TrainRow(series=curves | (series or {}), environment=sample.CPU, **case, **(values | changes))


def charts_of(*rows: TrainRow) -> dict[str, Any]:
    section = training(rows)
    assert section is not None
    return {chart.name: chart for block in section.blocks if isinstance(block, Charts) for chart in block.charts}


def ids(*rows: TrainRow) -> list[str]:
    return [finding.id for finding in findings(rows)]


def test_every_curve_is_drawn_with_what_happened() -> None:
    charts = charts_of(run())
    assert list(charts) == [f"training-{name}" for name in ("loss", "throughput", "utilisation", "norm", "rate")]
    meanings = ["training", "validation", "checkpoint", "restart"]
    assert [meaning for _, meaning in charts["training-loss"].legend] == meanings
    for name, chart in charts.items():
        plot = chart.plot()
        low, high = ends(plot)[:2]
        places = [float(each["d"][1:].split()[0]) / 1000 for each in drawn(plot, "path", "warn dashed")]
        assert [low + share * (high - low) for share in places] == pytest.approx([20.5], rel=1e-3), name


def test_pictures_have_a_time_instead_of_tokens_and_nothing_is_drawn_of_nothing() -> None:
    empty = {"tokens_per_s": [None] * 40, "utilisation": [None] * 40, "saved_step": [], "saved_loss": []}
    alone = {"start_step": [1], "ranks_own_ms": [], "ranks_data_ms": [], "validation_step": [], "validation_loss": []}
    charts = charts_of(run(series=empty | alone))
    assert "training-utilisation" not in charts
    assert charts["training-throughput"].title == "Time of an update"
    assert [meaning for _, meaning in charts["training-loss"].legend] == ["training"]


def test_starts_and_facts_are_told() -> None:
    section = training([run()])
    assert section is not None
    starts = next(block for block in section.blocks if isinstance(block, Table) and block.name == "training-starts")
    assert starts.texts() == [("1", "2", "ddp", "0", "20.0"), ("21", "4", "fsdp", "3", "10.0")]
    facts = next(block for block in section.blocks if isinstance(block, Facts))
    assert [(name, cell.text) for name, cell in facts.items] == [
        ("Updates made", "40 of 60"), ("Tokens", "4,000"), ("Checkpoints", "3"),
        ("Waiting for validations", "1.00% of the time"), ("Waiting for checkpoints", "1.00% of the time"),
    ]  # fmt: skip
    told = headline([run()])
    assert told is not None
    assert (told.figure.text, told.says) == ("3.0000", "loss after update 40 of 60")


def test_several_runs_share_their_charts_by_the_shortest_name() -> None:
    charts = charts_of(run("one"), run("two"))
    assert [meaning for _, meaning in charts["training-rate"].legend] == ["one", "two"]
    assert headline([run("one"), run("two")]) is None
    other = replace(run(), scheme="ddp")
    assert [meaning for _, meaning in charts_of(run(), other)["training-rate"].legend] == ["fsdp on 4", "ddp on 4"]
    assert [meaning for _, meaning in charts_of(run(), run())["training-rate"].legend] == ["run 1", "run 2"]


def test_a_record_of_an_earlier_version_is_in_the_table_alone() -> None:
    old = TrainRow(workload="old", last_loss=1.0, series={"step": [1, 2], "loss": [2.0, 1.0]})
    section = training([old])
    assert section is not None
    assert [type(block) for block in section.blocks] == [Table]
    assert ids(old) == []
    assert training([]) is None


def own_times(late: float) -> dict[str, Any]:
    return {"ranks_own_ms": [10.0, 10.0, late, 10.0]}


@pytest.mark.parametrize(
    ("series", "expected"),
    [
        (own_times(10.0 * (1 + LATE) + 1.5), ["ranks.late_training"]),
        (own_times(10.0 * (1 + LATE) - 0.1), []),
        (own_times(10.0 * (1 + LATE) + 0.5), []),  # 1.5 ms of an update of 20 ms are too few
        ({"ranks_own_ms": [], "ranks_data_ms": [1.0, 1.0, 4.0, 1.0]}, ["ranks.late_data"]),
        ({"ranks_own_ms": [], "ranks_data_ms": [1.0, 1.0, 2.0, 1.0]}, []),
        ({"ranks_own_ms": [], "ranks_data_ms": []}, []),
    ],
)
def test_a_rank_is_late_if_it_is_notably_so(series: dict[str, Any], expected: list[str]) -> None:
    assert [each for each in ids(run(series=series)) if each.startswith("ranks")] == expected


def test_the_late_rank_and_its_batches_are_named() -> None:
    slow = {"ranks_own_ms": [10.0, 30.0, 10.0, 10.0], "ranks_data_ms": [1.0, 19.0, 1.0, 1.0]}
    (finding,) = [each for each in findings([run(series=slow)]) if each.id == "ranks.late_training"]
    assert finding.figures["rank"] == 1
    assert finding.figures["data_ms"] == 18.0
    assert finding.sentence.endswith("takes it 30.0 ms, and them 10.0 ms; its batches take 18.0 ms longer to draw.")
    slow["ranks_data_ms"] = [1.0, 2.0, 1.0, 1.0]
    (finding,) = [each for each in findings([run(series=slow)]) if each.id == "ranks.late_training"]
    assert finding.sentence.endswith("and them 10.0 ms.")


@pytest.mark.parametrize(("ranks", "shown"), [(1, 0), (2, 2), (MOST_RANKS + 1, MOST_RANKS)])
def test_of_very_many_ranks_the_slowest_are_shown(ranks: int, shown: int) -> None:
    times = [10.0 + rank / 100 for rank in range(ranks)]
    section = training([run(series={"ranks_own_ms": times, "ranks_data_ms": [1.0] * ranks})])
    assert section is not None
    found = [each for each in section.blocks if isinstance(each, Table) and each.name == "training-ranks"]
    assert [len(each.rows) for each in found] == [shown] * (shown > 0)
    assert all(each.texts()[-1] == (str(ranks - 1), number(times[-1]), "1.00") for each in found)
    assert all((f"the slowest {MOST_RANKS} of {ranks}" in each.caption) is (ranks > MOST_RANKS) for each in found)


@pytest.mark.parametrize("what", ["validation", "checkpoint"])
def test_waiting_is_told_from_a_share_on(what: str) -> None:
    assert f"training.{what}" in ids(run(**{f"{what}_share": WAITING}))
    assert f"training.{what}" not in ids(run(**{f"{what}_share": 0.99 * WAITING}))


def test_restarts_are_told_and_one_start_is_none() -> None:
    (finding,) = [each for each in findings([run()]) if each.id == "training.restarts"]
    assert finding.figures["again"] == 3
    assert "3 of its 40 updates had been made before" in finding.sentence
    assert "training.restarts" not in ids(run(starts=1))
