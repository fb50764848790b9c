import pytest

from trainstep.base.config import ModelConfig, StepConfig
from trainstep.bench.dtypes import LOSS, RESULT, accumulation_records, alike, dtype_records
from trainstep.measure.dtypes import ModuleDtypes
from trainstep.report.subjects import make_tables
from trainstep.rows import DtypeRow, row_of
from trainstep.step.workload import builtin_source

TOY = builtin_source("toy", ModelConfig(vocab_size=256, d_model=16, d_ff=32, num_layers=2, num_heads=2))


def rows(*precisions, **settings):
    configs = [
        StepConfig(batch=1, context=8, device="cpu", precision=precision, **settings) for precision in precisions
    ]
    return {(row.case["precision"], row.case["module"]): row for row in dtype_records(TOY, configs)}


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_our_model_under_autocast(precision):
    found = rows(precision)
    query = found[precision, "blocks.*.attention.query"].values
    assert query == {
        "class_name": "Linear",
        "modules": 2,
        "parameters": ("fp32",),
        "inputs": ("fp32",),
        "outputs": (precision,),
        "gradients": ("fp32",),
    }
    assert found[precision, "blocks.*.attention.output"].values["inputs"] == (precision,)
    assert found[precision, "blocks.*"].values["outputs"] == ("fp32",), "the residual stream"
    assert found[precision, RESULT].values == {"outputs": (precision,)}
    assert found[precision, LOSS].values == {"outputs": ("fp32",)}
    assert found[precision, "(root)"].values["inputs"] == ("int64",)


def test_pure_bf16_and_full_precision():
    found = rows("fp32", "bf16-pure")
    assert found["fp32", RESULT].values == {"outputs": ("fp32",)}
    head = found["bf16-pure", "head"].values
    assert (head["parameters"], head["gradients"], head["outputs"]) == (("bf16",),) * 3


def test_what_cannot_be_watched_is_a_row():
    (unsupported,) = rows("tf32").values()
    assert (unsupported.status, unsupported.case["module"]) == ("unsupported", "all")
    (compiled,) = rows("fp32", compile="model").values()
    assert compiled.status == "unsupported"
    assert "--compile off" in compiled.reason


def test_only_modules_that_are_alike_share_a_row():
    def module(name, outputs="fp32"):
        return ModuleDtypes(name, "Linear", (), (), (outputs,), ())

    found = alike([module("h.0.fc1"), module("h.1.fc1"), module("h.2.fc1", "bf16"), module("h.0.fc2"), module("3")])
    assert [(group.name, count) for group, count in found] == [
        ("h.*.fc1", 2), ("h.2.fc1", 1), ("h.0.fc2", 1), ("3", 1),
    ]  # fmt: skip


def test_the_tables():
    (table,) = make_tables(list(accumulation_records()))
    assert [row[2] for row in table.texts()] == ["10.0001", "9.9531", "10.0021", "10.0021"]
    (table,) = make_tables(list(rows("bf16").values()))
    assert ("head", "Linear", "1", "fp32", "fp32", "bf16", "fp32") in table.texts()


def test_dtypes_that_earlier_versions_joined_are_several():
    case = {"module": "head", "workload": "toy"}
    row = row_of("dtype", case, {"class": "Linear", "inputs": "fp32, bf16", "outputs": "bf16", "gradients": None})
    assert row == DtypeRow(**case, class_name="Linear", inputs=("fp32", "bf16"), outputs=("bf16",))
