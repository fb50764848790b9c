"""The few rows that README.md shows of each subject."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from tables.source import figure, one, results, where
from trainstep.records import Row
from trainstep.report.columns import Column, case_column, value_column
from trainstep.report.numbers import number
from trainstep.report.tables import Table, tabulate, text_table


def ladder() -> Table:
    """Where the ladder of each size begins and where it ends."""
    cells = []
    for size in ("small", "large", "2.7B"):
        kept = [row for row in results(f"h200-analyze-{size}", "rung") if row.values["kept"]]
        first, last = kept[0], kept[-1]
        low, high = (figure(last, f"speedup_{end}") for end in ("low", "high"))
        cells.append(
            (
                size,
                *(number(figure(row, "step_ms")) for row in (first, last)),
                f"{figure(last, 'speedup'):.2f}× [{low:.2f}–{high:.2f}]",
                *(number(figure(row, "peak_gib")) for row in (first, last)),
                f"{figure(last, 'gradient_error'):.2g} of {figure(last, 'error_budget'):.2g}",
            )
        )
    columns = (
        *("size", "fp32, eager (ms)", "top of the ladder (ms)", "speed-up [95 %]"),
        *("peak before (GiB)", "after (GiB)", "gradients off by, of allowed"),
    )
    return text_table("headline-ladder", f"One step, batch 4, context 512; {where([last])}", columns, tuple(cells))


def attention() -> Table:
    """Our kernels beside PyTorch's on three shapes."""
    rows = results("h200-attention-peers", "attention")
    shapes = {(16384, 64): "1×16×16,384×64", (4096, 128): "4×16×4,096×128", (32768, 128): "1×32×32,768×128"}
    found = {
        (int(row.case["seq"] or 0), int(row.case["head_dim"] or 0), str(row.case["impl"])): number(
            figure(row, "both_ms")
        )
        for row in rows
        if row.case["causal"] == "yes"
    }
    impls = ("flash-triton", "sdpa-flash", "sdpa-cudnn", "flex")
    cells = tuple((name, *(found[(*shape, impl)] for impl in impls)) for shape, name in shapes.items())
    caption = f"Causal bf16 attention, forward and backward (ms); {where(rows)}"
    columns = ("batch×heads×length×head_dim", "ours", "SDPA FlashAttention-2", "SDPA cuDNN", "FlexAttention, compiled")
    return text_table("headline-attention", caption, columns, cells)


def parallel() -> Table:
    """Our schemes beside PyTorch's."""
    names = {
        "single": "one GPU, no communication",
        "torch-ddp": "DistributedDataParallel, torch's",
        "bucketed-25": "DistributedDataParallel, ours",
        "torch-zero": "sharded optimizer, torch's",
        "sharded-optimizer": "sharded optimizer, ours",
        "torch-fsdp2": "fully sharded, torch's FSDP2",
        "fsdp": "fully sharded, ours",
    }
    rows = [one("h200-parallel", "parallel", scheme=name) for name in names]
    columns = (
        Column("scheme", lambda row: names[str(row.case["scheme"])]),
        value_column("step (ms)", "step_ms"),
        value_column("beyond one GPU's (ms)", "exposed_ms"),
        value_column("sent by a rank (GiB)", "sent_gib"),
        value_column("peak (GiB)", "peak_gib"),
    )
    return tabulate("headline-parallel", f"2.7B on two GPUs, bf16 autocast; {where(rows)}", columns, rows)


def memory() -> Table:
    """What checkpointing saves and costs."""
    rows: list[Row] = [
        one("h200-checkpointing", "checkpointing", checkpointing=name) for name in ("none", "selective", "every-1")
    ]
    columns = (
        case_column("checkpointing", "checkpointing"),
        value_column("peak, predicted (GiB)", "predicted_gib", digits=4),
        value_column("peak, measured (GiB)", "peak_gib", digits=4),
        value_column("step (ms)", "step_ms"),
    )
    return tabulate("headline-memory", f"2.7B, context 2,048, bf16, fused attention; {where(rows)}", columns, rows)


TABLES: Mapping[str, Callable[[], Table]] = {
    "headline-ladder": ladder,
    "headline-attention": attention,
    "headline-parallel": parallel,
    "headline-memory": memory,
}
