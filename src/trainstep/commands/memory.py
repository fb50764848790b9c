"""`trainstep memory`: what a step keeps in memory, and what checkpointing makes of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from tyro.conf import Fixed, FlagCreatePairsOff, Suppress

from trainstep.commands.grids import commas
from trainstep.commands.options import OneModel, StepFlags
from trainstep.commands.output import run_and_report
from trainstep.errors import UsageError

if TYPE_CHECKING:
    from trainstep.report.records import Record
    from trainstep.workload import WorkloadSource


@dataclass(frozen=True)
class MemoryStepFlags(StepFlags):
    """How one training step is taken; the checkpointing policies have a flag of their own."""

    checkpointing: Suppress[Fixed[str]] = "none"


@dataclass(frozen=True, kw_only=True)
class Memory(OneModel):
    """Show what forward keeps for backward, and compare the ways to keep less of it."""

    residuals: FlagCreatePairsOff[bool] = False
    """What forward keeps for backward: the largest by module and operation, eager and compiled."""
    checkpointing: FlagCreatePairsOff[bool] = False
    """Predict and measure the peak of a step under checkpointing policies, and name the best."""
    policies: commas(str) = ()  # type: ignore[valid-type]
    """The policies to measure: any of none, every-K (for the input of every K blocks), selective, recursive; by default
    all, with a choice of K around the best."""
    memory_gib: float | None = None
    """GiB that a step may take, for naming the best policy; by default what the GPU has, on a CPU no limit."""
    step: MemoryStepFlags = field(default_factory=MemoryStepFlags)
    out: Path = Path("results/memory")
    """Folder for results.jsonl, tables/ and report.html."""

    def run(self) -> int:
        """Measure, print and write."""
        if not self.residuals and not self.checkpointing:
            raise UsageError("nothing to show; give --residuals, --checkpointing or both")
        if self.steps < 1:
            raise UsageError(f"steps is {self.steps}; expected at least 1")
        source = self.source()
        return run_and_report(self._records(source), self.out, f"memory of {source.name}")

    def _records(self, source: WorkloadSource) -> Iterator[Record]:
        from trainstep.bench.checkpointing import checkpointing_records, default_policies
        from trainstep.bench.residuals import residual_records

        config = self.step.checked()
        if self.residuals:
            yield from residual_records(source, config)
        if self.checkpointing:
            names = self.policies or default_policies(source, config)
            yield from checkpointing_records(source, config, names, memory_gib=self.memory_gib, steps=self.steps)
