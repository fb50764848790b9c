"""`trainstep memory`: where the memory of a step goes, and how to make it fit."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from tyro.conf import FlagCreatePairsOff, arg

from trainstep.base.config import StepConfig, StepMode
from trainstep.base.errors import UsageError
from trainstep.commands.options import READS, OneModel, axes_of, commas, flags_of, optional_text, own_precisions
from trainstep.commands.output import run_and_report

if TYPE_CHECKING:
    from trainstep.rows.records import Row
    from trainstep.step.workload import WorkloadSource

_Fit: Any = optional_text("SIZE")
MemoryGrid: Any = flags_of(StepConfig, several=True, without=["checkpointing", "graph"])


@dataclass(frozen=True, kw_only=True)
class Memory(OneModel):
    """Show where the memory of a step goes. Without a choice of what to show: --peaks and --timeline."""

    peaks: FlagCreatePairsOff[bool] = False
    """The peak of forward alone and of a full step, phase by phase, predicted and measured."""
    timeline: FlagCreatePairsOff[bool] = False
    """Every allocation of a step: who owns the peak, the largest with the line that made them, a drawing, and a
    snapshot for pytorch.org/memory_viz."""
    residuals: FlagCreatePairsOff[bool] = False
    """Tensors that forward saves for backward: the largest by module and operation, eager and compiled. And the
    gradients that the backward of one block makes, by how it changes the memory in use."""
    fit: _Fit = None
    """Make the step fit this much memory (130GiB, 500MiB, or 65% of the plain peak; by default what the GPU has) at the
    least added time: choose for each block which activations to keep, compute again or send to host memory, then apply
    and measure it. --checkpointing @OUT/fit.json repeats the choice elsewhere. Several, divided by commas, share what
    is measured before the choice: fit-1.json and so on."""
    compare: FlagCreatePairsOff[bool] = False
    """With --fit: measure the policies that treat all blocks alike, too."""
    host_gib: float | None = None
    """With --fit: GiB of page-locked host memory for activations, 0 for none; by default a quarter of what is free."""
    update_after_backward: FlagCreatePairsOff[bool] = False
    """With --fit: no updates in backward, which free each block's gradients; for a training that clips or accumulates
    gradients."""
    snapshot: Annotated[Path | None, arg(name="from")] = None
    """Nothing is measured: draw the memory snapshot in this file, anyone's from _dump_snapshot of torch.cuda.memory."""
    policies: commas(str) = ()  # type: ignore[valid-type]
    """Checkpointing policies under which to show the step: any of none, every-1 (for the input of every block),
    selective."""
    mode: commas(StepMode) = ()  # type: ignore[valid-type]
    """Modes that --peaks and --timeline measure: forward (without gradients), forward-backward, or the whole step with
    the optimizer; by default forward,step."""
    step: MemoryGrid = field(default_factory=dict)
    """Settings of the steps; the checkpointing policies have a flag of their own."""
    out: Path = Path("results/memory")
    """Folder for results.jsonl, tables/, report.html and snapshot.pickle. The default has a new folder for each
    launch."""

    def run(self) -> int:
        if self.steps < 1:
            raise UsageError(f"steps is {self.steps}; expected at least 1")
        if self.host_gib is not None and not self.host_gib >= 0:
            raise UsageError(f"host_gib is {self.host_gib}; expected 0 or more")
        if self.fit is not None and self.policies:
            raise UsageError("--fit makes a policy of its own; leave out --policies")
        if self.snapshot is not None:
            from trainstep.bench.allocations import imported_records

            self.refuse(READS, but=("snapshot", "out"))
            with self.in_folder(self.snapshot.stem) as own:
                return run_and_report(imported_records(self.snapshot), own.out, f"memory of {self.snapshot.name}")
        for is_used, where, *names in (
            (self.fit is not None, "--fit", "compare", "host_gib", "steps", "update_after_backward"),
            (self.peaks or self.timeline or not self._chosen, "--peaks and --timeline", "mode"),
        ):
            if not is_used:
                self.refuse(f"{{flag}} is for {where}; add that, or leave it out", *names)
        source = self.source()
        with self.in_folder(source.name) as own:
            return run_and_report(own._records(source), own.out, f"memory of {source.name}")

    @property
    def _chosen(self) -> bool:
        return self.peaks or self.timeline or self.residuals or self.fit is not None

    def _records(self, source: WorkloadSource) -> Iterator[Row]:
        from trainstep.bench.allocations import allocation_records
        from trainstep.bench.memory import peak_records
        from trainstep.bench.residuals import residual_records

        shown = self._configs(source)
        modes: Sequence[StepMode] = self.mode or ("forward", "step")
        if self.peaks or not self._chosen:
            yield from peak_records(source, shown, modes)
        if self.timeline or not self._chosen:
            cases = list(itertools.product(shown, modes))
            for number, (config, mode) in enumerate(cases, start=1):
                name = "snapshot.pickle" if len(cases) == 1 else f"snapshot-{number}.pickle"
                yield from allocation_records(source, config, mode, self.out / name)
        if self.residuals:
            for config in shown:
                yield from residual_records(source, config)
        if self.fit is not None:
            from trainstep.bench.fit.search import Budget, fit_records

            budgets = Budget.parse_all(self.fit)
            files = itertools.count(1)
            for config in shown:
                names = ["fit.json" if len(shown) * len(budgets) == 1 else f"fit-{next(files)}.json" for _ in budgets]
                wanted = {budget: self.out / name for budget, name in zip(budgets, names, strict=True)}
                how: dict[str, Any] = {"host_gib": self.host_gib, "update_after_backward": self.update_after_backward}
                yield from fit_records(source, config, wanted, **how, compare=self.compare, steps=self.steps)

    def _configs(self, source: WorkloadSource) -> list[StepConfig]:
        """Every combination of the step's flags, under every policy."""
        from trainstep.bench.cases import expand

        preset = self.preset()[1]
        given = self.step | own_precisions(source, self.step, (preset.precision,))
        given |= {"checkpointing": self.policies} if self.policies else {}
        return [StepConfig(**values) for values in expand(axes_of(given, preset))]
