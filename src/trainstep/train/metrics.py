"""What is written and shown of a run: metrics.jsonl and TensorBoard's files, the terminal's lines, and its record."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import numpy as np

from trainstep.config import StepConfig
from trainstep.errors import UsageError
from trainstep.hardware import find_device
from trainstep.kinds import TrainRow
from trainstep.measure.environment import describe, device_name
from trainstep.measure.memory import GIB
from trainstep.parallel.process import Process
from trainstep.records import Times
from trainstep.stats import summarize
from trainstep.train.config import RunConfig
from trainstep.train.learner import Reading

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, TaskID

METRICS = "metrics.jsonl"  # the file's name in the run's folder

CURVES = ("loss", "validation_loss", "learning_rate", "gradient_norm", "tokens_per_s", "utilisation")
"""What TensorBoard draws."""
WARMUP = 10  # updates after a start whose speed is not counted: compilation and first allocations are in them
POINTS = 50  # updates whose losses are kept in the record; metrics.jsonl has all


class Meter:
    """Makes rows of what is read of updates.

    Args:
        first: the update that this start goes on from, 0 where it is new.
        tokens: that were trained on by then; None where a workload's batches do not tell.
    """

    def __init__(self, config: RunConfig, process: Process, first: int, tokens: int | None = 0) -> None:
        self._config, self._world_size, self._first = config, process.world_size, first
        self.tokens = tokens
        """That the updates so far were trained on."""
        spec = find_device(device_name(process.device))
        self.peak_flops = None if spec is None else 1e12 * spec.peak_tflops(config.step.precision) * process.world_size
        """FLOP/s of all ranks at most, in the run's precision; None: no peak is known of the device."""

    def row(self, reading: Reading, learning_rate: float, validation_loss: float | None) -> dict[str, Any]:
        """One update: the loss over the global batch, the gradient's norm before clipping, speed over all ranks."""
        self.tokens = None if self.tokens is None or reading.tokens is None else self.tokens + reading.tokens
        rate = None if reading.flops is None or self.peak_flops is None else reading.flops / reading.seconds
        return {
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
            "since_start": reading.step - self._first,
        }


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """All rows; a last line that a killed process cut short, and so has no end, is left out.

    Raises:
        UsageError: the file cannot be read, or another line is damaged. Nothing is removed.
    """
    try:
        lines = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        return []
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error
    rows = []
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line.decode())
            if not isinstance(row, dict) or not isinstance(row.get("step"), int):
                raise ValueError("not the row of an update")
        except (ValueError, RecursionError) as error:
            if number == len(lines):
                break  # what stands after the last line's end: nothing, or half a row
            raise UsageError(
                f"{path}, line {number} is damaged ({error}); mend that line or delete it, and start again: the rows "
                "around it are good"
            ) from error
        rows.append(row)
    return rows


class MetricsWriter(contextlib.ExitStack):
    """Appends rows to `metrics.jsonl`, each flushed at once, and to TensorBoard's files; a context, which closes them.

    Rows after update `step`, from which the run goes on, are removed from what is there. With `out` None, as on all
    ranks but the first, nothing is written.

    Raises:
        UsageError: `tensorboard`, and the package is not installed.
    """

    def __init__(self, out: Path | None, *, step: int, tensorboard: bool) -> None:
        super().__init__()
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
            self._events = self.enter_context(SummaryWriter(str(out / "tensorboard"), purge_step=step + 1))
        kept = [row for row in read_metrics(out / METRICS) if row["step"] <= step]
        draft = out / f".{METRICS}"
        draft.write_text("".join(json.dumps(row) + "\n" for row in kept), encoding="utf-8")
        draft.replace(out / METRICS)
        self._file = self.enter_context((out / METRICS).open("a", encoding="utf-8"))

    def write(self, row: Mapping[str, Any]) -> None:
        if self._file is not None:
            self._file.write(json.dumps(dict(row)) + "\n")
            self._file.flush()
        if self._events is not None:
            for name in CURVES:
                if row.get(name) is not None:
                    self._events.add_scalar(name, row[name], row["step"])


