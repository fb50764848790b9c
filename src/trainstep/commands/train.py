"""`trainstep train`: train one of our models, alone or on as many processes as torchrun starts."""

from __future__ import annotations

import dataclasses
import signal
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainstep.commands.options import BuiltinModel, flags_of, words_of
from trainstep.commands.output import INTERRUPTED, console_for_output
from trainstep.config import load_toml, replace_checked
from trainstep.errors import UsageError
from trainstep.train.config import RunConfig, TrainConfig
from trainstep.train.launchers import Launch

TrainFlags: Any = flags_of(TrainConfig)
LaunchFlags: Any = flags_of(Launch)


@dataclass(frozen=True, kw_only=True)
class Train(BuiltinModel):
    """Train a model on text or token ids, alone or under torchrun; started again, it goes on where it was."""

    train: TrainFlags = field(default_factory=dict)
    launch: LaunchFlags = field(default_factory=dict)
    resume_from: str | None = None
    """Go on from this checkpoint (its folder's name) instead of the newest; later ones are renamed, not removed."""
    timeout: float = 600.0
    """Seconds that a rank waits for the others before it is an error."""
    out: Path = Path("results/train")
    """Folder of the run: metrics.jsonl, tensorboard/, checkpoints/, samples.txt, results.jsonl. A run that is there
    already goes on; another one is never overwritten."""

    def run(self) -> int:
        if self.launch:
            print(self.launch_file(), end="")
            return 0
        from trainstep.bench.outcome import classify
        from trainstep.parallel.process import AgreedError, join_group_or_alone
        from trainstep.train.loop import train
        from trainstep.train.metrics import Show

        config = self.run_config()
        mistake: AgreedError | None = None
        with join_group_or_alone(config.step.device, timeout_s=self.timeout) as process:
            console = console_for_output() if process.rank == 0 else None
            show = Show(console, log_every=config.train.log_every)
            try:
                outcome = train(config, self.data, self.out, process, show, resume_from=self.resume_from)
            except AgreedError as error:  # all ranks have it, so they leave the group in order, and one says it
                mistake = error
            except (RuntimeError, MemoryError) as error:
                found = classify(error)
                if found.status != "out of memory":
                    raise
                raise UsageError(
                    f"out of memory: {found.reason}. A smaller --batch, --checkpointing every-1, or --scheme fsdp on "
                    "more processes takes less"
                ) from error
        if mistake is not None:
            if process.rank == 0:
                raise mistake
            return 2
        if outcome.is_finished:
            return 0
        by = outcome.stopped_by
        why = by.name if by else "another rank was told to stop"
        show.line(f"{why}: stopped after update {outcome.step}, which is saved; start again to go on")
        return INTERRUPTED if by is signal.SIGINT else 0

    def launch_file(self) -> str:
        """The file that starts this run elsewhere, when the run was checked for that many ranks."""
        launch, on_gpu = Launch(**self.launch), self.step.get("device") != "cpu"
        launch.check(list(self.launch), on_gpu=on_gpu)
        if self.size is None and self.config is None:
            raise UsageError("--emit needs --size or --config, as the default size depends on the machine")
        self.run_config().check(launch.ranks, launch.nodes)
        return launch.file(["train", *words_of(self, without=("launch",))], on_gpu=on_gpu)

    def run_config(self) -> RunConfig:
        """The run that these flags describe, checked."""
        train = TrainConfig()
        if self.config is not None:
            train = replace_checked(train, load_toml(self.config).train, where=f"{self.config} [train]")
        train = dataclasses.replace(train, **self.train)
        return RunConfig(self.model_name(), self.model_config(), self.step_config(), train)
