"""The training loop: a run from its first update, or from its newest checkpoint, to its last.

    check the configuration → open the data → open the folder → build → load the checkpoint →
    (update, read the update before, now and then validate and save)* → results

All ranks go through it together and decide alike: what they decide by has been all-reduced. No other run, and no
file of another's, is ever touched in the run's folder.
"""

from __future__ import annotations

import contextlib
import json
import math
import signal
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypedDict

import torch.distributed as dist

from trainstep.base.errors import UsageError
from trainstep.base.files import aside, read_json
from trainstep.base.guards import StopSignals, held_folder
from trainstep.measure.environment import device_name
from trainstep.parallel.process import AgreedError, Process, is_restart, on_all_ranks, on_first_rank
from trainstep.rows.records import Scalar, write_whole
from trainstep.step.casting import check_precision
from trainstep.step.workload import WorkloadSource
from trainstep.train.checkpoints import (
    Checkpoint,
    CheckpointWriter,
    form_of,
    load_training_state,
    name_of,
    open_checkpoint,
    set_aside,
    steps_in,
    tidy,
    training_state,
)
from trainstep.train.config import BuiltinRun, RunConfig, counted, differences
from trainstep.train.data import Data, open_data
from trainstep.train.history import METRICS, read_metrics
from trainstep.train.learner import Learner, Reading, Readings, Update
from trainstep.train.metrics import Meter, MetricsWriter, Show, as_summary, run_record
from trainstep.train.own import OwnData


@dataclass(frozen=True)
class Outcome:
    step: int  # updates made; the newest checkpoint is of this one
    is_finished: bool  # whether it was the last
    stopped_by: signal.Signals | None = None  # the signal that this rank got, if it got one


def train(
    config: RunConfig,
    data: Path | WorkloadSource | None,
    out: Path,
    process: Process,
    show: Show,
    *,
    resume_from: str | None = None,
) -> Outcome:
    """Train, or go on training, in the folder `out`. Every rank calls it with the same arguments.

    Args:
        config, process, show: the run, this rank, and the terminal (silent on all ranks but the first).
        data: text, a folder of text, or a `.bin` of token ids; None: the standard library's source. Or a user's
            workload, which has its own.
        out: the run's folder, seen by all ranks.
        resume_from: a checkpoint's name to go on from instead of the newest; later ones are set aside.

    Raises:
        UsageError: the configuration, the data, the folder or a checkpoint is not what it should be; ranks were
            started unlike each other; or the loss became infinite or NaN. Mostly an `AgreedError`, which every rank
            raises alike.
    """
    # Rank 0 checks what all share, and every rank what its own host has; either way all ranks raise or none does.
    on_first_rank(process, lambda: config.check(process.world_size, process.hosts))
    on_all_ranks(process, lambda: check_precision(config.step.precision, process.device))
    tokens = on_all_ranks(process, lambda: _open(data, config))
    tokens.check(process)
    data_read = tokens.describe()
    _check_started_alike(config.settings(data_read), process)
    identity = config.identity(data_read)
    with ExitStack() as stack:
        on_first_rank(process, lambda: check_not_of_others(out))
        on_first_rank(process, lambda: stack.enter_context(held_folder(out, "trainstep train")))
        opening = partial(open_folder, out, identity, updates=config.train.steps, resume_from=resume_from)
        # The folder is held from here on, so a second trainer cannot write between this run's checkpoints.
        start = on_first_rank(process, lambda: opening(is_restart=is_restart()))
        on_all_ranks(process, lambda: check_shared(out))
        show.line(start.describe(config, process.world_size, process.hosts, out, tokens.parameters))
        if start.is_finished:
            return Outcome(config.train.steps, is_finished=True)
        process.now("the start")
        meter = Meter(config, process, start.step, start.tokens(config))
        making = partial(Learner, config, tokens, process, counts_flops=meter.peak_flops is not None)
        learner = on_all_ranks(process, making)
        last = start.step if start.checkpoint else None
        gloo = process.group_beside()
        checkpoints = CheckpointWriter(out / CHECKPOINTS, keep=config.train.keep, group=gloo, last=last)
        if start.checkpoint is not None:
            load_training_state(start.checkpoint, learner.step.replica, process, gloo)
            tokens.resume(start.step, start.checkpoint.note, process, show.line)
        if meter.peak_flops is None:
            show.line(f"utilisation is left out: no peak is known of {device_name(process.device)}")
        if not tokens.validates:
            show.line("no validation: the workload names no batches for it (Workload.validation)")
        written, tensorboard = out if process.rank == 0 else None, config.train.tensorboard
        metrics = on_all_ranks(process, lambda: MetricsWriter(written, step=start.step, tensorboard=tensorboard))
        stack.enter_context(metrics)
        meter.again = metrics.removed
        signals = stack.enter_context(StopSignals(raises=False))
        stack.enter_context(show.progress(config.train.steps, start.step))
        note: dict[str, Any] = {"identity": identity, **form_of(learner.step.replica)}
        note |= {"world_size": process.world_size, "resumed_from": resume_from}
        run = _Run(config, process, tokens, learner, checkpoints, note, meter, metrics, show)
        done = run.go(start.step, signals)
        is_finished = done == config.train.steps
        if is_finished:
            peak = learner.peak_bytes()
            if process.rank == 0:
                record = run_record(config, process, read_metrics(out / METRICS), start.step, peak)
                write_whole(out / RESULTS, [record])
                show.line(f"{as_summary(record)} → {out}")
        checkpoints.close()
    return Outcome(done, is_finished, signals.received)


