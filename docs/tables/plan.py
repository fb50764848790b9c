"""Tables of predictions for notebook/theory.md: beside what was measured, and two worked examples.

The exercise (CS336 2025, assignment 2, `communication_accounting`), worked: 126 blocks of two matrices.

A block is d_model × d_ff and d_ff × d_model, nothing else: no attention, embedding, head or activation function.
Master weights, accumulated gradients and AdamW's two moments are float32; activations and what travels are bfloat16;
nothing is checkpointed. Saved for backward is each matrix's input: d_model + d_ff elements per block and token. GB are
1e9 bytes.

All-reduce over a ring without cutting the tensor into chunks, for contrast: why everyone cuts.

P bytes on each of n ranks in a ring, W bytes/s on a link.

    way                       passes      bytes on the busiest link   seconds
    chunks (the ring)         2(n − 1)    2(n − 1)/n · P              2(n − 1)/n · P/W
    all to all                n − 1       (n − 1) · P                 (n − 1) · P/W
    reduce, then broadcast    2(n − 1)    P, on one link 2P           2(n − 1) · P/W

All to all: every rank's full tensor goes once around, and each rank adds up all it sees. All links work all the time,
at n/2 times the bytes. Reduce, then broadcast: a running sum goes from rank to rank to the last, and the result around
again. No link carries more than twice the tensor, but only one works at a time, so it takes n times as long as the
ring.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from statistics import median

from tables import RESULTS, WORDS, results
from tables.predicted import BESIDE, checked
from trainstep.plan import machine
from trainstep.plan.communication import Link, collective_seconds
from trainstep.plan.limits import intensity, tensor_axis_ranks
from trainstep.plan.machine import ATTAINABLE
from trainstep.plan.measured import calibrated, scheme_launches
from trainstep.plan.roofline import FUSED_ATTENTION, TILES
from trainstep.plan.strategies import RESERVED_BYTES
from trainstep.report.numbers import number
from trainstep.report.tables import Table, make_table, text_table
from trainstep.rows import ChangeRow, FitRow, ParallelRow, PeakRow, StepRow
from trainstep.rows.records import Row


@dataclass(frozen=True)
class FeedForwardStack:
    """A model of nothing but feed-forward blocks."""

    d_model: int
    d_ff: int
    num_blocks: int

    @property
    def parameters(self) -> int:
        """Both matrices of all blocks."""
        return 2 * self.d_model * self.d_ff * self.num_blocks

    @property
    def static_bytes(self) -> int:
        """Weights, gradients and two moments, four bytes each."""
        return 4 * 4 * self.parameters

    @property
    def activation_bytes_per_token(self) -> int:
        """Saved for backward, in bfloat16."""
        return 2 * self.num_blocks * (self.d_model + self.d_ff)

    def devices(self, device_bytes: float, tokens: int = 0) -> int:
        """How many devices' memory all of it is worth."""
        return math.ceil((self.static_bytes + tokens * self.activation_bytes_per_token) / device_bytes)

    def bytes_per_device(self, shards: int, tokens: int = 0) -> float:
        """Weights, gradients, moments and half of the activations sharded; the other half on every device."""
        activations = tokens * self.activation_bytes_per_token
        return (self.static_bytes + activations / 2) / shards + activations / 2

    def shards_to_fit(self, device_bytes: float, tokens: int = 0) -> int:
        """The fewest shards with less than `device_bytes` on a device."""
        activations = tokens * self.activation_bytes_per_token
        room = device_bytes - activations / 2
        assert room > 0, "the half of the activations that is not sharded does not fit alone"
        return math.floor((self.static_bytes + activations / 2) / room) + 1


XXL = FeedForwardStack(d_model=16_384, d_ff=53_248, num_blocks=126)

FLOPS_PER_S = 4.6e14
BYTES_PER_S = 2 * 9e10  # A TPU v5p, as the exercise gives them: both directions of one axis of its torus

