"""Output of a run: metrics.jsonl and TensorBoard's files, the terminal's lines, and its record."""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainstep.base.errors import UsageError
from trainstep.base.files import aside, cannot_write
from trainstep.base.hardware import find_device
from trainstep.measure.environment import describe, device_name
from trainstep.measure.memory import GIB
from trainstep.parallel.process import Process
from trainstep.rows import TrainRow
from trainstep.rows.records import write_all
from trainstep.train.config import RunConfig
from trainstep.train.history import METRICS, read_metrics, record_of
from trainstep.train.learner import Reading

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, TaskID

CURVES = ("loss", "validation_loss", "learning_rate", "gradient_norm", "tokens_per_s", "utilisation")
"""Curves that TensorBoard draws."""


class Meter:
    """Makes rows of what is read of updates.

    Args:
        first: the update that this start goes on from, 0 where it is new.
        tokens: that were trained on by then; None where a workload's batches do not tell.
    """

    def __init__(self, config: RunConfig, process: Process, first: int, tokens: int | None = 0) -> None:
        self._config, self._world_size, self._first = config, process.world_size, first
        self.tokens = tokens
        """Tokens that the updates so far were trained on."""
        self._start = {"case": case_of(config, process), "environment": describe(process.device)}
        self.again = 0
        """Updates that were made before and are made once more since this start."""
        self.checkpoint_ms: float | None = None
        """Milliseconds that the next update waited for the checkpoint before it."""
        spec = find_device(device_name(process.device))
        self.peak_flops = None if spec is None else 1e12 * spec.peak_tflops(config.step.precision) * process.world_size
        """FLOP/s of all ranks at most, in the run's precision; None: no peak is known of the device."""

    def row(
        self, reading: Reading, learning_rate: float, validation_loss: float | None, *, validation_ms: float | None
    ) -> dict[str, Any]:
        """A row of one update: the loss over the global batch, the gradient's norm before clipping, speed over all
        ranks."""
        self.tokens = None if self.tokens is None or reading.tokens is None else self.tokens + reading.tokens
        rate = None if reading.flops is None or self.peak_flops is None else reading.flops / reading.seconds
        waited, self.checkpoint_ms = self.checkpoint_ms, None
        since_start = reading.step - self._first
        first = {"start": self._start, "trained_again": self.again} if since_start == 1 else {}
        row: dict[str, Any] = {
            "step": reading.step,
            "loss": reading.loss,
            "validation_loss": validation_loss,
            "learning_rate": None if math.isnan(learning_rate) else learning_rate,
            "gradient_norm": reading.gradient_norm,
            "step_ms": 1e3 * reading.seconds,
            "tokens_per_s": None if reading.tokens is None else reading.tokens / reading.seconds,
            "utilisation": None if rate is None or self.peak_flops is None else rate / self.peak_flops,
            "tokens": self.tokens,
            "world_size": self._world_size,
            "since_start": since_start,
            "time": round(time.time(), 3),
            "validation_ms": validation_ms,
            "checkpoint_ms": waited,
            "ranks_own_ms": reading.ranks_own_ms,
            "ranks_data_ms": reading.ranks_data_ms,
            **first,
        }
        told = ("validation_ms", "checkpoint_ms", "ranks_own_ms", "ranks_data_ms")
        return {name: value for name, value in row.items() if value is not None or name not in told}


ROOM = "see that there is room there, then give the same command again to go on"


class MetricsWriter(contextlib.ExitStack):
    """Appends rows to `metrics.jsonl`, each written at once, and to TensorBoard's files; a context, which closes them.

    Rows after update `step`, from which the run goes on, are removed from what is there. With `out` None, as on all
    ranks but the first, nothing is written.

    Raises:
        UsageError: `tensorboard`, and the package is not installed; or there is no room for what is kept.
    """

    def __init__(self, out: Path | None, *, step: int, tensorboard: bool) -> None:
        super().__init__()
        self._events: Any = None
        self._file: FileIO | None = None
        self.removed = 0  # rows of updates that are made again
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
            self.push(self._close_events)
        there = read_metrics(out / METRICS)
        kept = [row for row in there if row["step"] <= step]
        self.removed = len(there) - len(kept)
        with aside(out / METRICS, ROOM) as draft, draft.open("x", encoding="utf-8") as file:
            file.write("".join(json.dumps(row) + "\n" for row in kept))
        # Without a buffer, which would be written once more when the file is closed, and raise in an error's place.
        self._file = self.enter_context((out / METRICS).open("ab", buffering=0))

    def write(self, row: Mapping[str, Any]) -> None:
        """Append a row.

        Raises:
            UsageError: there is no room for it, or the disk is gone.
        """
        if self._file is not None:
            try:
                write_all(self._file, (json.dumps(dict(row)) + "\n").encode())
            except OSError as error:
                raise cannot_write(self._file.name, error, ROOM) from error
        if self._events is not None:
            try:
                for name in CURVES:
                    if row.get(name) is not None:
                        self._events.add_scalar(name, row[name], row["step"])
            except OSError as error:  # of its thread, which writes later
                raise cannot_write(self._events.log_dir, error, ROOM) from error

    def _close_events(self, kind: type[BaseException] | None, *_: object) -> None:
        """Write the rest; what cannot be is an error only where none is on its way."""
        try:
            self._events.close()
        except OSError as error:
            if kind is None:
                raise cannot_write(self._events.log_dir, error, ROOM) from error