def _open(data: Path | WorkloadSource | None, config: RunConfig) -> Data:
    if isinstance(data, WorkloadSource):
        return OwnData(data, config)
    assert isinstance(config, BuiltinRun), "a workload has its own batches"
    return open_data(data, config)


def _check_started_alike(settings: dict[str, Scalar], process: Process) -> None:
    """Raise on every rank where one has other settings or other data than rank 0; it may have another device.

    Every host has its own command line, files and Python, whose source is the text where no data is named.
    """
    everywhere: list[dict[str, Scalar]] = [settings] * process.world_size
    dist.all_gather_object(everywhere, settings | {"step.device": ""}, group=process.group)
    for rank, theirs in enumerate(everywhere):
        if found := differences(theirs, everywhere[0]):
            raise AgreedError(
                f"rank {rank} was started otherwise than rank 0 (rank 0's → its own): {'; '.join(found)}. Start every "
                "rank with the same flags, configuration file and data"
            )


@dataclass(frozen=True)
class _Run:
    """The updates of a run that is opened and built, and what is written of them."""

    config: RunConfig
    process: Process
    data: Data
    learner: Learner
    checkpoints: CheckpointWriter
    note: Mapping[str, Any]  # what goes into every checkpoint beside the state
    meter: Meter
    metrics: MetricsWriter
    show: Show

    def go(self, done: int, signals: StopSignals) -> int:
        """Train on from update `done` to the last, or until some rank is told to stop; returns the updates made."""
        train = self.config.train
        readings = Readings(self.process, train.log_every)
        stopping, first = False, done + 1
        scheme = self.config.scheme(self.process.world_size, self.process.hosts).name
        while done < train.steps and not stopping:
            done += 1
            self.process.now(f"update {done} ({scheme})")
            update = self._first(done) if done == first else self.learner.update(done)
            # Losses are read one update late: to wait for this one would leave the GPU idle while the host launches.
            before = readings.post(done, update, stop=signals.received is not None)
            if before is not None:
                self._account(before)
                stopping = before.stop
            validate, save = self.data.validates and train.validates_after(done), train.saves_after(done)
            # What follows needs this update's reading now: a checkpoint of a loss that is NaN must never be written.
            if validate or save or stopping:
                reading = readings.take()
                assert reading is not None, "the update was just sent off"
                stopping = stopping or reading.stop
                self._account(reading, validate=validate, saved=save or stopping)
                if save or stopping:
                    begun = time.perf_counter()
                    self.checkpoints.save(done, training_state(self.learner.step.replica), self._note(done))
                    self.meter.checkpoint_ms = 1e3 * (time.perf_counter() - begun)
                readings.restart()
            self.checkpoints.poll()
        self.checkpoints.wait()
        return done

    def _first(self, number: int) -> Update:
        """Make the first update of this start, which may find what a user's workload cannot do."""
        update = on_all_ranks(self.process, lambda: self.learner.update(number))
        if lost := self.learner.buffers.lost():
            self.show.line(
                f"{', '.join(lost)}: training changes {'these buffers' if len(lost) > 1 else 'this buffer'}, and no "
                "checkpoint has what is not persistent: after a restart they begin anew (register_buffer(…, "
                "persistent=True) keeps them)"
            )
        return update

    def _note(self, done: int) -> dict[str, Any]:
        """Note in the checkpoint after an update, beside the state. All ranks call it."""
        self.learner.buffers.look()
        self.learner.buffers.share()
        return {**self.note, "tokens": self.meter.tokens, **self.data.note(done, self.process)}

    def _account(self, reading: Reading, *, validate: bool = False, saved: bool = False) -> None:
        """Check an update, validate if that is due, and write and show its row; `saved` where a checkpoint follows."""
        if not (math.isfinite(reading.loss) and math.isfinite(reading.gradient_norm)):
            raise self._not_finite(reading)
        rate = self.learner.learning_rate(reading.step)
        begun = time.perf_counter()
        if validate:
            self.process.now(f"the validation after update {reading.step}")
        loss = self.learner.validate() if validate else None
        took = 1e3 * (time.perf_counter() - begun) if validate else None
        row = self.meter.row(reading, rate, loss, validation_ms=took) | ({"saved": True} if saved else {})
        self.metrics.write(row)
        self.show.update(row)

    def _not_finite(self, reading: Reading) -> AgreedError:
        """Error that every rank raises. The checkpoint under way is of an update before, so it is completed first."""
        self.checkpoints.wait()
        good, last = "there is no checkpoint yet", self.checkpoints.last
        if last is not None:
            good = f"the last good checkpoint is {self.checkpoints.folder / name_of(last)}"
        return AgreedError(
            f"update {reading.step}: the loss is {reading.loss:g} and the gradient norm {reading.gradient_norm:g}, at "
            f"learning rate {self.learner.learning_rate(reading.step):.3g} in {self.config.step.precision}. Stopped, "
            f"and nothing of it is saved; {good}. A lower --learning-rate, a longer --warmup or a wider --precision "
            "may help, as a new run with another --out"
        )


