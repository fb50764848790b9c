"""`trainstep dtypes`: which dtype everything really has."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tyro.conf import FlagCreatePairsOff

from trainstep.commands.options import Common, axes_of, flags_of, sources
from trainstep.commands.output import run_and_report
from trainstep.config import StepConfig

PRECISIONS = ("fp32", "bf16", "fp16")
StepGrid: Any = flags_of(StepConfig, several=True, defaults={"precision": PRECISIONS})


@dataclass(frozen=True, kw_only=True)
class Dtypes(Common):
    """Show the dtype of every module's parameters, inputs, outputs and gradients, of the result and of the loss."""

    accumulation: FlagCreatePairsOff[bool] = False
    """Instead, add 0.01 a thousand times in four mixtures of fp32 and fp16, and say why the sums differ."""
    size: str | None = None
    """Named size (tiny, small, medium, large, xl, 2.7B, 10B) or a .toml file with a [model] table; by default tiny."""
    workload: str | None = None
    """Your own model instead: package.module:factory, a function returning a trainstep.Workload."""
    data: Path | None = None
    """Text file, folder of text, or .bin of token ids; by default the Python standard library's source."""
    grid: StepGrid = field(default_factory=dict)
    """How the step is taken; every combination of the values is shown."""
    out: Path = Path("results/dtypes")
    """Folder for results.jsonl, tables/ and report.html."""

    def run(self) -> int:
        from trainstep.bench.cases import expand
        from trainstep.bench.dtypes import accumulation_records, dtype_records

        if self.accumulation:
            return run_and_report(accumulation_records(), self.out, "dtypes --accumulation")
        (source,) = sources([self.size] if self.size else [], self.workload, self.data)
        configs = [StepConfig(**each) for each in expand(axes_of({"precision": PRECISIONS} | self.grid, StepConfig()))]
        return run_and_report(dtype_records(source, configs), self.out, f"dtypes of {source.name}")
