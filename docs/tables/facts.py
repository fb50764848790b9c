"""The few rows that README.md shows of each subject, and figures that prose quotes and no other table has."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tables import figure, one, results, where
from trainstep.kinds import (
    AttentionRow,
    CeilingRow,
    CheckpointingRow,
    CollectiveFitRow,
    CollectiveRow,
    FamilyRow,
    MemoryTimelineRow,
    OwnerRow,
    ParallelRow,
    PeakRow,
    PieceRow,
    ProfileRow,
    ResidualRow,
    RungRow,
    StepRow,
)
from trainstep.records import Row
from trainstep.report import columns
from trainstep.report.columns import Column
from trainstep.report.numbers import number
from trainstep.report.tables import Table, tabulate, text_table
from trainstep.stats import ratio_of_medians

Fact = tuple[str, str, str]  # What, the figure, and the file of docs/results/ that it is from
Facts = Callable[..., Fact]


def facts_of(name: str, kind: type[Row], **common: Any) -> Facts:
    """What makes facts of rows of one kind in docs/results/NAME.jsonl with these settings."""

    def fact(what: str, value: str, /, *, scale: float = 1, digits: int = 3, **case: Any) -> Fact:
        found = one(name, kind, **common, **case).values[value]
        return what, number(found * scale if isinstance(found, float) else found, digits), f"{name}.jsonl"

    return fact


def course() -> Table:
    """The figures of course.md, question by question."""
    return text_table("course-facts", "Figures of this page", ("figure", "value", "from"), list(_course()))


def _course() -> list[Fact]:
    step = facts_of("h200-step-sizes", StepRow, compile="off")
    compiled = facts_of("h200-step-sizes", StepRow, compile="blocks")
    found = [
        fact
        for size in ("small", "2.7B")
        for fact in (
            step(f"{size}, fp32: forward (ms)", "forward_ms", workload=size, precision="fp32"),
            step(f"{size}, fp32: backward (ms)", "backward_ms", workload=size, precision="fp32"),
        )
    ]
    for size in ("small", "2.7B"):
        warmup = facts_of(f"h200-warmup-{size}", StepRow)
        found += [
            warmup(f"{size}, fp32: mean without warm-up (ms)", "step_mean_ms", warmup=0),
            warmup(f"{size}, fp32: mean after five steps (ms)", "step_mean_ms", warmup=5),
            warmup(f"{size}, fp32: first step (ms)", "first_step_ms", warmup=0),
        ]
    found += [
        make(f"{size}, {precision}, {words}: step (ms)", "step_ms", workload=size, precision=precision)
        for make, words in ((step, "eager"), (compiled, "blocks compiled"))
        for size in ("small", "2.7B")
        for precision in ("fp32", "bf16")
    ]
    return [*found, *_kernels(), *_memory(), *_attention(), *_parallel()]


def _kernels() -> list[Fact]:
    found = []
    for size, context in (("2.7B", 512), ("small", 128)):
        profile = facts_of("h200-profile", ProfileRow, workload=size, context=context)
        at = f"{size}, {context} tokens, bf16"
        found += [
            profile(f"{at}: kernels of forward (ms)", "forward_kernels_ms"),
            profile(f"{at}: forward by the stopwatch (ms)", "forward_ms"),
            profile(f"{at}: step (ms)", "step_ms"),
            profile(f"{at}: profiled step (ms)", "profiled_step_ms"),
        ]
    for context in (128, 512, 1024):
        profile = facts_of("h200-profile", ProfileRow, workload="2.7B", context=context)
        found += [
            profile(f"2.7B, {context} tokens: matmul, of {words} (%)", f"matmul_share_{where_}", scale=100)
            for where_, words in (("forward", "forward"), ("step", "the step"))
        ]
    profile = facts_of("h200-profile", ProfileRow, workload="2.7B", context=512)
    family = facts_of("h200-profile", FamilyRow, workload="2.7B", context=512, phase="step")
    piece = facts_of("h200-profile", PieceRow, workload="2.7B", context=512, phase="forward")
    found += [
        profile("top kernel of forward, of forward (%)", "top_forward_kernel_share", scale=100),
        profile("top kernel of the step, of the step (%)", "top_step_kernel_share", scale=100),
        *(
            family(f"{name}, of the step (%)", "share", scale=100, family=name)
            for name in ("optimizer", "copy", "elementwise", "softmax", "normalisation")
        ),
        piece("softmax alone, forward (ms)", "main_ms", piece="softmax"),
        piece("the product Q·Kᵀ, forward (ms)", "main_ms", piece="scores"),
        piece("softmax moves (GB/s)", "main_gb_s", piece="softmax"),
    ]
    return found


def _memory() -> list[Fact]:
    peak = facts_of("h200-memory", PeakRow, workload="2.7B")
    found = [
        peak(
            f"{precision}, {context} tokens: peak of {'forward alone' if mode == 'forward' else 'a step'} (GiB)",
            "peak_gib",
            digits=4,
            precision=precision,
            context=context,
            mode=mode,
        )
        for precision in ("fp32", "bf16")
        for context in (128, 512)
        for mode in ("forward", "step")
    ]
    long = {"precision": "fp32", "context": 2048}
    timeline = facts_of("h200-allocations", MemoryTimelineRow, precision="bf16", optimizer="adamw-fused")
    owners = [row for row in results("h200-allocations", OwnerRow) if row.precision == "bf16" and _is_total(row)]
    residual = facts_of("h200-residuals", ResidualRow, compile="off")
    policy = facts_of("h200-checkpointing", CheckpointingRow)
    return [
        *found,
        peak("fp32, 2,048 tokens: peak of forward alone (GiB)", "peak_gib", digits=4, mode="forward", **long),
        peak("fp32, 2,048 tokens: predicted peak of a step (GiB)", "predicted_gib", digits=4, mode="step", **long),
        peak(
            "forward alone, fp32, 512 tokens: at rest (GiB)",
            "at_rest_gib",
            digits=4,
            mode="forward",
            precision="fp32",
            context=512,
        ),
        timeline("a step in bf16: peak by the timeline (GiB)", "peak_gib", digits=4),
        *(
            (f"of it {row.owner} (%)", number(100 * (row.share or 0)), "h200-allocations.jsonl")
            for row in owners
            if row.optimizer == "adamw-fused" and row.owner in ("optimizer state", "activations", "parameters")
        ),
        *(
            residual(f"one block keeps, {precision} (MiB)", "mib", precision=precision, part="first block", group="all")
            for precision in ("fp32", "bf16")
        ),
        residual("the residual stream's tensor, fp32 (MiB)", "mib", precision="fp32", part="residual stream"),
        *(
            policy(f"checkpointing {name}: {words}", value, digits=digits, checkpointing=name)
            for name in ("none", "every-1", "selective")
            for words, value, digits in (("peak (GiB)", "peak_gib", 4), ("step (ms)", "step_ms", 3))
        ),
    ]


def _is_total(row: OwnerRow) -> bool:
    """Whether the row is an owner's sum, not a part of it."""
    return (row.module, row.operation, row.phase, row.line) == (None, None, None, None)