FSDP_RANKS, TENSOR_RANKS = 16, 4
FSDP_AXES, TENSOR_AXES = 2, 1  # The mesh: X = 16 over two axes of the torus, Y = 4 over the third


def mesh_tokens(
    alpha: float, d_ff: float, tensor: int, *, fsdp_axes: float = 1, tensor_axes: float = 1, overlapped: bool = True
) -> float:
    """The fewest tokens per GPU for FSDP × TP with `tensor` ranks of TP; infinite where TP alone is limited already."""
    used = tensor / tensor_axis_ranks(alpha, d_ff, tensor_axes)  # the part of computing that TP's communication takes
    if used >= 1:
        return math.inf
    alone = alpha / (tensor * fsdp_axes)
    return alone if overlapped else alone / (1 - used)


def compute_bound_tokens(*, overlapped: bool) -> float:
    """Tokens per device from which the forward pass of `XXL` on the mesh is limited by computation."""
    alpha, axes = intensity(FLOPS_PER_S, BYTES_PER_S), {"fsdp_axes": FSDP_AXES, "tensor_axes": TENSOR_AXES}
    return mesh_tokens(alpha, XXL.d_ff, TENSOR_RANKS, **axes, overlapped=overlapped)


def alternate_passes(way: str, world_size: int) -> int:
    """Hand-overs of the full tensor that follow one another."""
    return (1 if way == "all to all" else 2) * (world_size - 1)


def alternate_seconds(way: str, payload: float, world_size: int, bytes_per_s: float) -> float:
    """Time of one all-reduce, calls and hand-overs costing nothing."""
    return alternate_passes(way, world_size) * payload / bytes_per_s


CHECKED: Mapping[str, type[Row]] = {
    "h200-step-sizes": StepRow,
    "h200-analyze-2.7B": ChangeRow,
    "h200-memory": PeakRow,
    "h200-checkpointing": FitRow,
} | {
    f"h200-parallel{run}": ParallelRow
    for run in (
        *("", "-4gpus", "-peers-4gpus", "-compiled-4gpus", "-sustained-4gpus", "-pinned-4gpus", "-rounds-4gpus"),
        *("-compiled-rounds-4gpus", "-hybrid-averaged-4gpus", "-hybrid-4gpus", "-hybrid-blocks-4gpus"),
        *("-hybrid-by-two-4gpus", "-hybrid-eager-4gpus"),
    )
}
"""Files whose rows of a kind are predicted."""


def predictions() -> dict[str, list[Row]]:
    """File → its measured rows beside predictions from a calibration."""
    files = ("h200-calibration", *(path.stem for path in sorted(RESULTS.glob("h200-collectives*.jsonl"))))
    rated = calibrated([row for name in files for row in results(name, Row)])
    found = {}
    for name, kind in CHECKED.items():
        found[name] = list(checked(results(name, kind), rated))
        if launches := scheme_launches(results(name, Row)):
            machine = dataclasses.replace(rated, scheme_launch_s=launches)
            found[f"{name}, and launches"] = list(checked(results(name, kind), machine))
    return found


def plan_check() -> Table:
    """Every step and peak that was measured and can be predicted."""
    rows = [row for name, rows in predictions().items() if name in CHECKED for row in rows]
    return make_table(BESIDE, rows)


def plan_errors(*, launches: bool = True) -> Table:
    """How far predictions are off, file by file; with `launches` also by those of the file itself."""
    cells = []
    for name, rows in ((name, rows) for name, rows in predictions().items() if launches or name in CHECKED):
        line = [name, number(len(rows))]
        for error in ("time_error", "memory_error"):
            sizes = [abs(value) for row in rows if isinstance(value := row.values.get(error), float)]
            line += [number(len(sizes)), *(f"{100 * of(sizes):.1f}" if sizes else "–" for of in (median, max))]
        cells.append(line)
    columns = (
        *("results", "rows", "times", "median error (%)", "worst (%)"),
        *("peaks", "their median error (%)", "their worst (%)"),
    )
    return text_table("plan-errors", "Predicted against measured", columns, cells)


