"""The metrics of a run: `metrics.jsonl`, a line per update, and TensorBoard's event files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

from trainstep.errors import UsageError

METRICS = "metrics.jsonl"
"""The file's name in the run's folder."""

Row = Mapping[str, Any]
"""`step`, `loss`, `learning_rate`, `gradient_norm`, `step_ms`, `tokens_per_s`, `utilisation`, `validation_loss`, …"""

CURVES = ("loss", "validation_loss", "learning_rate", "gradient_norm", "tokens_per_s", "utilisation")
"""What TensorBoard draws."""


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """All rows that are complete; a last line that was cut short is left out."""
    if not path.exists():
        return []
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return rows


def cut_metrics(path: Path, step: int) -> None:
    """Keep the rows up to `step`, so that a run that goes on from there has every update once."""
    kept = [row for row in read_metrics(path) if row["step"] <= step]
    temporary = path.with_name(f".{path.name}")
    temporary.write_text("".join(json.dumps(row) + "\n" for row in kept), encoding="utf-8")
    temporary.replace(path)


class MetricsWriter:
    """Appends rows to `metrics.jsonl`, each flushed at once, and to TensorBoard's files. Used as a context manager.

    Args:
        out: the run's folder; rows after `step` are removed from what is there. None, as on all ranks but the first,
            writes nothing.
        step: the update that the run goes on from; 0 at its start.
        tensorboard: whether to write event files too.

    Raises:
        UsageError: `tensorboard`, and the package is not installed.
    """

    def __init__(self, out: Path | None, *, step: int, tensorboard: bool) -> None:
        self._events: Any = None
        self._file: TextIO | None = None
        if out is None:
            return
        if tensorboard:
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError as error:
                raise UsageError(
                    "TensorBoard's files need the package tensorboard (pip install tensorboard); or leave them out "
                    "with --no-tensorboard"
                ) from error
            self._events = SummaryWriter(str(out / "tensorboard"), purge_step=step + 1)
        cut_metrics(out / METRICS, step)
        self._file = (out / METRICS).open("a", encoding="utf-8")

    def write(self, row: Row) -> None:
        """Append one row."""
        if self._file is not None:
            self._file.write(json.dumps(dict(row)) + "\n")
            self._file.flush()
        if self._events is not None:
            for name in CURVES:
                if row.get(name) is not None:
                    self._events.add_scalar(name, row[name], row["step"])

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is not None:
            self._file.close()
        if self._events is not None:
            self._events.close()