def _attention() -> list[Fact]:
    naive = facts_of("h200-attention-naive", AttentionRow, head_dim=64)
    flash = facts_of("h200-attention-flash", AttentionRow, head_dim=64, seq=65536, dtype="bf16")
    peers = facts_of("h200-attention-peers", AttentionRow, seq=16384, head_dim=64)
    return [
        *(
            naive(f"{impl}, head_dim 64, {seq:,} tokens: {words}", value, impl=impl, seq=seq)
            for impl in ("eager", "eager-compiled")
            for seq in (256, 16384)
            for words, value in (("forward and backward (ms)", "both_ms"), ("peak (GiB)", "peak_gib"))
        ),
        *(
            flash(f"{impl}, one head, 65,536 tokens: {words}", value, impl=impl)
            for impl in ("eager", "flash-triton")
            for words, value in (
                ("forward (ms)", "forward_ms"),
                ("backward (ms)", "backward_ms"),
                ("peak (GiB)", "peak_gib"),
            )
        ),
        *(
            peers(f"{impl}, the leaderboard's case (ms)", "both_ms", impl=impl)
            for impl in ("flash-triton", "sdpa-flash", "sdpa-cudnn", "flex")
        ),
    ]


def _parallel() -> list[Fact]:
    two = facts_of("h200-collectives", CollectiveRow, collective="all-reduce")
    four = facts_of("h200-collectives-4gpus", CollectiveRow, collective="all-reduce")
    gloo = facts_of("cpu-collectives", CollectiveRow, collective="all-reduce", size_mb=100, dtype="fp32")
    fit = facts_of("h200-collectives", CollectiveFitRow, collective="all-reduce")
    row = facts_of("h200-parallel", ParallelRow)
    found = [two(f"all-reduce, {mb:,} MB, 2 GPUs (ms)", "time_ms", size_mb=mb) for mb in (1, 10, 100, 1000)]
    found += [two(f"the same, {mb:,} MB: bus bandwidth (GB/s)", "bus_gb_s", size_mb=mb) for mb in (1, 1000)]
    found += [four("all-reduce, 1,000 MB, 4 GPUs (ms)", "time_ms", size_mb=1000)]
    found += [gloo(f"all-reduce by Gloo, 100 MB, {n} processes (ms)", "time_ms", world_size=n) for n in (2, 4, 6)]
    found += [fit("all-reduce: overhead of a call (µs)", "overhead_us"), fit("its bandwidth (GB/s)", "bus_gb_s")]
    wanted: tuple[tuple[str, str, int, tuple[str, ...]], ...] = (
        ("step (ms)", "step_ms", 3, SCHEMES),
        ("after backward (ms)", "communication_ms", 3, ("naive", "flat", "overlapped")),
        ("backward (ms)", "backward_ms", 3, ("flat", "overlapped", "bucketed-25", "sharded-optimizer")),
        ("optimizer (ms)", "optimizer_ms", 3, ("bucketed-25", "sharded-optimizer")),
        ("sent by a rank (GiB)", "sent_gib", 4, ("naive", "fsdp")),
        ("at the start (GiB)", "start_gib", 4, ("bucketed-25", "sharded-optimizer")),
        ("before the optimizer's step (GiB)", "before_step_gib", 4, ("bucketed-25", "sharded-optimizer")),
        ("after it (GiB)", "after_step_gib", 4, ("bucketed-25", "sharded-optimizer")),
        ("state (GiB)", "before_step_optimizer_state_gib", 4, ("bucketed-25", "sharded-optimizer")),
        ("peak (GiB)", "peak_gib", 4, ("bucketed-25", "fsdp", "torch-fsdp2")),
    )
    return found + [
        row(f"{scheme}: {words}", value, digits=digits, scheme=scheme)
        for words, value, digits, schemes in wanted
        for scheme in schemes
    ]


