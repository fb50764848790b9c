"""What a run shows on the terminal: a line now and then, and below it a bar where there is a terminal to draw on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainstep.train.config import RunConfig
from trainstep.train.folder import Start

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, TaskID


class Show:
    """Prints on `console`; None, as on all ranks but the first, prints nothing."""

    def __init__(self, console: Console | None, *, log_every: int) -> None:
        self._console, self._log_every = console, log_every
        self._bar: tuple[Progress, TaskID] | None = None

    def line(self, text: str) -> None:
        """One line."""
        if self._console is not None:
            self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def update(self, row: Mapping[str, Any]) -> None:
        """One update: the bar moves; a line every `log_every` updates, and where there was a validation."""
        if self._bar is not None:
            self._bar[0].update(self._bar[1], completed=row["step"])
        if row["step"] == 1 or row["step"] % self._log_every == 0 or row["validation_loss"] is not None:
            self.line(as_line(row))

    @contextmanager
    def progress(self, steps: int, done: int) -> Iterator[None]:
        """Inside, the bar is shown."""
        if self._console is None or not self._console.is_terminal:
            yield
            return
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (TextColumn("update"), BarColumn(), MofNCompleteColumn(), TextColumn("left:"), TimeRemainingColumn())
        with Progress(*columns, console=self._console, transient=True) as progress:
            self._bar = (progress, progress.add_task("", total=steps, completed=done))
            yield
        self._bar = None


def as_beginning(start: Start, config: RunConfig, world_size: int, out: Path) -> str:
    """A run's first line for the terminal: what is trained how, and from where."""
    if start.is_finished:
        return f"the run in {out} is finished: all {config.train.steps} updates are made; nothing to do"
    ranks, passes = world_size, config.passes(world_size)
    how = f"{ranks} rank{'s'[: ranks != 1]} × {passes} pass{'es' if passes > 1 else ''} × batch {config.step.batch}"
    what = (
        f"{config.name}: {config.model.num_parameters:,} parameters, {config.train.steps} updates of "
        f"{config.train.global_batch} × {config.step.context} tokens ({how}), {config.scheme(ranks).name}, "
        f"{config.step.precision} → {out}"
    )
    if start.checkpoint is not None:
        writers = start.checkpoint.note.get("world_size")
        what += f"\nresumed from {start.checkpoint.path.name}, written by {writers} rank{'s'[: writers != 1]}"
    elif not start.is_new:
        what += "\nthe run was begun before, but has no checkpoint yet: from the first update again"
    if start.aside:
        what += f"\nset aside: {', '.join(start.aside)}"
    return what


def as_line(row: Mapping[str, Any]) -> str:
    """A row of the metrics for the terminal."""
    parts = [
        f"update {row['step']:>6}",
        f"loss {row['loss']:.4f}",
        f"learning rate {row['learning_rate']:.2e}",
        f"gradient norm {row['gradient_norm']:.3f}",
        f"{row['tokens_per_s']:,.0f} tokens/s",
    ]
    if row["utilisation"] is not None:
        parts.append(f"utilisation {100 * row['utilisation']:.1f} %")
    if row["validation_loss"] is not None:
        parts.append(f"validation loss {row['validation_loss']:.4f}")
    return "  ".join(parts)


def as_summary(values: Mapping[str, Any]) -> str:
    """A finished run's record for the terminal."""
    parts = [f"validation loss {values['validation_loss']:.4f}"]
    if values["n"]:
        parts.append(
            f"median of {values['n']} updates: {values['step_ms']:.4g} ms, {values['tokens_per_s']:,.0f} tokens/s"
        )
    if values["utilisation"] is not None:
        parts.append(f"utilisation {100 * values['utilisation']:.1f} %")
    if values["peak_gib"] is not None:
        parts.append(f"peak {values['peak_gib']:.4g} GiB on a rank")
    return "  ".join(parts)
