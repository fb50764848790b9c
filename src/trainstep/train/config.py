"""Configuration of a training run: its length, batch, schedule, scheme, and what it keeps. Imports no torch.

The batch that is configured is the *global* one, of all ranks together. So the same configuration makes the same loss
curve on any number of ranks.
"""

from __future__ import annotations

import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from trainstep.base.config import CASE, RESUMABLE, ModelConfig, StepConfig, settings_with
from trainstep.base.errors import UnsupportedError, UsageError
from trainstep.base.precision import PRECISIONS
from trainstep.base.schemes import SCHEMES, Scheme, TrainScheme
from trainstep.checkpointing.policies import INSTEAD, policy_of
from trainstep.rows.records import Scalar

MOST = 10**15  # parameters of a model, and tokens of an update: more is a slip of the keyboard


@dataclass(frozen=True)
class TrainConfig:
    """Settings of a run: its length, its batch, its schedule, its scheme, and what it keeps."""

    steps: int = 200
    """Updates of the weights."""
    global_batch: int = 32
    """Sequences per update over all ranks: --batch per rank and pass, accumulated over as many passes as it takes."""
    batches_per_update: int = 1
    """Batches of a --workload per update, over all ranks, which share them out; ranks that are more than the batches
    divide their rows."""
    warmup: float = 0.1
    """The part of the updates over which the learning rate rises to --learning-rate; a cosine follows. 0 for a
    --workload, whose optimizer has its own rates: they rise to themselves."""
    min_learning_rate: float = 0.1
    """End of the cosine, as a fraction of --learning-rate. 1 for a --workload: its rates stay as they are."""
    clip_norm: float = 1.0
    """Gradients are scaled down to this norm, taken over all of them together; inf, as for a --workload: never."""
    weight_decay: float = 0.1
    """AdamW's decoupled weight decay, of all parameters."""
    validation_fraction: float = 0.05
    """The part of the tokens, at their end, that is kept for validation."""
    eval_every: int = 50
    """Updates between two validations; there is one at the end too."""
    eval_batches: int = 2
    """Global batches per validation: the same ones every time."""
    save_every: int = 50
    """Updates between two checkpoints; there is one at the end too."""
    keep: int = 3
    """Checkpoints kept, the newest ones."""
    log_every: int = 10
    """Updates between two lines on the terminal; files have every one."""
    scheme: TrainScheme = "auto"
    """single (one process), ddp (every rank has all), sharded-optimizer (gradients and optimizer state in slices), fsdp
    (weights too), hsdp (fsdp in each of several replicas). auto: ddp on several ranks, else single."""
    replicas: int = 0
    """Replicas of hsdp, each sharded over consecutive ranks; 0: one on each host, or two on a single host."""
    blocks_per_group: int = 1
    """Blocks that are gathered together, in fsdp and hsdp. More ask less of the host, and take more memory."""
    bucket_mb: float | None = None
    """Megabytes of gradients per call (ddp and sharded-optimizer); by default 25, or by copies a sixteenth of all."""
    allow_unused: bool = False
    """Parameters of a --workload may get no gradient (ddp and sharded-optimizer), at a collective and a wait of the
    host in every update."""
    tensorboard: bool = True
    """Write TensorBoard's event files too (needs the package tensorboard)."""

    def __post_init__(self) -> None:
        counts = ("steps", "global_batch", "batches_per_update", "eval_every", "eval_batches", "save_every", "keep")
        for name in (*counts, "log_every", "blocks_per_group"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} is {getattr(self, name)}; expected 1 or more")
        for name in ("weight_decay", "bucket_mb", "replicas"):
            if getattr(self, name) is not None and not getattr(self, name) >= 0:
                raise UsageError(f"{name} is {getattr(self, name)}; expected 0 or more")
        for name in ("warmup", "min_learning_rate"):
            if not 0 <= getattr(self, name) <= 1:
                raise UsageError(f"{name} is {getattr(self, name)}; expected a fraction from 0 to 1")
        if not self.clip_norm > 0:
            raise UsageError(f"clip_norm is {self.clip_norm}; expected a positive number, or inf for no clipping")
        if not 0 < self.validation_fraction < 1:
            raise UsageError(f"validation_fraction is {self.validation_fraction}; expected a number between 0 and 1")

    @property
    def is_scheduled(self) -> bool:
        """True if the learning rate changes from update to update."""
        return self.warmup > 0 or self.min_learning_rate < 1

    def validates_after(self, step: int) -> bool:
        return step % self.eval_every == 0 or step == self.steps

    def saves_after(self, step: int) -> bool:
        return step % self.save_every == 0 or step == self.steps


