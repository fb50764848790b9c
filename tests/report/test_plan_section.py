"""What a plan looks like: sentences, charts, and strategies that do not fit."""

from trainstep.report.sections.plan import plan

from trainstep.kinds import KINDS, row_of
from trainstep.report.findings import findings
from trainstep.report.html import render
from trainstep.report.subjects import TABLES
from trainstep.report.tables import make_table

CASE = {
    "workload": "big", "device": "NVIDIA H200", "batch": 4, "context": 512, "precision": "bf16", "compile": "off",
    "attention": "sdpa", "optimizer": "adamw-fused",
}  # fmt: skip


def strategy(name, *, fits, tokens_per_s=1e6, peak_gib=150.0, smallest_gpus=None, room=139.0):
    values = {
        "fits": fits, "tokens_per_s": tokens_per_s, "utilisation": 0.4, "step_ms": 51.3, "limit": "communication",
        "peak_gib": peak_gib, "smallest_gpus": smallest_gpus, "tensors_gib": room,
    }  # fmt: skip
    case = {**CASE, "checkpointing": "none", "strategy": name, "gpus": 8, "tensor_parallel": 1}
    return row_of("plan", case, values)


def scaling(gpus, **fits):
    values = {}
    for name, fit in fits.items():
        values |= {f"{name}_tokens_per_s": 1000.0 * gpus, f"{name}_fits": fit}
    return row_of("plan scaling", {**CASE, "gpus": gpus}, values)


MACHINE = row_of("plan machine", {"workload": "big", "device": "NVIDIA H200"}, {"basis": "a datasheet"})


def sentences(*records):
    return [found.sentence for found in findings(records) if found.topic == "plan"]


def test_the_fastest_that_fits_is_named():
    told = sentences(MACHINE, strategy("ddp", fits=False, tokens_per_s=9e6), strategy("fsdp", fits=True))
    assert told == [
        "Predicted: of what fits, fsdp is fastest on 8 GPUs, with 1,000,000 tokens/s at 40% of the peak and 51.3 ms a "
        "step. What limits it: communication.",
        "Predictions stand on this: a datasheet.",
    ]


def test_where_nothing_fits():
    fsdp = strategy("fsdp", fits=False, peak_gib=12.34, smallest_gpus=64, room=10.0)
    (told,) = sentences(strategy("ddp", fits=False), fsdp)
    assert told == (
        "Predicted: nothing fits. fsdp needs least, 12.34 GiB on each GPU, which has room for 10.00 GiB of tensors. "
        "With fsdp it takes 64 GPUs."
    )
    (told,) = sentences(strategy("ddp", fits=False))
    assert told.endswith("checkpoint activations, or take a smaller batch.")
    assert sentences(MACHINE) == []


def test_charts_say_that_they_predict_and_leave_out_what_does_not_fit():
    rows = [MACHINE, *(scaling(gpus, ddp=gpus > 2, fsdp=False) for gpus in (2, 4, 8))]
    section = plan(rows)
    charts = section.blocks[0].charts
    assert all("prediction" in chart.title for chart in charts)
    assert [name for _, name in charts[0].legend] == ["ddp", "perfect scaling"]
    assert "a datasheet" in section.lead
    table = make_table(TABLES[KINDS["plan scaling"]], rows[1:])
    assert [row[table.columns.index("ddp")] for row in table.rows] == ["does not fit", "4,000", "8,000"]
    assert "predicted, not measured" in render(rows)
    nothing = plan([scaling(gpus, ddp=False) for gpus in (2, 4)])
    assert not [block for block in nothing.blocks if block.kind == "charts"]
    assert plan([]) is None
