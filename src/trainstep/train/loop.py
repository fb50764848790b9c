"""The training loop: a run from its first update, or from its newest checkpoint, to its last.

    check the configuration → open the data → open the folder → build → load the checkpoint →
    (update, read the update before, now and then validate and save)* → samples → results

All ranks go through it together and decide alike: what they decide by has been all-reduced.
"""

from __future__ import annotations

import math
import signal
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from trainstep.held_folder import held_folder
from trainstep.measure.environment import device_name
from trainstep.parallel.process import Process, is_restart
from trainstep.precision import check_precision
from trainstep.report.records import write_whole
from trainstep.schemes import uncounted_bytes
from trainstep.train.agreement import AgreedError, on_all_ranks, on_first_rank
from trainstep.train.build import build_training_step
from trainstep.train.checkpoints import Checkpoint, CheckpointWriter, name_of
from trainstep.train.config import RunConfig
from trainstep.train.data import TokenData, open_data
from trainstep.train.folder import CHECKPOINTS, RESULTS, Start, check_not_of_others, check_shared, open_folder
from trainstep.train.meter import Meter
from trainstep.train.metrics import METRICS, MetricsWriter, read_metrics
from trainstep.train.progress import Show, as_summary
from trainstep.train.readings import Reading, Readings
from trainstep.train.results import run_record
from trainstep.train.resume import Asked
from trainstep.train.samples import write_samples
from trainstep.train.state import form_of, load_training_state, training_state
from trainstep.train.stopping import StopSignals


@dataclass(frozen=True)
class Outcome:
    """How a run ended."""

    step: int
    """Updates made; the newest checkpoint is of this one."""
    is_finished: bool
    """Whether it was the last."""
    stopped_by: signal.Signals | None = None
    """The signal that this rank got, if it got one."""


def train(
    config: RunConfig, data: Path | None, out: Path, process: Process, show: Show, *, resume_from: str | None = None
) -> Outcome:
    """Train, or go on training, in the folder `out`. Every rank calls it with the same arguments.

    Args:
        config: the run.
        data: text, a folder of text, or a `.bin` of token ids; None: the standard library's source.
        out: the run's folder, seen by all ranks.
        process: this rank.
        show: the terminal; silent on all ranks but the first.
        resume_from: a checkpoint's name to go on from instead of the newest; later ones are set aside.

    Raises:
        UsageError: the configuration, the data, the folder or a checkpoint is not what it should be; or the loss
            became infinite or NaN. Mostly an `AgreedError`, which every rank raises alike.
    """
    on_first_rank(process, lambda: config.check(process.world_size))
    on_all_ranks(process, lambda: check_precision(config.step.precision, process.device))
    tokens = on_all_ranks(process, lambda: _checked_data(data, config, process))
    identity = config.identity(on_first_rank(process, tokens.describe))
    with ExitStack() as stack:
        on_first_rank(process, lambda: check_not_of_others(out))
        on_first_rank(process, lambda: stack.enter_context(held_folder(out, "another process is training")))
        asked = Asked(config.train.steps, resume_from, is_restart())
        start = on_first_rank(process, lambda: open_folder(out, identity, asked))
        on_all_ranks(process, lambda: check_shared(out))
        show.line(_beginning(start, config, process, out))
        if start.is_finished:
            return Outcome(config.train.steps, is_finished=True)
        note = {"identity": identity, "world_size": process.world_size, "resumed_from": resume_from}
        run = _Run(config, tokens, out, process, show, note, start.checkpoint)
        writers: list[MetricsWriter] = []  # rank 0's
        tensorboard = config.train.tensorboard
        on_first_rank(
            process,
            lambda: writers.append(stack.enter_context(MetricsWriter(out, step=run.done, tensorboard=tensorboard))),
        )
        signals = stack.enter_context(StopSignals())
        stack.enter_context(show.progress(config.train.steps, run.done))
        run.go(signals, writers)
        if run.done == config.train.steps:
            run.finish()
        run.writer.close()
    return Outcome(run.done, run.done == config.train.steps, signals.received)