SCHEMES = (
    *("single", "naive", "flat", "overlapped", "bucketed-1", "bucketed-10", "bucketed-100", "bucketed-1000"),
    *("bucketed-25", "torch-ddp", "sharded-optimizer", "torch-zero", "fsdp", "torch-fsdp2"),
)
PAIRS = (
    ("bucketed-25", "torch-ddp"),
    ("bucketed-100", "torch-ddp"),
    ("bucketed-1000", "torch-ddp"),
    ("sharded-optimizer", "torch-zero"),
    ("sharded-optimizer-1000", "torch-zero"),
    ("fsdp", "torch-fsdp2"),
)  # Our schemes and what they replace


def parallel_ratios() -> Table:
    """Ours over torch's: time with its interval, and peak memory."""
    cells = []
    for name, gpus in (("h200-parallel", 2), ("h200-parallel-4gpus", 4)):
        rows = {row.scheme: row for row in results(name, ParallelRow)}
        for ours, theirs in PAIRS:
            if ours not in rows or theirs not in rows:
                continue
            time = ratio_of_medians(rows[ours].samples["step"], rows[theirs].samples["step"])
            low, high = (time.interval.low, time.interval.high) if time.interval else (None, None)
            peak = (rows[ours].peak_gib or 0) / (rows[theirs].peak_gib or 1)
            cells.append((str(gpus), ours, theirs, f"{time.value:.3f} [{low:.3f}–{high:.3f}]", f"{peak:.3f}"))
    wanted = ("GPUs", "ours", "torch's", "time, ours over torch's [95 %]", "peak memory, ours over torch's")
    return text_table(
        "parallel-ratios", f"Each pair in one run; {where(results('h200-parallel', ParallelRow))}", wanted, cells
    )


