"""A training run as its metrics.jsonl tells it, finished or not, and its page while it trains. Imports no torch."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from trainstep.base.errors import UsageError
from trainstep.base.files import parse_line, read_lines
from trainstep.base.schemes import SCHEMES
from trainstep.base.stats import summarize
from trainstep.rows import TrainRow
from trainstep.rows.records import Scalar, Times
from trainstep.rows.row import decode_row

METRICS = "metrics.jsonl"  # the file's name in the run's folder
WARMUP = 10  # updates after a start whose speed is not counted: compilation and first allocations are in them
POINTS = 50  # updates whose losses are kept in the record; metrics.jsonl has all
DRAWN = 400  # points of a curve on a page; of a longer run each is of several updates

MEANS = ("loss", "learning_rate", "gradient_norm", "utilisation")
"""Curves of which a point of several updates has the mean; of times it has the median."""


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """All rows; a last line that a killed process cut short, and so has no end, is left out.

    Raises:
        UsageError: the file cannot be read, or another line is damaged. Nothing is removed.
    """
    rows: list[dict[str, Any]] = []
    for number, line in enumerate(read_lines(path) if path.exists() else (), start=1):
        try:
            row = parse_line(line)
            if not isinstance(row, dict) or not isinstance(row.get("step"), int):
                raise ValueError("not the row of an update")
        except ValueError as error:
            if not line.endswith(b"\n"):
                break  # half a row
            raise UsageError(
                f"{path}, line {number} is damaged ({error}); mend that line or delete it, and start again: the rows "
                "around it are good"
            ) from error
        rows.append(row)
    return rows


def history(folder: Path) -> TrainRow:
    """The run in a folder as far as it has come, its curves in the series with at most `DRAWN` points.

    Raises:
        UsageError: no run is there, it has made no update yet, or its metrics are damaged.
    """
    path = folder / METRICS
    rows = read_metrics(path)
    if not rows:
        what = "has made no update yet" if path.exists() else "is not there"
        raise UsageError(f"{path} {what}; give the --out of a run that `trainstep train` has begun")
    try:
        starts = [row["start"] for row in rows if row.get("start") is not None]
        told = starts[-1] if starts else {"case": {"workload": folder.resolve().name}, "environment": {}}
        first = max(row["step"] - row["since_start"] for row in rows)
        made = record_of(told["case"], rows, first, environment=told["environment"])
        series = dict(made.series) | _curves(rows)
        sections = {"case": made.case, "values": made.values, "series": series, "environment": made.environment}
        row = decode_row(TrainRow, **parse_line(json.dumps(sections).encode()))
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise UsageError(
            f"{path} has rows that are not a training run's ({type(error).__name__}: {error}); give the --out of a run "
            "that `trainstep train` has begun"
        ) from error
    return row


def record_of(
    case: Mapping[str, Any],
    rows: Sequence[Mapping[str, Any]],
    first: int,
    *,
    environment: Mapping[str, Scalar],
    peak_gib: float | None = None,
) -> TrainRow:
    """A row for a run. The curve is all of it; speed and memory are of the last start alone, as earlier ones may have
    been of another number of ranks or another scheme.

    Args:
        case: the run's settings, by field.
        rows: every update once.
        first: the update from which the last start went on; if it was the last one, there is no speed and no memory.
        environment: where the last start ran.
        peak_gib: the most that a rank held since the last start; None where it is not counted.
    """
    mine = [row for row in rows if row["step"] > first]
    steady = [row for row in mine if row["since_start"] > WARMUP] or mine
    times = summarize([row["step_ms"] for row in steady]) if steady else None
    validations = [row for row in rows if row["validation_loss"] is not None]
    waits = {name: sum(row.get(f"{name}_ms") or 0.0 for row in rows) for name in ("validation", "checkpoint")}
    whole = sum(row.get("step_ms") or 0.0 for row in rows) + sum(waits.values())
    chosen = sorted({round(at) for at in np.linspace(0, len(rows) - 1, min(POINTS, len(rows)))})
    begun = [row for row in rows if row["since_start"] == 1]
    return TrainRow(
        **case,
        n=len(steady),
        times={} if times is None else {"step": Times.of(times, spread=False)},
        samples={"step": [row["step_ms"] for row in steady], "training_loss": [row["loss"] for row in rows[:POINTS]]},
        tokens_per_s=_median(steady, "tokens_per_s"),
        utilisation=_median(steady, "utilisation"),
        first_loss=rows[0]["loss"],
        last_loss=rows[-1]["loss"],
        validation_loss=validations[-1]["validation_loss"] if validations else None,
        tokens=rows[-1]["tokens"],
        peak_gib=peak_gib if mine else None,
        done=rows[-1]["step"],
        starts=len(begun),
        trained_again=sum(row.get("trained_again") or 0 for row in begun),
        validation_share=waits["validation"] / whole if whole else None,
        checkpoint_share=waits["checkpoint"] / whole if whole else None,
        series={
            "step": [rows[at]["step"] for at in chosen],
            "loss": [rows[at]["loss"] for at in chosen],
            "validation_step": [row["step"] for row in validations],
            "validation_loss": [row["validation_loss"] for row in validations],
        },
        environment=dict(environment),
    )


def _curves(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Points of every curve; where the run was saved and started; and the ranks' own times since the last start."""
    width = -(-len(rows) // DRAWN)
    groups = [rows[at : at + width] for at in range(0, len(rows), width)]
    found: dict[str, list[Any]] = {"step": [group[-1]["step"] for group in groups]}
    found |= {name: [_median(group, name, np.mean) for group in groups] for name in MEANS}
    found |= {name: [_median(group, name) for group in groups] for name in ("step_ms", "tokens_per_s")}
    begun = [row for row in rows if row["since_start"] == 1]
    found["start_step"] = [row["step"] for row in begun]
    found["start_ranks"] = [row.get("world_size") for row in begun]
    found["start_again"] = [row.get("trained_again") or 0 for row in begun]
    found["start_scheme"] = [_scheme((row.get("start") or {}).get("case", {})) for row in begun]
    ends = [*(row["step"] - 1 for row in begun[1:]), rows[-1]["step"]]
    found["start_ms"] = [
        _median([row for row in rows if start["step"] <= row["step"] <= end], "step_ms")
        for start, end in zip(begun, ends, strict=True)
    ]
    found["saved_step"] = [row["step"] for row in rows if row.get("saved")]
    found["saved_loss"] = [row["loss"] for row in rows if row.get("saved")]
    last = [row for row in rows if row["step"] - row["since_start"] == rows[-1]["step"] - rows[-1]["since_start"]]
    windows = [row for row in last if row.get("ranks_own_ms") and row["since_start"] > WARMUP] or last
    for name in ("ranks_own_ms", "ranks_data_ms"):
        taken = [row[name] for row in windows if row.get(name)]
        found[name] = [_middle([each[rank] for each in taken]) for rank in range(len(taken[0]))] if taken else []
    return found


def _middle(values: Sequence[float | None], of: Callable[[Any], Any] = np.median) -> float | None:
    known = [value for value in values if value is not None]
    return float(of(known)) if known else None


def _median(rows: Sequence[Mapping[str, Any]], name: str, of: Callable[[Any], Any] = np.median) -> float | None:
    return _middle([row.get(name) for row in rows], of)


def _scheme(case: Mapping[str, Any]) -> str:
    """A start's scheme as it was set; nothing where older rows do not say it."""
    name = str(case.get("scheme") or "")
    if name not in SCHEMES:
        return name
    together = case.get("blocks_per_group") or 1
    return dataclasses.replace(SCHEMES[name], replicas=case.get("replicas"), blocks_per_group=together).label