OF_WORKLOADS = TrainConfig(warmup=0.0, min_learning_rate=1.0, clip_norm=math.inf)
"""Settings of a run of a user's workload unless flags say otherwise: its optimizer as it is, and nothing clipped."""
OF_BUILTIN = ("global_batch", "weight_decay", "validation_fraction")
"""Fields that say nothing of a workload, which has its own batches and optimizer."""
OF_OWN = ("batches_per_update", "allow_unused")
"""Fields that say nothing of a built-in model."""


@dataclass(frozen=True)
class RunConfig(ABC):
    """A run in full: the model, how a step is taken, and how the run goes. `BuiltinRun` and `OwnRun` are the kinds."""

    name: str
    """Name of the model in tables; of a user's workload, what names its factory."""
    step: StepConfig
    """Settings of one rank and one pass, as for the batch; the learning rate is the schedule's peak."""
    train: TrainConfig

    silent: ClassVar[tuple[str, ...]]
    """Settings that say nothing of this kind of model, as `step.NAME` and `train.NAME`."""

    @abstractmethod
    def passes(self, world_size: int) -> int:
        """Count the passes of a rank in an update."""

    @abstractmethod
    def describe_update(self, world_size: int) -> str:
        """Say what an update takes, and how the ranks share it."""

    @abstractmethod
    def tokens_after(self, step: int, noted: int | None) -> int | None:
        """Count the tokens of so many updates; `noted` has the checkpoint after them, None where none was counted."""

    @abstractmethod
    def model_settings(self) -> dict[str, Scalar]:
        """Name the model: its settings, or what makes it."""

    def learning_rate(self, step: int, peak: float | None = None) -> float:
        """The learning rate of update number `step`, from 1 on: warm-up, then half a cosine (Loshchilov & Hutter 2017).

        It is peak · step / warmup up to the end of the warm-up, and then falls to peak · floor at the last update.
        The peak is by default the step's learning rate.
        """
        peak = self.step.learning_rate if peak is None else peak
        floor, steps = self.train.min_learning_rate, self.train.steps
        assert 1 <= step <= steps, f"update {step} of {steps}"
        warmup = round(self.train.warmup * steps)
        if step <= warmup:
            return peak * step / warmup
        progress = (step - warmup) / (steps - warmup)
        return peak * (floor + (1 - floor) * (1 + math.cos(math.pi * progress)) / 2)

    def scheme(self, world_size: int, hosts: int = 1) -> Scheme:
        """Scheme that this number of ranks trains with, in buckets, groups and replicas as configured."""
        name = self.train.scheme
        if name == "auto":
            name = "single" if world_size == 1 else "ddp"
        (scheme,) = SCHEMES[name].by_blocks([self.train.blocks_per_group])
        scheme = dataclasses.replace(scheme, bucket_mb=self.train.bucket_mb)
        return scheme.on(world_size, hosts, self.train.replicas or None)

    def _ranks_and_passes(self, world_size: int) -> str:
        passes = self.passes(world_size)
        return f"{counted(world_size, 'rank')} × {passes} pass{'es' if passes > 1 else ''}"

    def check(self, world_size: int, hosts: int = 1) -> None:
        """See that this can be trained on that many ranks, before anything is built.

        Raises:
            UsageError: the batch does not divide, the context is too long, or the scheme is for one process.
            UnsupportedError: fp16, or ranks that make no replicas.
        """
        # All of it is arithmetic, so that a mistake ends the run before the minutes that building may take.
        if self.train.scheme == "single" and world_size > 1:
            raise UsageError(
                f"scheme single on {world_size} ranks would train {world_size} models that know nothing of each other; "
                "use --scheme ddp, sharded-optimizer, fsdp or hsdp"
            )
        scheme = self.scheme(world_size, hosts)
        if self.train.replicas and not scheme.is_hybrid:
            raise UsageError(
                f"replicas is {self.train.replicas}, and {scheme.name} makes none; use --scheme hsdp, or leave it out"
            )
        if self.train.blocks_per_group > 1 and not scheme.shards_weights:
            raise UsageError(
                f"blocks_per_group is {self.train.blocks_per_group}, and {scheme.name} gathers no blocks; use --scheme "
                "fsdp or hsdp, or leave it out"
            )
        if self.train.bucket_mb is not None and scheme.wrapper not in ("ddp", "sharded-optimizer"):
            raise UsageError(
                f"bucket_mb is {self.train.bucket_mb:g}, and {scheme.name} sends no buckets; use --scheme ddp or "
                "sharded-optimizer, or leave it out"
            )
        if PRECISIONS[self.step.precision].needs_scaler:
            raise UnsupportedError(
                f"train does not take {self.step.precision}: its loss scaler skips steps, so that runs could not be "
                "resumed and compared step by step; use --precision bf16, which needs no scaler"
            )
        policy = policy_of(self.step.checkpointing)
        if policy is not None and policy.update_in_backward:
            self._check_updates_in_backward(world_size)
        self.scheme(world_size, hosts).check(world_size)

    def _check_updates_in_backward(self, world_size: int) -> None:
        passes, clip_norm = self.passes(world_size), self.train.clip_norm
        why = f"{world_size} ranks average them" if world_size > 1 else ""
        why = why or (f"an update of {passes} passes adds them up" if passes > 1 else "")
        why = why or (f"clip_norm {clip_norm:g} needs all of them" if clip_norm < math.inf else "")
        if why:
            raise UsageError(
                f"the checkpointing policy {self.step.checkpointing} updates in backward, which frees gradients as "
                f"they come, and {why}; {INSTEAD}, or train in one process and pass, with --clip-norm inf"
            )

    def case(self) -> dict[str, Scalar]:
        """Give the settings of a step and an update, as the fields of a `TrainRow`; None where they say nothing."""
        fields = {f"step.{name}": getattr(self.step, name) for name in settings_with(CASE)}
        fields |= {f"train.{name}": getattr(self.train, name) for name in ("global_batch", "batches_per_update")}
        told = {name: None if name in self.silent or value == "none" else value for name, value in fields.items()}
        return {name.partition(".")[2]: value for name, value in told.items()}

    def settings(self, data: Mapping[str, Scalar]) -> dict[str, Scalar]:
        """All of the run, by name. `data` describes the tokens, or the workload's module and batches."""
        rooms = {"step": vars(self.step), "train": vars(self.train)}
        fields = {f"{room}.{name}": value for room, values in rooms.items() for name, value in values.items()}
        own = {name: "inf" if value == math.inf else value for name, value in fields.items() if name not in self.silent}
        return self.model_settings() | own | {f"data.{name}": value for name, value in data.items()}

    def identity(self, data: Mapping[str, Scalar]) -> dict[str, Scalar]:
        """Settings that the loss curve depends on, by name: a run goes on only with the same. `data` describes the
        tokens."""
        return {name: value for name, value in self.settings(data).items() if name not in MAY_CHANGE}


