"""A run as one record: its curve at some updates, its speed with an interval, its memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from trainstep.measure.environment import describe
from trainstep.measure.memory import GIB
from trainstep.parallel.process import Process
from trainstep.records import Record, Scalar
from trainstep.stats import summarize
from trainstep.train.config import RunConfig

WARMUP = 10
"""Updates after a start whose speed is not counted: compilation and first allocations are in them."""
POINTS = 50
"""Updates whose losses are kept in the record; metrics.jsonl has all."""


def run_record(
    config: RunConfig, process: Process, rows: Sequence[Mapping[str, Any]], first: int, peak_bytes: int | None
) -> Record:
    """One row for a finished run. The curve is all of it; speed and memory are of the last start alone.

    Starts before may have been of another number of ranks or another scheme, so their times are not of this row's case.

    Args:
        config: what was trained, as last started.
        process: any of the ranks that trained last.
        rows: the metrics, every update once.
        first: the update from which the last start went on; if it was the last one, there is no speed and no memory.
        peak_bytes: the most memory that a rank held since; None where it is not counted.
    """
    mine = [row for row in rows if row["step"] > first]
    steady = [row for row in mine if row["since_start"] > WARMUP] or mine
    times = summarize([row["step_ms"] for row in steady]) if steady else None
    utilisations = [row["utilisation"] for row in steady if row["utilisation"] is not None]
    validations = [row for row in rows if row["validation_loss"] is not None]
    values: dict[str, Scalar] = {
        "n": len(steady),
        **({} if times is None else times.columns("step")),
        "tokens_per_s": None if times is None else 1e3 * config.tokens_per_update / times.median,
        "utilisation": float(np.median(utilisations)) if utilisations else None,
        "first_loss": rows[0]["loss"],
        "last_loss": rows[-1]["loss"],
        "validation_loss": validations[-1]["validation_loss"] if validations else None,
        "tokens": rows[-1]["tokens"],
        "peak_gib": None if peak_bytes is None or not mine else peak_bytes / GIB,
    }
    chosen = sorted({round(at) for at in np.linspace(0, len(rows) - 1, min(POINTS, len(rows)))})
    curve = [rows[at] for at in chosen]
    return Record(
        "train",
        case_of(config, process.world_size),
        values,
        series={
            "step": [row["step"] for row in curve],
            "loss": [row["loss"] for row in curve],
            "validation_step": [row["step"] for row in validations],
            "validation_loss": [row["validation_loss"] for row in validations],
        },
        environment=describe(process.device),
    )


def case_of(config: RunConfig, world_size: int) -> dict[str, Scalar]:
    """The columns that identify a run's row."""
    step, train = config.step, config.train
    return {
        "workload": config.name,
        "context": step.context,
        "batch": step.batch,
        "precision": step.precision,
        "compile": step.compile,
        "attention": step.attention,
        "loss": step.loss,
        "checkpointing": None if step.checkpointing == "none" else step.checkpointing,
        "optimizer": step.optimizer,
        "seed": step.seed,
        "scheme": config.scheme(world_size).name,
        "world_size": world_size,
        "global_batch": train.global_batch,
        "steps": train.steps,
    }
