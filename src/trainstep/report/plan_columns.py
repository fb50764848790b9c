"""What the tables of predictions show; every caption says that they are predictions."""

from __future__ import annotations

from collections.abc import Mapping

from trainstep.records import Record, Scalar
from trainstep.report.columns import Column, case_column, value_column
from trainstep.report.numbers import number
from trainstep.schemes import STRATEGIES

_SETTINGS = tuple(
    case_column(name, name)
    for name in ("workload", "device", "batch", "context", "precision", "compile", "attention", "optimizer")
)
_MESH = (
    Column("strategy", lambda row: str(row.case["strategy"])),
    case_column("GPUs", "gpus"),
    Column("tp", lambda row: number(row.case["tensor_parallel"])),
)
_SPLIT = tuple(
    value_column(f"{title} (GiB)", f"{name}_gib")
    for title, name in (
        ("weights", "weights"),
        ("gradients", "gradients"),
        ("state", "optimizer_state"),
        ("activations", "activations"),
        ("buffers", "buffers"),
        ("peak", "peak"),
    )
)


_ROOM = Column("room for tensors (GiB)", lambda row: number(row.values.get("tensors_gib"), 4), setting=True)
"""The same in every row, so it stands in the caption, where "fits" is explained by it."""


def _yes_no(title: str, name: str) -> Column:
    def cell(row: Record) -> str:
        value: Scalar = row.values.get(name)
        return "–" if value is None else "yes" if value else "no"

    return Column(title, cell)


def _throughput(strategy: str) -> Column:
    def cell(row: Record) -> str:
        fits = row.values.get(f"{strategy}_fits")
        return "does not fit" if fits is False else number(row.values.get(f"{strategy}_tokens_per_s"))

    return Column(strategy, cell)


PLAN_COLUMNS: Mapping[str, tuple[str, tuple[Column, ...]]] = {
    "plan machine": (
        "What the prediction stands on",
        (
            case_column("model", "workload"),
            case_column("device", "device"),
            value_column("parameters", "parameters"),
            value_column("GPUs", "gpus"),
            value_column("per node", "gpus_per_node"),
            value_column("memory (GiB)", "memory_gib", digits=4),
            value_column("for tensors (GiB)", "tensors_gib", digits=4),
            value_column("products (TFLOP/s)", "product_tflops"),
            value_column("copy (GB/s)", "copy_gb_s"),
            value_column("link (GB/s)", "link_gb_s"),
            value_column("a call (µs)", "link_overhead_us"),
            value_column("network (GB/s per GPU)", "network_gb_s"),
        ),
    ),
    "plan": (
        "Predicted: one step by strategy; computing is matrix products, memory traffic and the optimizer; what fits "
        "is within the room for tensors",
        (
            *_SETTINGS,
            case_column("checkpointing", "checkpointing"),
            *_MESH,
            value_column("peak (GiB)", "peak_gib"),
            _ROOM,
            _yes_no("fits", "fits"),
            value_column("largest batch", "largest_batch"),
            value_column("fewest GPUs", "smallest_gpus"),
            value_column("sent per GPU (GB)", "sent_gb"),
            value_column("forward (ms)", "forward_ms", brief=False),
            value_column("backward (ms)", "backward_ms", brief=False),
            value_column("optimizer (ms)", "optimizer_ms", brief=False),
            value_column("computing (ms)", "compute_ms"),
            value_column("communicating (ms)", "communication_ms"),
            value_column("of it exposed (ms)", "exposed_ms"),
            value_column("step (ms)", "step_ms"),
            value_column("limited by", "limit"),
            value_column("tokens/s", "tokens_per_s"),
            value_column("utilisation (%)", "utilisation", 100),
        ),
    ),
    "plan memory": (
        "Predicted: memory of one GPU at its peak, by checkpointing policy",
        (
            *_SETTINGS,
            *_MESH,
            Column("checkpointing", lambda row: str(row.case["checkpointing"])),
            *_SPLIT,
            value_column("peak at", "peak_at"),
            _ROOM,
            _yes_no("fits", "fits"),
            value_column("largest batch", "largest_batch"),
        ),
    ),
    "plan limit": (
        "Predicted: how far each axis scales before its communication takes longer than the matrix products alone, at "
        "their full rate",
        (
            *_SETTINGS[:-2],
            Column("axis", lambda row: str(row.case["axis"])),
            case_column("connection", "connection"),
            value_column("FLOP per byte", "flop_per_byte"),
            value_column("needs tokens per GPU", "least_tokens_per_gpu"),
            value_column("has", "tokens_per_gpu"),
            value_column("most GPUs at this global batch", "most_gpus"),
        ),
    ),
    "plan scaling": (
        "Predicted: tokens/s with the same batch on every GPU",
        (
            *_SETTINGS,
            Column("GPUs", lambda row: number(row.case["gpus"])),
            *map(_throughput, STRATEGIES),
        ),
    ),
    "plan check": (
        "Predicted beside measured",
        (
            *(case_column(name, name) for name in ("workload", "batch", "context")),
            *(case_column(name, name) for name in ("strategy", "gpus")),
            *(
                Column(name, lambda row, name=name: str(row.case.get(name) or "none"))  # type: ignore[misc]
                for name in ("precision", "compile", "attention", "checkpointing", "optimizer")
            ),
            value_column("step (ms)", "step_ms"),
            value_column("predicted (ms)", "predicted_ms"),
            value_column("time off by (%)", "time_error", 100, digits=2),
            value_column("peak (GiB)", "peak_gib"),
            value_column("predicted (GiB)", "predicted_gib"),
            value_column("memory off by (%)", "memory_error", 100, digits=2),
        ),
    ),
}
"""Kind of record → caption and columns."""
