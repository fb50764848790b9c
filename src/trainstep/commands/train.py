"""`trainstep train`: train one of our models, alone or on as many processes as torchrun starts."""

from __future__ import annotations

import signal
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainstep.commands.options import BuiltinModel, ModelFlags, StepFlags, preset
from trainstep.commands.output import INTERRUPTED, console_for_output
from trainstep.config import load_toml, replace_checked
from trainstep.train.config import RunConfig, TrainConfig


@dataclass(frozen=True)
class TrainFlags(TrainConfig):
    """How a run trains: its length, its batch, its schedule, its scheme, and what it keeps."""

    def __post_init__(self) -> None:
        """Left unchecked while flags are parsed, so that the parser does not wrap our one-line errors."""

    def checked(self) -> TrainConfig:
        """The configuration, checked."""
        return TrainConfig(**vars(self))


@dataclass(frozen=True, kw_only=True)
class Train(BuiltinModel):
    """Train a model on text or token ids, alone or under torchrun; started again, it goes on where it was."""

    train: TrainFlags = field(default_factory=TrainFlags)
    resume_from: str | None = None
    """Go on from this checkpoint (its folder's name) instead of the newest; later ones are renamed, not removed."""
    timeout: float = 600.0
    """Seconds that a rank waits for the others before it is an error."""
    out: Path = Path("results/train")
    """Folder of the run: metrics.jsonl, tensorboard/, checkpoints/, samples.txt, results.jsonl. A run that is there
    already goes on; another one is never overwritten."""

    def run(self) -> int:
        """Train; the first rank prints."""
        from trainstep.parallel.process import AgreedError, join_group_or_alone
        from trainstep.train.loop import train
        from trainstep.train.metrics import Show

        config = RunConfig(self.model_name(), self.model.checked(), self.step.checked(), self.train.checked())
        mistake: AgreedError | None = None
        with join_group_or_alone(config.step.device, timeout_s=self.timeout) as process:
            console = console_for_output() if process.rank == 0 else None
            show = Show(console, log_every=config.train.log_every)
            try:
                outcome = train(config, self.data, self.out, process, show, resume_from=self.resume_from)
            except AgreedError as error:  # all ranks have it, so they leave the group in order, and one says it
                mistake = error
        if mistake is not None:
            if process.rank == 0:
                raise mistake
            return 2
        if outcome.is_finished:
            return 0
        by = outcome.stopped_by
        why = "another rank was told to stop" if by is None else by.name
        show.line(f"{why}: stopped after update {outcome.step}, which is saved; start again to go on")
        return INTERRUPTED if by is signal.SIGINT else 0


def train_defaults(size: str | None, config: Path | None) -> dict[str, Any]:
    """The command's model, step and run that `--size` and `--config` name, before other flags change them."""
    model, step = preset(size, config)
    train = TrainConfig()
    if config is not None:
        train = replace_checked(train, load_toml(config).train, where=f"{config} [train]")
    return {
        "model": ModelFlags(**vars(model)),
        "step": StepFlags(**vars(step)),
        "train": TrainFlags(**vars(train)),
    }
