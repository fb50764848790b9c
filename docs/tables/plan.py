"""Tables of predictions for docs/theory.md: beside what was measured, and the published exercise's answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from statistics import median

from tables import RESULTS
from tables.exercise import FSDP_RANKS, TENSOR_RANKS, XXL, alternate_seconds, compute_bound_tokens
from trainstep.kinds import CheckpointingRow, ParallelRow, PeakRow, PlanCheckRow, RungRow, StepRow
from trainstep.plan.communication import Link, collective_seconds
from trainstep.plan.machine import (
    ATTAINABLE,
    GIB,
    INTERFERENCE,
    LINK_OVERHEAD_S,
    NETWORK_OVERHEAD_S,
    OPTIMIZER_FRACTION,
)
from trainstep.plan.measured import calibrated, checked
from trainstep.plan.roofline import FUSED_ATTENTION, TILES
from trainstep.plan.strategies import RESERVED_BYTES
from trainstep.records import Row, of_kind, read_records
from trainstep.report import subjects
from trainstep.report.numbers import number
from trainstep.report.tables import Table, make_table, text_table

CALIBRATION = ("h200-analyze-small", "h200-analyze-large")
CHECKED: Mapping[str, tuple[type[Row], ...]] = {
    "h200-step-sizes": (StepRow,),
    "h200-analyze-2.7B": (RungRow,),
    "h200-memory": (PeakRow,),
    "h200-checkpointing": (CheckpointingRow,),
    "h200-parallel": (ParallelRow,),
    "h200-parallel-4gpus": (ParallelRow,),
}  # Files whose rows of these kinds are predicted; those that are not there yet are left out


def predictions() -> dict[str, list[Row]]:
    """File → its measured rows beside predictions from `CALIBRATION`."""
    rates = [row for name in CALIBRATION for row in read_records(RESULTS / f"{name}.jsonl")]
    rates += [row for path in sorted(RESULTS.glob("h200-collectives*.jsonl")) for row in read_records(path)]
    machine = calibrated(rates)
    found = {}
    for name, kinds in CHECKED.items():
        if (path := RESULTS / f"{name}.jsonl").exists():
            rows = read_records(path)
            found[name] = list(checked([row for kind in kinds for row in of_kind(rows, kind)], machine))
    return found


def plan_check() -> Table:
    """Every step and peak that was measured and can be predicted."""
    return make_table(subjects.TABLES[PlanCheckRow], [row for rows in predictions().values() for row in rows])


def plan_errors() -> Table:
    """How far predictions are off, file by file."""
    cells = []
    for name, rows in predictions().items():
        line = [name, number(len(rows))]
        for error in ("time_error", "memory_error"):
            sizes = [abs(value) for row in rows if isinstance(value := row.values.get(error), float)]
            line += [number(len(sizes)), *(f"{100 * part:.1f}" if sizes else "–" for part in _spread(sizes))]
        cells.append(tuple(line))
    columns = (
        *("results", "rows", "times", "median error (%)", "worst (%)"),
        *("peaks", "their median error (%)", "their worst (%)"),
    )
    return text_table("plan-errors", "Predicted against measured", columns, tuple(cells))


def _spread(sizes: list[float]) -> tuple[float, float]:
    return (median(sizes), max(sizes)) if sizes else (0.0, 0.0)


def plan_exercise() -> Table:
    """Memory, devices and shards of the exercise, by tokens in flight."""
    rows = []
    for tokens in (0, 1024, 2048, 4096, 8192):
        activations = tokens * XXL.activation_bytes_per_token
        shards = XXL.shards_to_fit(95e9, tokens)
        rows.append(
            (
                f"{tokens:,}",
                f"{XXL.static_bytes / 1e9:,.1f}",
                f"{activations / 1e9:,.1f}",
                number(XXL.devices(80e9, tokens)),
                number(shards),
                f"{XXL.bytes_per_device(shards, tokens) / 1e9:.1f}",
            )
        )
    columns = (
        *("tokens", "weights, gradients, moments (GB)", "activations (GB)", "devices of 80 GB"),
        *("shards to fit 95 GB", "then a device has (GB)"),
    )
    caption = f"{XXL.num_blocks} blocks, d_model {XXL.d_model:,}, d_ff {XXL.d_ff:,}: {XXL.parameters:,} parameters"
    return text_table("plan-exercise", caption, columns, tuple(rows))


def plan_mesh() -> Table:
    """The batch from which the exercise's mesh is limited by computation."""
    gpus = FSDP_RANKS * TENSOR_RANKS
    rows = []
    for name, overlapped in (("overlapped", True), ("one after the other", False)):
        tokens = compute_bound_tokens(overlapped=overlapped)
        rows.append((name, f"{tokens:.1f}", f"{tokens * gpus:,.0f}"))
    columns = ("the two axes communicate", "tokens per device", f"tokens on {gpus} devices")
    return text_table("plan-mesh", f"{FSDP_RANKS} × {TENSOR_RANKS}, forward pass", columns, tuple(rows))