class _RunFile(TypedDict):
    identity: dict[str, Any]


RUN = "run.json"  # what the run is: written once, at its start
CHECKPOINTS = "checkpoints"
RESULTS = "results.jsonl"  # written at the run's end, and so the sign of it


@dataclass(frozen=True)
class Start:
    is_new: bool
    checkpoint: Checkpoint | None  # None: from the first step
    is_finished: bool = False
    aside: tuple[str, ...] = ()  # later checkpoints, by the names that they were given

    @property
    def step(self) -> int:
        return 0 if self.checkpoint is None else self.checkpoint.step

    def tokens(self, config: RunConfig) -> int | None:
        """Tokens that the run was trained on so far; None where a workload's batches do not tell."""
        return config.tokens_after(self.step, None if self.checkpoint is None else self.checkpoint.note.get("tokens"))

    def describe(self, config: RunConfig, world_size: int, hosts: int, out: Path, parameters: str) -> str:
        """A run's first lines for the terminal: what is trained how, and from where. `parameters` says how many."""
        if self.is_finished:
            return f"the run in {out} is finished: all {config.train.steps} updates are made; nothing to do"
        told = (
            f"{config.name}: {parameters}, {config.train.steps} updates of {config.describe_update(world_size)}, "
            f"{config.scheme(world_size, hosts).label}, {config.step.precision} → {out}"
        )
        if self.checkpoint is not None:
            writers = counted(self.checkpoint.note.get("world_size"), "rank")
            told += f"\nresumed from {self.checkpoint.path.name}, written by {writers}"
        elif not self.is_new:
            told += "\nthe run was begun before, but has no checkpoint yet: from the first update again"
        if self.aside:
            told += f"\nset aside: {', '.join(self.aside)}"
        return told