def plan_exercise() -> Table:
    """Memory, devices and shards of the exercise, by tokens in flight."""
    rows = []
    for tokens in (0, 1024, 2048, 4096, 8192):
        shards = XXL.shards_to_fit(95e9, tokens)
        kept, activations = XXL.static_bytes / 1e9, tokens * XXL.activation_bytes_per_token / 1e9
        needs = (number(XXL.devices(80e9, tokens)), number(shards))
        each = XXL.bytes_per_device(shards, tokens) / 1e9
        rows.append((f"{tokens:,}", f"{kept:,.1f}", f"{activations:,.1f}", *needs, f"{each:.1f}"))
    columns = (
        *("tokens", "weights, gradients, moments (GB)", "activations (GB)", "devices of 80 GB"),
        *("shards to fit 95 GB", "then a device has (GB)"),
    )
    caption = f"{XXL.num_blocks} blocks, d_model {XXL.d_model:,}, d_ff {XXL.d_ff:,}: {XXL.parameters:,} parameters"
    return text_table("plan-exercise", caption, columns, rows)


def plan_mesh() -> Table:
    """The batch from which the exercise's mesh is limited by computation."""
    gpus = FSDP_RANKS * TENSOR_RANKS
    rows = []
    for name, overlapped in (("overlapped", True), ("one after the other", False)):
        tokens = compute_bound_tokens(overlapped=overlapped)
        rows.append((name, f"{tokens:.1f}", f"{tokens * gpus:,.0f}"))
    columns = ("the two axes communicate", "tokens per device", f"tokens on {gpus} devices")
    return text_table("plan-mesh", f"{FSDP_RANKS} × {TENSOR_RANKS}, forward pass", columns, rows)


def plan_rings() -> Table:
    """An all-reduce of 1 GB at 300 GB/s per link, three ways."""
    rows = []
    for ranks in (2, 4, 8, 64):
        ring = collective_seconds("all-reduce", 10**9, ranks, Link(0.0, 3e11))
        others = (alternate_seconds(way, 1e9, ranks, 3e11) for way in ("all to all", "reduce, then broadcast"))
        rows.append((number(ranks), *(number(1e3 * seconds) for seconds in (ring, *others))))
    columns = ("ranks", "in chunks (ms)", "all to all (ms)", "reduce, then broadcast (ms)")
    return text_table("plan-rings", "Computed: 1 GB, 300 GB/s on each link, calls free", columns, rows)


def plan_rates() -> Table:
    """What a second is computed from, and where each part comes from without a calibration."""
    products = [ATTAINABLE[precision] for precision in ("fp32", "tf32", "bf16")]
    wide, fp32 = (TILES[name] for name in ("wide", "fp32"))
    slower = [speed for _, _, speed in (*wide, *fp32) if speed < 1]
    fields = {
        "products": f"{min(products)} to {max(products)}",
        "tiles": f"{wide[0][0]} × {wide[0][1]} (16-bit, TF32), {fp32[0][0]} × {fp32[0][1]} (float32)",
        "smaller": f"{min(slower)} to {max(slower)}",
        "attention": FUSED_ATTENTION,
        "reserved": RESERVED_BYTES / machine.GIB,
        "us": {"link": machine.LINK_OVERHEAD_S * 1e6, "network": machine.NETWORK_OVERHEAD_S * 1e6},
    }
    sources = {part: text.format(machine=machine, **fields) for part, text in WORDS["plan-rates"].items()}
    return text_table("plan-rates", "Rates that seconds are computed from", ("part", "comes from"), sources.items())


TABLES = {
    "plan-check": plan_check,
    "plan-errors": plan_errors,
    "plan-accuracy": partial(plan_errors, launches=False),
    "plan-exercise": plan_exercise,
    "plan-mesh": plan_mesh,
    "plan-rings": plan_rings,
    "plan-rates": plan_rates,
}