def plan_rings() -> Table:
    """An all-reduce of 1 GB at 300 GB/s per link, three ways."""
    rows = []
    for ranks in (2, 4, 8, 64):
        ring = collective_seconds("all-reduce", 10**9, ranks, Link(0.0, 3e11))
        others = (alternate_seconds(way, 1e9, ranks, 3e11) for way in ("all to all", "reduce, then broadcast"))
        rows.append((number(ranks), *(number(1e3 * seconds) for seconds in (ring, *others))))
    columns = ("ranks", "in chunks (ms)", "all to all (ms)", "reduce, then broadcast (ms)")
    return text_table("plan-rings", "Computed: 1 GB, 300 GB/s on each link, calls free", columns, tuple(rows))


def plan_rates() -> Table:
    """What a second is computed from, and where each part comes from without a calibration."""
    products = [ATTAINABLE[precision] for precision in ("fp32", "tf32", "bf16")]
    wide, fp32 = (TILES[name] for name in ("wide", "fp32"))
    slower = [speed for _, _, speed in (*wide, *fp32) if speed < 1]
    rows = (
        (
            "rate of products, per precision",
            f"ceiling rows of a calibration; else {min(products)} to {max(products)} of the datasheet, as on an H200",
        ),
        ("rate of a copy", f"the same; else {ATTAINABLE['copy']} of the datasheet"),
        (
            "the optimizer's fraction of a copy's rate",
            f"the best step of the calibration; else {OPTIMIZER_FRACTION['adamw-foreach']} (foreach), "
            f"{OPTIMIZER_FRACTION['adamw-fused']} (fused)",
        ),
        (
            "launching a block, forward and backward",
            "steps of the calibration whose forward was bound by launching; else not counted",
        ),
        (
            "bytes between products",
            "counted by operator, see plan/roofline.py; compiled code: one pass per fused region",
        ),
        (
            "tiles and the speed of smaller ones",
            f"assumed: {wide[0][0]} × {wide[0][1]} (16-bit, TF32), {fp32[0][0]} × {fp32[0][1]} (float32), and smaller "
            f"at {min(slower)} to {max(slower)}",
        ),
        ("fused attention", f"{FUSED_ATTENTION} of the rate of products, assumed from long sequences on an H200"),
        (
            "links",
            f"collective fit rows of a calibration; else {ATTAINABLE['link']} of the datasheet's NVLink or PCIe and "
            f"{LINK_OVERHEAD_S * 1e6:.0f} µs a call",
        ),
        ("slowed by hidden communication", f"{INTERFERENCE} of its time, from data parallel training on two H200s"),
        (
            "memory for tensors",
            "what the driver of a calibration's device reports, else the device's in hardware.py; less "
            f"{RESERVED_BYTES / GIB:.0f} GiB for the CUDA context and the libraries, an assumption",
        ),
        ("network", f"--network-gb-s; {NETWORK_OVERHEAD_S * 1e6:.0f} µs a call. Nothing of it was measured"),
    )
    return text_table("plan-rates", "Rates that seconds are computed from", ("part", "comes from"), rows)


TABLES: Mapping[str, Callable[[], Table]] = {
    "plan-check": plan_check,
    "plan-errors": plan_errors,
    "plan-exercise": plan_exercise,
    "plan-mesh": plan_mesh,
    "plan-rings": plan_rings,
    "plan-rates": plan_rates,
}
