"""`trainstep dtypes`: which dtype everything really has."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path

from tyro.conf import FlagCreatePairsOff

from trainstep.commands.bench import StepGrid
from trainstep.commands.options import Common, short_name
from trainstep.commands.output import run_and_report
from trainstep.config import StepConfig, resolve_size
from trainstep.errors import UsageError


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
    grid: StepGrid = field(default_factory=lambda: StepGrid(precision=("fp32", "bf16", "fp16")))
    """How the step is taken; every combination of the values is shown."""
    out: Path = Path("results/dtypes")
    """Folder for results.jsonl, tables/ and report.html."""

    def run(self) -> int:
        """Run one step per configuration, print and write."""
        from trainstep.bench.dtypes import accumulation_records, dtype_records
        from trainstep.bench.grid import expand
        from trainstep.workload import builtin_source, factory_source

        if self.accumulation:
            return run_and_report(accumulation_records(), self.out, "dtypes --accumulation")
        if self.workload is not None:
            if self.size is not None or self.data is not None:
                raise UsageError("--workload brings its own model and data; leave out --size and --data")
            source = factory_source(self.workload)
        else:
            size = self.size or "tiny"
            source = builtin_source(short_name(size), resolve_size(size), self.data)
        axes = {each.name: getattr(self.grid, each.name) for each in dataclasses.fields(StepGrid)}
        configs = [StepConfig(**values) for values in expand(axes)]
        return run_and_report(dtype_records(source, configs), self.out, f"dtypes of {source.name}")