def open_folder(
    out: Path, identity: Mapping[str, Scalar], *, updates: int, resume_from: str | None = None, is_restart: bool = False
) -> Start:
    """Find out where the run in `out` is, or begin one there. For one process; it alone changes the folder.

    A run that never made an update, as its settings cannot be run, counts as none.

    Args:
        identity: what the run's curve depends on.
        updates: that are made in all.
        resume_from: a checkpoint's name to go back to; None for the newest.
        is_restart: whether torchrun gives the command a second time, because a worker died. If it went back to
            `resume_from` before, it does not again, and what was saved since is gone on from.

    Raises:
        UsageError: the folder holds another run, cannot be written, or the checkpoint to go on from is damaged or not
            there. Then nothing was changed.
    """
    steps, rows = steps_in(out / CHECKPOINTS), read_metrics(out / METRICS)
    if not (out / RUN).exists() or not (steps or rows):
        if resume_from is not None:
            raise UsageError(
                f"--resume-from is {resume_from!r}, but {out} holds no run to go on with; leave it out to begin one, "
                "or give the --out of the run that is meant"
            )
        _begin(out, identity)
        return Start(is_new=True, checkpoint=None)
    theirs = read_json(out / RUN, _RunFile, "the run ")["identity"]
    _check_same(out, identity, theirs)
    checkpoint, later = None, []
    if (step := _choose(out, steps, resume_from, is_restart)) is not None:
        checkpoint = open_checkpoint(out / CHECKPOINTS, step)
        _check_same(checkpoint.path, identity, checkpoint.note.get("identity", {}))
        later = [each for each in steps if each > step]
    is_finished = step == updates and (out / RESULTS).exists() and not later
    tidy(out / CHECKPOINTS)
    if later:
        (out / RESULTS).unlink(missing_ok=True)  # before its checkpoint is, or what goes on would look finished
    aside = set_aside(out / CHECKPOINTS, later)
    return Start(is_new=False, checkpoint=checkpoint, is_finished=is_finished, aside=tuple(aside))


def check_not_of_others(out: Path) -> None:
    """Raise `UsageError` where the folder holds no run but something else. It leaves the folder as it is."""
    if (out / RUN).exists() or not out.is_dir():
        return
    if others := sorted(path.name for path in out.glob("[!.]*") if path.name != CHECKPOINTS):
        what = f"no run but other files ({', '.join(others[:3])})"
        raise UsageError(f"{out} holds {what}; choose a new folder with --out")


def check_shared(out: Path) -> None:
    """Raise `UsageError` where this rank does not see the folder that rank 0 made."""
    if not (out / RUN).exists():
        raise UsageError(f"{out / RUN}, which rank 0 has, is not here; give an --out that all hosts share")


def _begin(out: Path, identity: Mapping[str, Scalar]) -> None:
    with aside(out / RUN) as draft, draft.open("x", encoding="utf-8") as file:
        (out / CHECKPOINTS).mkdir(parents=True, exist_ok=True)
        tidy(out / CHECKPOINTS)
        file.write(json.dumps({"identity": dict(identity)}, indent=1))


def _choose(out: Path, steps: Sequence[int], resume_from: str | None, is_restart: bool) -> int | None:
    """The step of the checkpoint to load, the newest or the one that was named; None where there is none."""
    newest = steps[-1] if steps else None
    if resume_from is None:
        return newest
    if is_restart and newest is not None:
        with contextlib.suppress(UsageError):  # damaged: that may be why an older one is named
            if open_checkpoint(out / CHECKPOINTS, newest).note.get("resumed_from") == resume_from:
                return newest
    names = {name_of(each): each for each in steps}
    if (named := names.get(Path(resume_from).name)) is None:
        there = ", ".join(names) or "none"
        raise UsageError(f"--resume-from is {resume_from!r}; the checkpoints in {out} are: {there}")
    return named


def _check_same(where: Path, mine: Mapping[str, Scalar], theirs: Mapping[str, Scalar]) -> None:
    if found := differences(mine, theirs):
        raise UsageError(
            f"{where} is of another run (its own → asked for): {'; '.join(found)}. Go on with its own settings, or "
            "start a new run with another --out"
        )
