"""The page's sections on peaks, residuals, checkpointing and precision, and what is found in them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.report.page import Page
from trainstep.report.findings import Finding
from trainstep.report.page import render
from trainstep.report.subjects import findings
from trainstep.report.subjects.memory import cache_findings
from trainstep.report.subjects.precision import dtype_findings, script_dtypes
from trainstep.rows import AccumulationRow, ChangeRow, CheckpointingRow, DtypeRow, PeakRow, ResidualRow, StepRow
from trainstep.rows.records import Row, Status

CASE: dict[str, Any] = {"workload": "m", "context": 128, "precision": "fp32"}
KEPT = {**CASE, "compile": "off"}
STUDY: list[Row] = [
    PeakRow(**CASE, mode="step", peak_gib=10.0, predicted_gib=9.9, prediction_error=-0.01),
    PeakRow(**{**CASE, "context": 256}, mode="step", predicted_gib=200.0, status="out of memory", reason="no room"),
    ResidualRow(**KEPT, part="first block", group="largest", rank=1, module="blocks.*.attention", mib=512.0, share=0.5,
                operation="Softmax", tensor="fp32 4×32×512×512", storages=1),
    ResidualRow(**KEPT, part="first block", group="all", mib=1024.0, share=1.0),
    ResidualRow(**KEPT, part="step", group="all", mib=4096.0, share=1.0, storages=9),
    ResidualRow(**{**CASE, "compile": "model"}, part="step", group="all", mib=2048.0, share=1.0, storages=5),
    CheckpointingRow(**CASE, checkpointing="every-1", peak_gib=4.0, prediction_error=0.07),
    DtypeRow(**CASE, module="fc", parameters=("fp32",), gradients=("fp32",), outputs=("fp16",)),
    DtypeRow(**CASE, module="(forward's result)", outputs=("fp16",)),
    DtypeRow(**CASE, module="(loss)", outputs=("fp32",)),
    AccumulationRow(accumulator="fp16", addend="fp16", total=9.9531, why="rounding"),
    AccumulationRow(accumulator="fp32", addend="fp16", total=10.0021, why="rounding"),
]  # fmt: skip


def test_every_kind_has_its_section() -> None:
    anchors = Page(render(STUDY)).anchors
    assert [each for each in anchors if each not in ("#summary", "#environment")] == [
        *("#peaks", "#residuals", "#checkpointing", "#dtypes", "#accumulation")
    ]


def test_every_kind_has_its_finding() -> None:
    found = {each.id: each for each in findings(STUDY)}
    assert len(found) == len(findings(STUDY))
    assert {id for id in found if id.startswith("precision.")} == {"precision.dtypes", "precision.accumulation"}
    figures = {id: dict(each.figures) for id, each in found.items() if not id.startswith("precision.")}
    assert figures == {
        "residuals.block": {"precision": "fp32", "gib": 1.0, "share": 0.5, "operation": "Softmax",
                            "module": "blocks.*.attention"},
        "residuals.compiled-step": {"precision": "fp32", "eager_gib": 4.0, "compiled_gib": 2.0},
        "memory.prediction-off": {"worst": 0.07, "peaks": 2, "over": 1},
        "memory.does-not-fit": {"mode": "step", "context": 256, "predicted_gib": 200.0},
        "checkpointing.best": {"peak_gib": 4.0, "without_gib": None},
    }  # fmt: skip
    assert found["residuals.compiled-step"].sentence.endswith("2.00 GiB (-50%).")
    assert "(context 128, precision fp32, checkpointing every-1)" in found["memory.prediction-off"].sentence
    assert found["precision.accumulation"].figures == {"fp16": 9.9531, "fp32_sum": 10.0021}


def test_dtypes_are_told_by_precision_of_the_rows_that_ran() -> None:
    def row(precision: str, module: str, **more: Any) -> DtypeRow:
        return DtypeRow(**{**CASE, "precision": precision}, module=module, **more)

    rows = [
        row("fp32", "(forward's result)", outputs=("fp32",)),
        row("bf16", "(forward's result)", outputs=("bf16", "fp32")),
        row("bf16", "(loss)", outputs=("fp32",)),
        row("bf16", "fc", parameters=("fp32",), gradients=("fp32",)),
        row("bf16", "norm", parameters=("bf16", "fp32")),
        row("fp16", "(loss)", outputs=("fp16",), status="failed"),
    ]
    plain, mixed = findings(rows)
    assert plain.figures == {"precision": "fp32", "result": "fp32", "loss": "–", "parameters": ("none",),
                             "gradients": ("none",)}  # fmt: skip
    assert mixed.figures == {"precision": "bf16", "result": "bf16, fp32", "loss": "fp32",
                             "parameters": ("bf16, fp32", "fp32"), "gradients": ("fp32",)}  # fmt: skip


def test_how_closely_is_told_with_how_many() -> None:
    every = [[PeakRow(context=n, mode="step", prediction_error=each) for n, each in enumerate(errors)]
             for errors in ((0.0,), (-0.0123, 0.0))]  # fmt: skip
    one, two = (findings(rows)[0].sentence for rows in every)
    assert one == "The plan predicts the measured peak to within 0.01%."
    assert two == "The plan predicts 2 measured peaks to within 1.23%."


def test_a_block_is_the_sum_of_all_its_tensors_whatever_the_order_of_rows() -> None:
    rows = [row for row in STUDY if isinstance(row, ResidualRow) and row.part == "first block"]
    (found,) = findings(rows[::-1])
    assert dict(found.figures)["gib"] == 1.0
    made = ResidualRow(**KEPT, part="first block", group="gradients", mib=256.0, formula_mib=128.0)
    (_, gradients) = findings([*rows, made])
    assert gradients.figures == {"precision": "fp32", "freed_gib": 1.0, "gib": 0.25, "formula_gib": 0.125}
    assert findings(rows[:1]) == findings(rows[1:]) == [], "without the sum, or the largest, nothing is said"


def test_a_compiled_step_is_told_beside_the_eager_one_alone() -> None:
    eager, compiled = (row for row in STUDY if isinstance(row, ResidualRow) and row.part == "step")
    assert findings([eager]) == findings([compiled]) == []
    assert "residuals.compiled-step" not in {each.id for each in findings([eager, replace(compiled, status="failed")])}
    assert [each.id for each in findings([compiled, eager])] == ["residuals.compiled-step"]


def test_a_compiled_block_is_set_beside_the_eager_one_under_each_precision() -> None:
    rows = [
        ResidualRow(precision=precision, compile=form, part="first block", group="all", mib=size)
        for precision, form, size in (("fp32", "off", 1024), ("fp32", "blocks", 512), ("bf16", "off", 256),
                                      ("bf16", "blocks", 128))
    ]  # fmt: skip
    found = findings(rows)
    assert [(each.id, *each.figures.values()) for each in found] == [
        ("residuals.compiled-block", "fp32", 1.0, 0.5),
        ("residuals.compiled-block", "bf16", 0.25, 0.125),
    ]
    assert found[1].sentence.startswith("Under bf16, compiled")
    assert findings(rows[:2])[0].sentence.startswith("Compiled")


def test_peaks_on_the_page_are_those_of_the_rows() -> None:
    shown = Page(render(STUDY)).values
    assert float(shown["peaks"]["0"]["peak_gib"]) == 10.0
    assert float(shown["peaks"]["1"]["predicted_gib"]) == 200.0
    assert float(shown["residuals-0"]["0"]["mib"]) == 512.0
    assert float(shown["checkpointing"]["0"]["peak_gib"]) == 4.0


def policy(name: str, peak: float | None, *times: float, limit: float | None = None, status: Status = "ok") -> Row:
    samples = {"step": times} if times else {}
    return CheckpointingRow(**CASE, checkpointing=name, peak_gib=peak, memory_gib=limit, samples=samples, status=status)


def best(rows: list[Row]) -> Finding:
    (found,) = findings(rows)
    assert found.topic == "checkpointing"
    return found


@pytest.mark.parametrize(
    ("times", "ratio", "cost"),
    [
        ((119.0, 119.5, 120.0, 120.0, 120.0, 121.0, 122.0), (1.20, 1.14, 1.26), " With it a step takes 1.20×"),
        ((96.0, 98.0, 100.0, 101.0, 102.0, 103.0, 120.0), (1.01, 0.92, 1.24), " With it these samples show no"),
        ((120.0, 121.0), (None, None, None), " Too few steps"),
        ((), (None, None, None), ""),
    ],
)
def test_what_the_best_policy_costs_has_its_interval(
    times: tuple[float, ...], ratio: tuple[float | None, ...], cost: str
) -> None:
    without = policy("none", 9.0, 99.0, 99.5, 100.0, 100.0, 100.0, 101.0, 102.0)
    found = best([without, policy("every-1", 4.0, *times)])
    names = ("time_ratio", "time_ratio_low", "time_ratio_high")
    told = tuple(found.figures.get(name) for name in names)
    assert tuple(each if each is None else round(float(str(each)), 2) for each in told) == ratio
    assert found.sentence.partition("9.00 GiB.")[2].startswith(cost)
    assert bool(cost) is not found.sentence.endswith("9.00 GiB.")


def test_a_study_without_a_policy_of_blocks_has_no_best() -> None:
    assert findings([policy("none", 9.0)]) == []
    assert findings([policy("none", 9.0), policy("every-1", None, status="out of memory")]) == []


def test_each_of_several_studies_is_named() -> None:
    rows = [
        CheckpointingRow(**CASE | {"precision": precision}, checkpointing="every-1", peak_gib=4.0, attention=attention)
        for precision, attention in (("fp32", "eager"), ("bf16", "sdpa"))
    ]
    names = [each.sentence.partition("A checkpoint")[0] for each in (*findings(rows), *findings(rows[:1]))]
    assert names == ["fp32, eager: ", "bf16, sdpa: ", ""]


def test_checkpointing_that_saves_nothing_is_not_the_best() -> None:
    assert best([policy("none", 65.62 / 1024), policy("every-1", 65.61 / 1024)]).id == "checkpointing.no-gain"


@pytest.mark.parametrize(
    ("limit", "id"),
    [(None, "best"), (8.0, "best"), (3.0, "best"), (9.0, "not-needed"), (10.0, "not-needed"), (2.0, "none-fits")],
)
def test_the_best_policy_is_the_best_for_the_memory_there_is(limit: float | None, id: str) -> None:
    peaks = {"none": 9.0, "every-1": 3.0, "selective": 2.5}
    found = best([policy(name, peak, limit=limit) for name, peak in peaks.items()])
    assert found.id == f"checkpointing.{id}"
    assert found.figures == {"peak_gib": 3.0, "without_gib": 9.0}


def test_a_step_that_ran_out_of_memory_without_is_not_compared() -> None:
    rows = [policy("none", None, limit=8.0, status="out of memory"), policy("every-1", 4.0)]
    found = best(rows)
    assert (found.id, found.figures) == ("checkpointing.best", {"peak_gib": 4.0, "without_gib": None})


def test_of_several_caches_the_largest_is_told() -> None:
    rows = [
        StepRow(mode="step", cache_gib=0.5),
        ChangeRow(change="x", cache_gib=3.0),
        PeakRow(**CASE, mode="step", cache_gib=2.0),
        CheckpointingRow(**CASE, checkpointing="none", cache_gib=0.25),
    ]
    others = [DtypeRow(**CASE, module="fc"), PeakRow(**CASE, mode="step"), StepRow(mode="step", cache_gib=0.0)]
    (found,) = cache_findings([*others, *rows])
    assert (found.id, dict(found.figures)) == ("memory.cache", {"gib": 3.0})
    sizes = [dict(each.figures)["gib"] for row in rows for each in cache_findings([*others, row])]
    assert sizes == [0.5, 3.0, 2.0, 0.25]
    assert cache_findings(others) == []


def test_dtypes_of_a_script_are_those_of_rows_without_a_precision_that_are_there() -> None:
    script = {**CASE, "precision": None}
    rows = [
        DtypeRow(**script, module="fc", parameters=("float32",), gradients=("float32",), outputs=("bfloat16",)),
        DtypeRow(**script, module="act", outputs=("float16",)),
        DtypeRow(**script, module="lost", outputs=("float64",), status="failed"),
        DtypeRow(**CASE, module="other", outputs=("int8",)),
    ]
    (told,) = script_dtypes(rows)
    assert told.figures == {"parameters": ("float32",), "gradients": ("float32",), "outputs": ("bfloat16", "float16")}
    assert [each.figures["precision"] for each in dtype_findings(rows)] == [CASE["precision"]]
    assert script_dtypes(rows[2:]) == []