class Show:
    """Prints on `console`; None, as on all ranks but the first, prints nothing."""

    def __init__(self, console: Console | None, *, log_every: int) -> None:
        self._console, self._log_every = console, log_every
        self._bar: tuple[Progress, TaskID] | None = None

    def line(self, text: str) -> None:
        if self._console is not None:
            self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def update(self, row: Mapping[str, Any]) -> None:
        """One update: the bar moves; a line every `log_every` updates, and where there was a validation."""
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
    parts = [f"update {row['step']:>6}", f"loss {row['loss']:.4f}"]
    parts += [f"learning rate {row['learning_rate']:.2e}"] if row["learning_rate"] is not None else []
    parts.append(f"gradient norm {row['gradient_norm']:.3f}")
    speed = row["tokens_per_s"]
    parts.append(f"{row['step_ms']:.4g} ms" if speed is None else f"{speed:,.0f} tokens/s")
    if row["utilisation"] is not None:
        parts.append(f"utilisation {100 * row['utilisation']:.1f} %")
    if row["validation_loss"] is not None:
        parts.append(f"validation loss {row['validation_loss']:.4f}")
    return "  ".join(parts)


def as_summary(record: TrainRow) -> str:
    """A finished run's record for the terminal."""
    parts = [f"loss {record.last_loss:.4f}, not validated"]
    if record.validation_loss is not None:
        parts = [f"validation loss {record.validation_loss:.4f}"]
    if record.n:
        speed = "" if record.tokens_per_s is None else f", {record.tokens_per_s:,.0f} tokens/s"
        parts.append(f"median of {record.n} updates: {record.times['step'].median:.4g} ms{speed}")
    if record.utilisation is not None:
        parts.append(f"utilisation {100 * record.utilisation:.1f} %")
    if record.peak_gib is not None:
        parts.append(f"peak {record.peak_gib:.4g} GiB on a rank")
    return "  ".join(parts)


def run_record(
    config: RunConfig, process: Process, rows: Sequence[Mapping[str, Any]], first: int, peak_bytes: int | None
) -> TrainRow:
    """One row for a finished run. The curve is all of it; speed and memory are of the last start alone, as earlier ones
    may have been of another number of ranks or another scheme.

    `rows` has every update once. `first` is the update from which the last start went on; if it was the last one, there
    is no speed and no memory. `peak_bytes` is the most that a rank held since; None where it is not counted.
    """
    mine = [row for row in rows if row["step"] > first]
    steady = [row for row in mine if row["since_start"] > WARMUP] or mine
    times = summarize([row["step_ms"] for row in steady]) if steady else None
    utilisations = [row["utilisation"] for row in steady if row["utilisation"] is not None]
    validations = [row for row in rows if row["validation_loss"] is not None]
    chosen = sorted({round(at) for at in np.linspace(0, len(rows) - 1, min(POINTS, len(rows)))})
    names = ("context", "batch", "precision", "compile", "attention", "loss", "optimizer", "seed")
    settings = {name: getattr(config.step, name) for name in names}
    tokens_per_s = None if times is None else 1e3 * config.tokens_per_update / times.median
    if config.model is None:
        settings |= dict.fromkeys(("context", "batch", "loss"))
        settings |= {name: None for name in ("attention", "optimizer") if settings[name] == getattr(StepConfig(), name)}
        speeds = [row["tokens_per_s"] for row in steady if row["tokens_per_s"] is not None]
        tokens_per_s = float(np.median(speeds)) if speeds else None
    checkpointing, scheme = config.step.checkpointing, config.scheme(process.world_size, process.hosts)
    return TrainRow(
        workload=config.name,
        **settings,
        checkpointing=None if checkpointing == "none" else checkpointing,
        scheme=scheme.name,
        replicas=scheme.replicas,
        world_size=process.world_size,
        global_batch=None if config.model is None else config.train.global_batch,
        batches_per_update=config.train.batches_per_update if config.model is None else None,
        steps=config.train.steps,
        n=len(steady),
        times={} if times is None else {"step": Times.of(times, spread=False)},
        tokens_per_s=tokens_per_s,
        utilisation=float(np.median(utilisations)) if utilisations else None,
        first_loss=rows[0]["loss"],
        last_loss=rows[-1]["loss"],
        validation_loss=validations[-1]["validation_loss"] if validations else None,
        tokens=rows[-1]["tokens"],
        peak_gib=None if peak_bytes is None or not mine else peak_bytes / GIB,
        series={
            "step": [rows[at]["step"] for at in chosen],
            "loss": [rows[at]["loss"] for at in chosen],
            "validation_step": [row["step"] for row in validations],
            "validation_loss": [row["validation_loss"] for row in validations],
        },
        environment=describe(process.device),
    )