@dataclass(frozen=True)
class BuiltinRun(RunConfig):
    """A run of a built-in model on tokens."""

    model: ModelConfig
    """Shape of the model."""

    silent = tuple(f"train.{name}" for name in OF_OWN)

    @property
    def tokens_per_update(self) -> int:
        """Tokens of an update; a workload's batches are counted as they come."""
        return self.train.global_batch * self.step.context

    def passes(self, world_size: int) -> int:
        return self.train.global_batch // (self.step.batch * world_size)

    def describe_update(self, world_size: int) -> str:
        how = f"{self._ranks_and_passes(world_size)} × batch {self.step.batch}"
        return f"{self.train.global_batch} × {self.step.context} tokens ({how})"

    def tokens_after(self, step: int, noted: int | None) -> int:
        return step * self.tokens_per_update

    def model_settings(self) -> dict[str, Scalar]:
        return {f"model.{name}": value for name, value in vars(self.model).items()}

    def check(self, world_size: int, hosts: int = 1) -> None:
        sizes = {"parameters": self.model.num_parameters, "tokens of an update": self.tokens_per_update}
        for name, count in sizes.items():
            if count > MOST:
                raise UsageError(f"the number of {name} is {count:.3g}; at most {MOST:.0e} can be. Check the sizes")
        # A remainder would give some ranks fewer sequences, and their mean gradient another weight.
        at_once = self.step.batch * world_size
        if self.train.global_batch % at_once:
            raise UsageError(
                f"global_batch {self.train.global_batch} does not divide into passes of {at_once} sequences: "
                f"{counted(world_size, 'rank')} × batch {self.step.batch}; choose --global-batch among the multiples "
                f"of {at_once}, or another --batch"
            )
        self.model.require_context(self.step.context)
        super().check(world_size, hosts)
        if self.train.blocks_per_group > self.model.num_layers:
            raise UsageError(
                f"blocks_per_group is {self.train.blocks_per_group}; the model has {self.model.num_layers} blocks"
            )


