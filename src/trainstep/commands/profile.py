"""Commands that look into a step: `trainstep analyze`, the main job; `profile`, its kernels; `dtypes`, of what types it
is."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from tyro.conf import FlagCreatePairsOff, arg

from trainstep.base.config import StepConfig
from trainstep.base.errors import UsageError
from trainstep.base.precision import PrecisionName
from trainstep.commands.options import READS, Climbed, Common, OneModel, axes_of, flags_of, own_precisions, sources
from trainstep.commands.output import run_and_report

if TYPE_CHECKING:
    from trainstep.rows.records import Row
    from trainstep.step.workload import WorkloadSource

DTYPES_OF: tuple[PrecisionName, ...] = ("fp32", "bf16", "fp16")
"""The precisions that `dtypes` shows, unless the workload's weights come in bf16."""
DtypesGrid: Any = flags_of(StepConfig, several=True, defaults={"precision": DTYPES_OF}, without=["graph"])


@dataclass(frozen=True, kw_only=True)
class Analyze(Climbed):
    """Measure a training step, explain it, make it faster change by change, and write the report."""

    steps: int | None = None
    """Timed steps per measurement, by default 10, or 6 with --quick; ratios have intervals from 7 up."""
    quick: FlagCreatePairsOff[bool] = False
    """Stop at the facts, the phases, the memory and the kernels: no compiling, no checks, no ladder, and few steps."""
    out: Path = Path("results/analyze")
    """Folder for results.jsonl, tables/, report.html and the profiler's trace (for ui.perfetto.dev). The default has
    a new folder for each launch."""

    def run(self) -> int:
        from trainstep.bench.analysis import analysis_records

        source = self.source()
        if self.quick and self.changes is not None:
            raise UsageError(f"--changes {self.changes} is of the ladder, which --quick leaves out; give one of them")
        asked: dict[str, Any] = {"steps": self.steps, "quick": self.quick, "changes": self.changes}
        config = self.own_step(source)
        with self.in_folder(source.name) as own:
            asked["trace"] = own.out / "trace.json.gz"
            return run_and_report(
                lambda on_part: analysis_records(source, config, **asked, on_part=on_part),
                own.out,
                f"analyze {source.name}",
            )


@dataclass(frozen=True, kw_only=True)
class Profile(OneModel):
    """Take a training step apart, or a trace of another program (--from): kernels by phase, module and family."""

    warmup: int = 3
    """Steps before those that are timed without the profiler."""
    profiled_steps: int | None = None
    """Steps that the profiler records, after as many of its own warm-ups as it needs: by default 3, or 1 of a model of
    more than 1,000 modules."""
    nvtx: FlagCreatePairsOff[bool] = False
    """Only run the steps, with their ranges announced to NVTX and the profiled ones between cudaProfilerStart and Stop,
    under nsys or ncu."""
    from_: Annotated[Path | None, arg(name="from")] = None
    """Read a trace instead of running anything: an nsys SQLite export, or torch.profiler's JSON (also gzipped)."""
    out: Path = Path("results/profile")
    """Folder for results.jsonl, tables/, report.html and the trace (trace.json.gz opens in ui.perfetto.dev). The
    default has a new folder for each launch."""

    def run(self) -> int:
        if min(self.steps, 3 if self.profiled_steps is None else self.profiled_steps) < 1 or self.warmup < 0:
            raise UsageError(
                f"steps is {self.steps}, profiled-steps {self.profiled_steps}, warmup {self.warmup}; expected at least "
                "one step of each kind, and no negative warm-up"
            )
        if self.from_ is not None:
            from trainstep.bench.profile import records_from_file

            self.refuse(READS, but=("from_", "out"))
            with self.in_folder(self.from_.stem) as own:
                return run_and_report(records_from_file(self.from_), own.out, f"profile of {self.from_.name}")
        if self.nvtx:
            self.refuse("{flag} is for steps without a profiler, which --nvtx times none of; leave it out", "steps")
            self.refuse("--nvtx writes nothing, so {flag} has no use; leave it out", "out")
        source = self.source()
        if self.nvtx:
            from trainstep.bench.profile import run_nvtx

            run_nvtx(source, self.own_step(source), warmup=self.warmup, steps=self.profiled_steps or 3)
            return 0
        with self.in_folder(source.name) as own:
            return run_and_report(own._records(source), own.out, f"profile of {source.name}")

    def _records(self, source: WorkloadSource) -> Iterator[Row]:
        from trainstep.bench.profile import ceiling_records, profile_records
        from trainstep.step.workload import resolve_device

        config, trace, warmup = self.own_step(source), self.out / "trace.json.gz", self.warmup
        yield from ceiling_records(resolve_device(config.device))
        yield from profile_records(
            source, config, warmup=warmup, steps=self.steps, profiled_steps=self.profiled_steps, trace=trace
        )


@dataclass(frozen=True, kw_only=True)
class Dtypes(Common):
    """Show the dtype of every module's parameters, inputs, outputs and gradients, of the result and of the loss."""

    size: str | None = None
    """Named size (tiny, small, medium, large, 2.7B, 8B, 10B, and each model of CS336's handouts with its year, such as
    2025/xl or 2026/xl) or a .toml file with a [model] table; by default tiny."""
    workload: str | None = None
    """Your own model instead: package.module:factory, a function returning a trainstep.Workload."""
    data: Path | None = None
    """Text file, folder of text, or .bin of token ids; by default the Python standard library's source."""
    grid: DtypesGrid = field(default_factory=dict)
    """Settings of the step; every combination of the values is shown."""
    out: Path = Path("results/dtypes")
    """Folder for results.jsonl, tables/ and report.html. The default has a new folder for each launch."""

    def run(self) -> int:
        from trainstep.bench.cases import expand
        from trainstep.bench.dtypes import dtype_records

        (source,) = sources([self.size] if self.size else [], self.workload, self.data)
        axes = axes_of(self.grid | own_precisions(source, self.grid, DTYPES_OF), StepConfig())
        configs = [StepConfig(**each) for each in expand(axes)]
        with self.in_folder(source.name) as own:
            return run_and_report(dtype_records(source, configs), own.out, f"dtypes of {source.name}")
