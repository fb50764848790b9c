"""What docs/theory.md says about its predictions: where they miss, on one GPU and on several."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from tables.plan import predictions
from tables.source import figure, one
from texts.wording import percent
from trainstep.plan.machine import INTERFERENCE
from trainstep.records import Row
from trainstep.report.finding import listed
from trainstep.report.numbers import number


def predicted(name: str) -> list[Row]:
    """The rows with this figure, as it was measured and as it is predicted."""
    return [row for rows in predictions().values() for row in rows if isinstance(row.values.get(name), float)]


def missing_mib(row: Row) -> float:
    """By how much the peak is predicted too small."""
    return 1024 * (figure(row, "peak_gib") - figure(row, "predicted_gib"))


def misses() -> str:
    """The worst predictions of steps and of memory on one GPU, and what is known of their causes."""
    timed = [row for row in predicted("time_error") if row.case["gpus"] == 1]
    timed.sort(key=lambda row: -abs(figure(row, "time_error")))
    assert [(row.case["workload"], row.case["precision"], row.case["compile"]) for row in timed[:2]] == [
        ("xl", "bf16", "off"),
        ("large", "bf16", "off"),
    ]
    launching = []
    for row in timed[:2]:
        step = one("h200-step-sizes", "step", workload=row.case["workload"], precision="bf16", compile="off")
        launching.append(figure(step, "forward_issue_ms") / figure(step, "forward_ms"))
    others = {
        "long contexts with fused attention": [row for row in timed if row.case.get("context") == 2048],
        "TF32": [row for row in timed if row.case["precision"] == "tf32"],
    }
    errors = {name: [figure(row, "time_error") for row in rows] for name, rows in others.items()}
    assert all(error < 0 for each in errors.values() for error in each)
    told = listed([f"{name} (by up to {percent(-min(each))})" for name, each in errors.items()])
    held = [row for row in predicted("memory_error") if row.case["gpus"] == 1]
    assert all(missing_mib(row) > 0 for row in held)
    most = max(held, key=lambda row: -figure(row, "memory_error"))
    assert most.case["workload"] == "small"
    shorter = [percent(-figure(row, "time_error")) for row in timed[:2]]
    return (
        f"**Misses.** The worst are eager steps in bf16 of `xl` and `large`, which are predicted {shorter[0]} and "
        f"{shorter[1]} too short. Launching takes {percent(launching[0])} and {percent(launching[1])} of their "
        "forward; probably device and host take turns at setting the pace, where the model takes the slower of the two "
        f"for the whole phase. Predicted too fast as well are {told}. Both rest on the rates of products, which are "
        "those of large square ones.\n\n"
        "On one GPU memory is always predicted too small, by "
        f"{number(min(map(missing_mib, held)))} to {number(max(map(missing_mib, held)))} MiB: by what the CUDA "
        "libraries allocate for themselves, and by what the allocator's blocks have left over. That weighs most in "
        f"`small` ({percent(-figure(most, 'memory_error'))}). Compiled code has no memory formula; `trainstep plan` "
        "shows that of eager code for it, which is more."
    )


def several() -> str:
    """Two and four GPUs: one constant, and the rows that check it."""
    rows = [row for row in predicted("time_error") if row.case["gpus"] != 1]
    source = [row for row in rows if (row.case["scheme"], row.case["gpus"]) == ("bucketed-25", 2)]
    assert len(source) == 1
    worst = max(abs(figure(row, "time_error")) for row in rows if row not in source)
    by_transport = {
        scheme: [figure(row, "time_error") for row in rows if row.case["scheme"] == scheme]
        for scheme in ("fsdp", "fsdp-collectives")
    }
    assert min(by_transport["fsdp"]) > 0 > max(by_transport["fsdp-collectives"])
    copies, collectives = (listed([percent(abs(error)) for error in errors]) for errors in by_transport.values())
    memory = [figure(row, "memory_error") for row in predicted("memory_error") if row.case["gpus"] != 1]
    return (
        "**Two and four GPUs.** NCCL's kernels take multiprocessors and bandwidth from the computation beside them, so "
        f"each second of hidden communication is taken to cost {INTERFERENCE} seconds. That figure is from one row, "
        f"data parallel training on two GPUs; all others check it, and none is off by more than {percent(worst)}. "
        "Memory is within "
        f"{percent(max(map(abs, memory)))}.\n\n"
        "FSDP has two rows each on two and on four GPUs, its two transports, which the plan does not tell apart. "
        f"Copies disturb computation less than the figure says, and are predicted {copies} too slow. Collectives "
        f"disturb it more, and are predicted {collectives} too fast."
    )


TEXTS: Mapping[str, Callable[[], str]] = {
    "theory-misses": misses,
    "theory-several": several,
}