@dataclass(frozen=True)
class OwnRun(RunConfig):
    """A run of a user's workload on its own batches."""

    silent = (
        *(f"train.{name}" for name in OF_BUILTIN),
        *(f"step.{name}" for name in ("batch", "context", "loss", "learning_rate")),
    )

    def passes(self, world_size: int) -> int:
        return division(self.train.batches_per_update, world_size)[0]

    def describe_update(self, world_size: int) -> str:
        count, groups = self.train.batches_per_update, division(self.train.batches_per_update, world_size)[1]
        divided = f", {groups} ranks divide the rows of a batch" if groups > 1 else ""
        return f"{count} batch{'es' if count > 1 else ''} ({self._ranks_and_passes(world_size)}{divided})"

    def tokens_after(self, step: int, noted: int | None) -> int | None:
        return noted if step else 0

    def model_settings(self) -> dict[str, Scalar]:
        return {"workload": self.name}

    def case(self) -> dict[str, Scalar]:
        usual = StepConfig()  # whose attention and optimizer stand for the workload's own
        own = [name for name in ("attention", "optimizer") if getattr(self.step, name) == getattr(usual, name)]
        return super().case() | dict.fromkeys(own)


MAY_CHANGE = {
    *(f"step.{name}" for name in settings_with(RESUMABLE)),
    *(f"train.{name}" for name in ("eval_every", "save_every", "keep", "log_every", "scheme", "bucket_mb")),
    *(f"train.{name}" for name in ("replicas", "blocks_per_group", "allow_unused", "tensorboard")),
}
"""Settings that may differ when a run goes on: the curve does not depend on them, or by roundings only."""


def differences(mine: Mapping[str, Scalar], theirs: Mapping[str, Scalar]) -> list[str]:
    """Fields in which two identities differ, as `name: theirs → mine`."""
    pairs = [(name, theirs.get(name, "absent"), mine.get(name, "absent")) for name in dict.fromkeys([*theirs, *mine])]
    return [f"{name}: {there} → {here}" for name, there, here in pairs if there != here]


def division(batches: int, world_size: int) -> tuple[int, int]:
    """Division of an update's batches among ranks: how many batches a rank takes part in, and how many ranks divide
    each.

    As few as can be: 4 ranks take 4 batches whole, and of 2 batches, or of 6, each is divided among 2 ranks.
    """
    groups = math.gcd(batches, world_size)
    return batches // groups, world_size // groups


def counted(count: int | None, what: str) -> str:
    """`1 rank`, `2 ranks`."""
    return f"{count} {what}{'s' if count != 1 else ''}"
