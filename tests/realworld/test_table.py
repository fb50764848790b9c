"""The cells of docs/models.md say what the rows say, the worst of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import measuring
from measure_models import outcome, peaks_disagree
from measuring import Ended, keep, run
from trainstep.check.reference import OWN_ARITHMETIC
from trainstep.rows import MemoryTimelineRow, ParallelRow, PeakRow, StepRow
from trainstep.rows.records import Row, Status, write_whole


def step(status: Status = "ok", reason: str | None = None, **values: Any) -> StepRow:
    return StepRow(status=status, reason=reason, precision="fp32", mode="step", **values)


def wrong(scheme: str) -> ParallelRow:
    return ParallelRow(scheme=scheme, world_size=2, status="wrong", reason="by 2")


@pytest.mark.parametrize(
    ("rows", "what", "said"),
    [
        ([step(not_checked="not asked for"), step()], "right", []),
        ([step(), step("unsupported", "no blocks")], "limit", ["no blocks"]),
        ([step("unsupported", "none"), step("failed", "broke"), step("failed", "broke")], "failed", ["none", "broke"]),
        ([step("failed", "broke"), step("wrong", "by 2")], "wrong", ["broke", "by 2"]),
        ([wrong("fsdp")], "wrong", ["by 2"]),
        ([wrong("torch-fsdp2")], "limit", ["torch-fsdp2: by 2"]),
        ([step("wrong", f"by 2 ({OWN_ARITHMETIC})")], "limit", [f"by 2 ({OWN_ARITHMETIC})"]),
        ([step(not_checked="out of memory: 3 GiB")], "not checked", ["out of memory: 3 GiB"]),
        ([PeakRow(prediction_error=0.04)], "right", []),
        ([PeakRow(checkpointing="none", prediction_error=-0.06)], "off", ["predicted peak -6.0%"]),
        ([], "crashes", []),
    ],
)
def test_a_cell_is_the_worst_of_its_rows(rows: list[Row], what: str, said: list[str]) -> None:
    assert outcome(Ended("rows", "", rows)) == {"what": what, "rows": len(rows), "said": said}


def test_what_ended_without_rows_says_its_last_line() -> None:
    assert outcome(Ended("refused", "trainstep: no such thing")) == {
        "what": "refused",
        "rows": 0,
        "said": ["no such thing"],
    }


def test_peaks_of_one_step_are_one_figure() -> None:
    rows = {
        "bench step": [step(peak_gib=1.0), StepRow(precision="bf16", mode="step", peak_gib=0.7)],
        "timeline": [MemoryTimelineRow(precision="fp32", peak_gib=1.005)],
        "peaks": [
            PeakRow(precision="fp32", mode=mode, peak_gib=peak) for mode, peak in (("forward", 0.5), ("step", 1))
        ],
    }
    assert peaks_disagree(rows) is None
    assert peaks_disagree({}) is None
    rows["timeline"] = [MemoryTimelineRow(precision="fp32", peak_gib=1.05)]
    assert peaks_disagree(rows) == ("peaks differ: bench step 1.02e+03 MiB, timeline 1.08e+03 MiB, peaks 1.02e+03 MiB")


def test_a_command_that_hangs_or_crashes_ends_its_cell_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = "print('one\\ntrainstep: two\\nthree'); time.sleep(int(sys.argv[1])); sys.exit(int(sys.argv[2]))"
    monkeypatch.setattr(measuring, "LAUNCH", ("-c", f"import sys, time; {script}"))
    assert run(["60", "0"], tmp_path, limit_s=1) == Ended("hangs", "longer than 1 s")
    assert run(["0", "2"], tmp_path) == Ended("refused", "trainstep: two")
    assert run(["0", "0"], tmp_path) == Ended("crashes", "trainstep: two")
    write_whole(tmp_path / "results.jsonl", [StepRow()])
    for code, how in (("1", "rows"), ("70", "crashes")):
        ended = run(["0", code], tmp_path)
        assert (ended.how, ended.last, len(ended.rows)) == (how, "trainstep: two", 1)


def test_a_measured_cell_takes_the_place_of_its_earlier_self(tmp_path: Path) -> None:
    for name, cell in (("b", 1), ("a", 2), ("b", 3), ("gone", 4)):
        keep(tmp_path / "kept.json", name, cell, order=("a", "b"))
    assert (tmp_path / "kept.json").read_text() == '{\n "a": 2,\n "b": 3\n}\n'
