"""The page's sections on peaks, residuals, checkpointing and precision, and what is found in them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tests.report.page import Page
from trainstep.report.page import render
from trainstep.report.subjects import findings
from trainstep.report.subjects.memory import cache_findings
from trainstep.report.subjects.precision import dtype_findings, script_dtypes
from trainstep.rows import ChangeRow, DtypeRow, PeakRow, ResidualRow, StepRow
from trainstep.rows.records import Row

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
    PeakRow(**CASE, checkpointing="every-1", mode="step", peak_gib=4.0, prediction_error=0.07),
    DtypeRow(**CASE, module="fc", parameters=("fp32",), gradients=("fp32",), outputs=("fp16",)),
    DtypeRow(**CASE, module="(forward's result)", outputs=("fp16",)),
    DtypeRow(**CASE, module="(loss)", outputs=("fp32",)),
]  # fmt: skip


def test_every_kind_has_its_section() -> None:
    anchors = Page(render(STUDY)).anchors
    assert [each for each in anchors if each not in ("#summary", "#environment")] == [
        *("#peaks", "#residuals", "#dtypes")
    ]


def test_every_kind_has_its_finding() -> None:
    found = {each.id: each for each in findings(STUDY)}
    assert len(found) == len(findings(STUDY))
    assert {id for id in found if id.startswith("precision.")} == {"precision.dtypes"}
    figures = {id: dict(each.figures) for id, each in found.items() if not id.startswith("precision.")}
    assert figures == {
        "residuals.block": {"precision": "fp32", "gib": 1.0, "share": 0.5, "operation": "Softmax",
                            "module": "blocks.*.attention"},
        "residuals.compiled-step": {"precision": "fp32", "eager_gib": 4.0, "compiled_gib": 2.0},
        "memory.prediction-off": {"worst": 0.07, "peaks": 2, "over": 1},
        "memory.does-not-fit": {"mode": "step", "context": 256, "predicted_gib": 200.0},
    }  # fmt: skip
    assert found["residuals.compiled-step"].sentence.endswith("2.00 GiB (-50%).")
    assert "(context 128, precision fp32, checkpointing every-1)" in found["memory.prediction-off"].sentence


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
    made = ResidualRow(**KEPT, part="a block's backward", group="gradients", mib=256.0, formula_mib=128.0)
    change = ResidualRow(**KEPT, part="a block's backward", group="change of memory", mib=-768.0)
    (_, gradients) = findings([*rows, made, change])
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


def test_of_several_caches_the_largest_is_told() -> None:
    rows = [
        StepRow(mode="step", cache_gib=0.5),
        ChangeRow(change="x", cache_gib=3.0),
        PeakRow(**CASE, mode="step", cache_gib=2.0),
    ]
    others = [DtypeRow(**CASE, module="fc"), PeakRow(**CASE, mode="step"), StepRow(mode="step", cache_gib=0.0)]
    (found,) = cache_findings([*others, *rows])
    assert (found.id, dict(found.figures)) == ("memory.cache", {"gib": 3.0})
    sizes = [dict(each.figures)["gib"] for row in rows for each in cache_findings([*others, row])]
    assert sizes == [0.5, 3.0, 2.0]
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