class _Run:
    """A run that is being trained: the step, and what is read, written and decided after each update."""

    def __init__(
        self,
        config: RunConfig,
        tokens: TokenData,
        out: Path,
        process: Process,
        show: Show,
        note: Mapping[str, Any],
        checkpoint: Checkpoint | None,
    ) -> None:
        self.config, self.tokens, self.out, self.process, self.show = config, tokens, out, process, show
        self.note = note
        self.done = 0
        self.stopping = False
        self.step = build_training_step(config, process)
        self.writer = CheckpointWriter(out / CHECKPOINTS, keep=config.train.keep, group=dist.new_group(backend="gloo"))
        if checkpoint is not None:
            load_training_state(checkpoint, self.step.replica, process, self.writer.group)
            self.done = self.writer.last = checkpoint.step
        self.first = self.done
        self.meter = Meter(config, process, self.first)
        if self.meter.peak_flops is None:
            show.line(f"utilisation is left out: no peak is known of {device_name(process.device)}")

    def go(self, signals: StopSignals, writers: list[MetricsWriter]) -> None:
        """Train to the last update, or until some rank is told to stop; then all is saved."""
        readings = Readings(self.process)
        train = self.config.train
        while self.done < train.steps and not self.stopping:
            self.done += 1
            loss, norm = self._update()
            if (before := readings.post(self.done, loss, norm, stop=signals.received is not None)) is not None:
                self._account(before, None, writers)
            validate, save = train.validates_after(self.done), train.saves_after(self.done)
            if validate or save or self.stopping:
                reading = readings.take()
                assert reading is not None, "the update was just sent off"
                self._check_finite(reading)
                self._account(reading, self._validate() if validate else None, writers)
                if save or self.stopping:
                    self._save()
                readings.restart()
            self.writer.poll()
        self.writer.wait()

    def _update(self) -> tuple[torch.Tensor, torch.Tensor]:
        """One update of the weights: this rank's loss, and the norm of the gradient over all ranks."""
        rank, world_size = self.process.rank, self.process.world_size
        parts = self.tokens.training_parts(self.done, rank, world_size, self.config.step.batch)
        for group in self.step.optimizer.param_groups:
            group["lr"] = self.config.learning_rate(self.done)
        return self.step.clipped([self.step.place(part) for part in parts], self.config.train.clip_norm)

    def _account(self, reading: Reading, validation_loss: float | None, writers: list[MetricsWriter]) -> None:
        """Check, write and show an update, and note if some rank was told to stop by then."""
        self._check_finite(reading)
        self.stopping = self.stopping or reading.stop
        row = self.meter.row(reading, validation_loss)
        for writer in writers:
            writer.write(row)
        self.show.update(row)

    def _check_finite(self, reading: Reading) -> None:
        """Raise on every rank if an update's loss or gradient was not finite. What is being saved is from before."""
        if math.isfinite(reading.loss) and math.isfinite(reading.gradient_norm):
            return
        self.writer.wait()
        last = self.writer.last
        good = "there is no checkpoint yet" if last is None else (
            f"the last good checkpoint is {self.out / CHECKPOINTS / name_of(last)}"
        )  # fmt: skip
        raise AgreedError(
            f"update {reading.step}: the loss is {reading.loss:g} and the gradient norm {reading.gradient_norm:g}, at "
            f"learning rate {self.config.learning_rate(reading.step):.3g} in {self.config.step.precision}. Stopped, "
            f"and nothing of it is saved; {good}. A lower --learning-rate, a longer --warmup or a wider --precision "
            "may help, as a new run with another --out"
        )

    def _validate(self) -> float:
        """The mean loss over the validation sequences of all ranks."""
        parts = self.tokens.validation_parts(self.process.rank, self.process.world_size, self.config.step.batch)
        loss = self.step.evaluate([self.step.place(part) for part in parts]).double()
        dist.all_reduce(loss, group=self.process.group)
        return float(loss) / self.process.world_size

    def _save(self) -> None:
        note = {"form": form_of(self.step.replica), "tokens": self.done * self.config.tokens_per_update}
        self.writer.save(self.done, training_state(self.step.replica), {**self.note, **note})

    def finish(self) -> None:
        """After the last update: samples of text, and the run's record."""
        write_samples(self.step, self.tokens, self.config, self.process, self.out / "samples.txt", self.show)
        device = self.process.device
        peaks: list[int] = [0] * self.process.world_size
        on_gpu = device.type == "cuda"
        mine = torch.cuda.max_memory_allocated(device) + uncounted_bytes(self.step.replica) if on_gpu else 0
        dist.all_gather_object(peaks, mine, group=self.process.group)
        if self.process.rank == 0:
            rows = read_metrics(self.out / METRICS)
            record = run_record(self.config, self.process, rows, self.first, max(peaks) or None)
            write_whole(self.out / RESULTS, [record])
            self.show.line(f"{as_summary(record.values)} → {self.out}")


def _checked_data(path: Path | None, config: RunConfig, process: Process) -> TokenData:
    tokens = open_data(path, config)
    tokens.check_ids(process.rank, process.world_size)
    return tokens


def _beginning(start: Start, config: RunConfig, process: Process, out: Path) -> str:
    """The first line: what is trained how, and from where."""
    if start.is_finished:
        return f"the run in {out} is finished: all {config.train.steps} updates are made; nothing to do"
    ranks, passes = process.world_size, config.passes(process.world_size)
    how = f"{ranks} rank{'s'[: ranks != 1]} × {passes} pass{'es' if passes > 1 else ''} × batch {config.step.batch}"
    what = (
        f"{config.name}: {config.model.num_parameters:,} parameters, {config.train.steps} updates of "
        f"{config.train.global_batch} × {config.step.context} tokens ({how}), {config.scheme(ranks)}, "
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
