"""`trainstep train`: train one of our models or a user's, alone or on as many processes as torchrun starts."""

from __future__ import annotations

import dataclasses
import shlex
import signal
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainstep.base.config import load_toml, replace_checked
from trainstep.base.errors import UsageError
from trainstep.base.guards import code_of
from trainstep.commands.options import AnyModel, flags_of, words_of
from trainstep.commands.output import console_for_output, memory_as_mistake
from trainstep.commands.report import PAGE
from trainstep.train.config import OF_BUILTIN, OF_OWN, OF_WORKLOADS, BuiltinRun, OwnRun, RunConfig, TrainConfig

if TYPE_CHECKING:
    from trainstep.train.metrics import Show

TrainFlags: Any = flags_of(TrainConfig)


@dataclass(frozen=True, kw_only=True)
class Train(AnyModel):
    """Train a model of ours on text or token ids, or a --workload on its own batches, alone or under torchrun. Started
    again, it goes on where it was."""

    has_summary = False

    train: TrainFlags = field(default_factory=dict)
    resume_from: str | None = None
    """Go on from this checkpoint (its folder's name) instead of the newest; later ones are renamed, not removed."""
    timeout: float = 600.0
    """Seconds that a rank waits for the others before it is an error."""
    out: Path = Path("results/train")
    """Folder of the run: metrics.jsonl, report.html, tensorboard/, checkpoints/, results.jsonl. A run that
    is there already goes on; another one is never overwritten."""

    def run(self) -> int:
        from trainstep.parallel.process import join_group_or_alone
        from trainstep.train.loop import train
        from trainstep.train.metrics import Show

        config = self.run_config()
        data = self.data if self.workload is None else self.source()
        with join_group_or_alone(config.step.device, timeout_s=self.timeout) as process:
            console = console_for_output() if process.rank == 0 else None
            show = Show(console, log_every=config.train.log_every)
            with memory_as_mistake():
                outcome = train(config, data, self.out, process, show, resume_from=self.resume_from)
        if process.rank == 0:
            self._draw_page(show)
        if outcome.is_finished:
            return 0
        by = outcome.stopped_by
        why = by.name if by else "another rank was told to stop"
        again = f"{'torchrun … -m ' * (process.world_size > 1)}trainstep train {shlex.join(words_of(self))}"
        show.line(f"{why}: stopped after update {outcome.step}, which is saved. To go on:\n  {again}")
        return code_of(by) if by is signal.SIGINT else 0

    def _draw_page(self, show: Show) -> None:
        """The page of the run as it ended. A run without a page is a run."""
        from trainstep.report.page import write_html
        from trainstep.train.history import history

        try:
            write_html([history(self.out)], self.out / PAGE, "trainstep train")
        except UsageError as error:
            show.line(f"no {PAGE}: {error}")
        else:
            show.line(f"{self.out / PAGE} has its curves")

    def run_config(self) -> RunConfig:
        """The run that these flags describe, checked."""
        table = {} if self.config is None else load_toml(self.config).train
        self._check_given({**table, **self.train})
        usual = TrainConfig() if self.workload is None else OF_WORKLOADS
        train = dataclasses.replace(replace_checked(usual, table, where=f"{self.config} [train]"), **self.train)
        if self.workload is None:
            return BuiltinRun(self.model_name(), self.step_config(), train, self.model_config())
        source = self.source()
        return OwnRun(source.name, self.own_step(source), train)

    def _check_given(self, given: Mapping[str, Any]) -> None:
        """Raise `UsageError` for settings that this model knows nothing of."""
        instead = dict.fromkeys(OF_BUILTIN, "leave it out") | {
            "global_batch": "give --batches-per-update instead",
            "weight_decay": "its own optimizer has one",
            "validation_fraction": "its Workload.validation has the batches to validate on",
        }
        for name in given:
            flag = f"--{name.replace('_', '-')}"
            if self.workload is not None and name in OF_BUILTIN:
                raise UsageError(f"{flag} is for the built-in models, and --workload {self.workload} brings its own: "
                                 f"{instead[name]}")  # fmt: skip
            if self.workload is None and name in OF_OWN:
                raise UsageError(f"{flag} is for a --workload, and none is named; leave it out")
