"""`trainstep bench …`: experiments over a grid of cases."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainstep.commands.grids import commas, grid_of
from trainstep.commands.options import Common, OneModel, short_name
from trainstep.commands.output import run_and_report
from trainstep.config import StepConfig, StepMode, resolve_size

StepGrid: Any = grid_of(StepConfig)


@dataclass(frozen=True, kw_only=True)
class BenchStep(Common):
    """Time forward, loss, backward and optimizer over a grid: every flag with commas is an axis."""

    size: commas(str) = ("tiny",)  # type: ignore[valid-type]
    """Named sizes (tiny, small, medium, large, xl, 2.7B, 10B) or .toml files with a [model] table."""
    workload: str | None = None
    """Your own model instead: package.module:factory, a function returning a trainstep.Workload."""
    data: Path | None = None
    """Text file, folder of text, or .bin of token ids; by default the Python standard library's source."""
    grid: StepGrid = field(default_factory=StepGrid)
    """How the steps are taken; every combination of the values is a case."""
    mode: commas(StepMode) = ("step",)  # type: ignore[valid-type]
    """forward (without gradients), forward-backward, or the whole step with the optimizer."""
    warmup: commas(int) = (5,)  # type: ignore[valid-type]
    """Steps before the timed ones. Several values share one run, each row being its window."""
    steps: int = 10
    """Timed steps per case."""
    repeat: int = 1
    """Passes over the whole grid; from 2 on, the passes are compared with each other."""
    out: Path = Path("results/bench-step")
    """Folder for results.jsonl, tables/ and report.html."""

    def run(self) -> int:
        """Measure, print and write."""
        from trainstep.bench.step import grid_cases, run_cases
        from trainstep.workload import builtin_source, factory_source

        if self.workload is None:
            models = [(name, resolve_size(name)) for name in self.size]
            sources = [builtin_source(short_name(name), model, self.data) for name, model in models]
        else:
            sources = [factory_source(self.workload)]
        axes = {each.name: getattr(self.grid, each.name) for each in dataclasses.fields(StepGrid)}
        cases = grid_cases(sources, axes, modes=self.mode, warmups=self.warmup, steps=self.steps, repeat=self.repeat)
        return run_and_report(run_cases(cases), self.out, "bench step", total=len(cases))


@dataclass(frozen=True, kw_only=True)
class BenchLadder(OneModel):
    """Climb the ladder alone: from the plain step upwards, one checked change per rung."""

    warmup: int = 3
    """Steps before the timed ones."""
    out: Path = Path("results/bench-ladder")
    """Folder for results.jsonl, tables/ and report.html."""

    def run(self) -> int:
        """Measure, print and write."""
        from trainstep.bench.ladder import climb

        source = self.source()
        records = climb(source, self.step.checked(), warmup=self.warmup, steps=self.steps)
        return run_and_report(records, self.out, f"ladder of {source.name}")