class Show:
    """Prints on `console`; None, as on all ranks but the first, prints nothing."""

    def __init__(self, console: Console | None, *, log_every: int) -> None:
        self._console, self._log_every = console, log_every
        self._bar: tuple[Progress, TaskID] | None = None

    def line(self, text: str) -> None:
        if self._console is not None:
            self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def update(self, row: Mapping[str, Any]) -> None:
        """Show an update: the bar moves; a line every `log_every` updates, and where there was a validation."""
        if self._bar is not None:
            self._bar[0].update(self._bar[1], completed=row["step"])
        if row["step"] == 1 or row["step"] % self._log_every == 0 or row["validation_loss"] is not None:
            self.line(as_line(row))

    @contextlib.contextmanager
    def progress(self, steps: int, done: int) -> Iterator[None]:
        if self._console is None or not self._console.is_terminal:
            yield
            return
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (TextColumn("update"), BarColumn(), MofNCompleteColumn(), TextColumn("left:"), TimeRemainingColumn())
        with Progress(*columns, console=self._console, transient=True) as progress:
            self._bar = (progress, progress.add_task("", total=steps, completed=done))
            yield
        self._bar = None


def as_line(row: Mapping[str, Any]) -> str:
    parts = [f"update {row['step']:>5}", f"loss {row['loss']:.4f}"]
    parts += [f"lr {row['learning_rate']:.2e}"] if row["learning_rate"] is not None else []
    parts.append(f"norm {row['gradient_norm']:.3g}")
    speed = row["tokens_per_s"]
    parts.append(f"{row['step_ms']:.4g} ms" if speed is None else f"{speed:,.0f} tokens/s")
    if row["utilisation"] is not None:
        parts.append(f"{100 * row['utilisation']:.0f} % util")
    validated = "" if row["validation_loss"] is None else f"\n{'':14}validation loss {row['validation_loss']:.4f}"
    return "  ".join(parts) + validated


def as_summary(record: TrainRow) -> str:
    """A finished run's record for the terminal."""
    loss = record.validation_loss
    parts = [f"loss {record.last_loss:.4f}, not validated" if loss is None else f"validation loss {loss:.4f}"]
    if record.n:
        speed = "" if record.tokens_per_s is None else f", {record.tokens_per_s:,.0f} tokens/s"
        parts.append(f"median of {record.n} updates: {record.times['step'].median:.4g} ms{speed}")
    if record.utilisation is not None:
        parts.append(f"utilisation {100 * record.utilisation:.1f} %")
    if record.peak_gib is not None:
        parts.append(f"peak {record.peak_gib:.4g} GiB on a rank")
    return "  ".join(parts)


def case_of(config: RunConfig, process: Process) -> dict[str, Any]:
    """The settings of a run on these ranks, as the fields of a `TrainRow`."""
    scheme = config.scheme(process.world_size, process.hosts)
    return config.case() | {
        "workload": config.name,
        "scheme": scheme.name,
        "replicas": scheme.replicas,
        "blocks_per_group": None if scheme.blocks_per_group == 1 else scheme.blocks_per_group,
        "world_size": process.world_size,
        "steps": config.train.steps,
    }


def run_record(
    config: RunConfig, process: Process, rows: Sequence[Mapping[str, Any]], first: int, peak_bytes: int | None
) -> TrainRow:
    """A row for a finished run; `rows` has every update once.

    `first` is the update from which the last start went on. `peak_bytes` is the most that a rank held since; None where
    it is not counted.
    """
    peak = None if peak_bytes is None else peak_bytes / GIB
    return record_of(case_of(config, process), rows, first, environment=describe(process.device), peak_gib=peak)