def profile() -> Table:
    """The figures of profile.md that its other tables lack."""
    copy = facts_of("h200-profile-2.7B", CeilingRow, operation="copy")
    product = facts_of("h200-profile-2.7B", CeilingRow, operation="matmul", precision="bf16")
    step = facts_of("h200-profile", ProfileRow, workload="2.7B", context=512)
    facts = [
        copy("a large copy (GB/s)", "gb_s", digits=4),
        product("a large product in bf16 (TFLOP/s)", "tflops"),
        step("2.7B, 512 tokens: kernels of a step (ms)", "kernels_ms"),
        step("of it the copies back to float32 (ms)", "top_step_kernel_ms"),
    ]
    return text_table("profile-facts", "Further figures of this page", ("figure", "value", "from"), facts)


def ladder() -> Table:
    """Where the ladder of each size begins and where it ends."""
    cells = []
    for size in ("small", "large", "2.7B"):
        kept = [row for row in results(f"h200-analyze-{size}", RungRow) if row.kept]
        first, last = kept[0], kept[-1]
        low, high = (figure(last, f"speedup_{end}") for end in ("low", "high"))
        times, peaks = ([number(figure(row, name)) for row in (first, last)] for name in ("step_ms", "peak_gib"))
        error = f"{figure(last, 'gradient_error'):.2g} of {figure(last, 'error_budget'):.2g}"
        cells.append((size, *times, f"{figure(last, 'speedup'):.2f}× [{low:.2f}–{high:.2f}]", *peaks, error))
    wanted = (
        *("size", "fp32, eager (ms)", "top of the ladder (ms)", "speed-up [95 %]"),
        *("peak before (GiB)", "after (GiB)", "gradients off by, of allowed"),
    )
    return text_table("headline-ladder", f"One step, batch 4, context 512; {where([last])}", wanted, tuple(cells))


def attention() -> Table:
    """Our kernels beside PyTorch's on three shapes."""
    rows = results("h200-attention-peers", AttentionRow)
    shapes = {(16384, 64): "1×16×16,384×64", (4096, 128): "4×16×4,096×128", (32768, 128): "1×32×32,768×128"}
    found = {(row.seq, row.head_dim, row.impl): number(row.values["both_ms"]) for row in rows if row.causal == "yes"}
    impls = ("flash-triton", "sdpa-flash", "sdpa-cudnn", "flex")
    cells = tuple((name, *(found[(*shape, impl)] for impl in impls)) for shape, name in shapes.items())
    caption = f"Causal bf16 attention, forward and backward (ms); {where(rows)}"
    wanted = ("batch×heads×length×head_dim", "ours", "SDPA FlashAttention-2", "SDPA cuDNN", "FlexAttention, compiled")
    return text_table("headline-attention", caption, wanted, cells)


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
    rows = [one("h200-parallel", ParallelRow, scheme=name) for name in names]
    wanted = (
        Column("scheme", lambda row: names[str(row.case["scheme"])]),
        *columns.values({"step (ms)": "step_ms", "beyond one GPU's (ms)": "exposed_ms"}),
        *columns.values({"sent by a rank (GiB)": "sent_gib", "peak (GiB)": "peak_gib"}),
    )
    return tabulate("headline-parallel", f"2.7B on two GPUs, bf16 autocast; {where(rows)}", wanted, rows)


def memory() -> Table:
    """What checkpointing saves and costs."""
    rows = [
        one("h200-checkpointing", CheckpointingRow, checkpointing=name) for name in ("none", "selective", "every-1")
    ]
    wanted = (
        columns.case("checkpointing", "checkpointing"),
        *columns.values({"peak, predicted (GiB)": "predicted_gib", "peak, measured (GiB)": "peak_gib"}, digits=4),
        columns.value("step (ms)", "step_ms"),
    )
    return tabulate("headline-memory", f"2.7B, context 2,048, bf16, fused attention; {where(rows)}", wanted, rows)


TABLES: Mapping[str, Callable[[], Table]] = {
    "course-facts": course,
    "profile-facts": profile,
    "parallel-ratios": parallel_ratios,
    "headline-ladder": ladder,
    "headline-attention": attention,
    "headline-parallel": parallel,
    "headline-memory": memory,
}
