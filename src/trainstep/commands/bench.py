"""`trainstep bench …`: experiments over a grid of cases."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from tyro.conf import FlagCreatePairsOff, subcommand

from trainstep.base.config import StepConfig, StepMode, resolve_size
from trainstep.base.errors import UsageError
from trainstep.bench.cases import (
    FUSED_AXES,
    FUSED_INTERPRETED,
    GRIDS,
    INTERPRETED,
    AttentionCase,
    FusedCase,
    GridName,
    ListName,
    fused_cases,
    grid_cases,
    listed_cases,
    named_grid,
)
from trainstep.commands.bench_ranks import BenchCollectives, BenchParallel
from trainstep.commands.options import (
    Climbed,
    Common,
    OneModel,
    StepGrid,
    axes_of,
    commas,
    flags_of,
    own_precisions,
    shown,
    sources,
)
from trainstep.commands.output import run_and_report

if TYPE_CHECKING:
    from trainstep.rows.records import Scalar

_OF_GRIDS = {
    name: "; ".join(
        [shown(value), *(f"--grid {grid}: {shown(axes[name])}" for grid, axes in GRIDS.items() if name in axes)]
    )
    for name, value in vars(AttentionCase()).items()
}
AttentionGrid: Any = flags_of(AttentionCase, several=True, defaults=_OF_GRIDS)
FusedGrid: Any = flags_of(FusedCase, several=True, defaults=FUSED_AXES)


@dataclass(frozen=True, kw_only=True)
class _StepCases(Common):
    """Flags that say which steps."""

    size: commas(str) = ()  # type: ignore[valid-type]
    """Named sizes (tiny, small, medium, large, 2.7B, 8B, 10B, and each model of CS336's handouts with its year, such as
    2025/xl or 2026/xl) or .toml files with a [model] table; by default tiny."""
    workload: str | None = None
    """Your own model instead: package.module:factory, a function returning a trainstep.Workload."""
    data: Path | None = None
    """Text file, folder of text, or .bin of token ids; by default the Python standard library's source."""
    grid: StepGrid = field(default_factory=dict)
    """Settings of the steps; every combination of the values is a case."""
    mode: commas(StepMode) = ("step",)  # type: ignore[valid-type]
    """forward (without gradients), forward-backward, or the whole step with the optimizer."""
    warmup: commas(int) = (5,)  # type: ignore[valid-type]
    """Steps before the timed ones. Several values share one run, each row being its window. With 0 among them every
    case runs in a fresh process, which checks the step after it has timed it."""
    steps: int = 10
    """Timed steps per case."""
    sustained: FlagCreatePairsOff[bool] = False
    """Time a window of steps with no synchronisation between them, as training runs."""
    no_check: FlagCreatePairsOff[bool] = False
    """Leave out the check beside the plain step (loss, gradients, updates); rows then say so."""


@dataclass(frozen=True, kw_only=True)
class BenchStep(_StepCases):
    """Time forward, loss, backward and optimizer over a grid: every flag with commas is an axis."""

    repeat: int = 1
    """Passes over the whole grid; from 2 on, the passes are compared with each other."""
    out: Path = Path("results/bench-step")
    """Folder for results.jsonl, tables/ and report.html; with 0 among the warm-ups runs/ too, each run's output. The
    default has a new folder for each launch."""

    def run(self) -> int:
        from trainstep.bench.step import run_cases, step_cases
        from trainstep.bench.sweep.alone import cold_records

        models = sources(self.size, self.workload, self.data)
        axes = axes_of(self.grid | own_precisions(models[0], self.grid), StepConfig())
        times: dict[str, Any] = {"warmups": self.warmup, "steps": self.steps, "sustained": self.sustained}
        cases, check = step_cases(models, axes, modes=self.mode, repeat=self.repeat, **times), not self.no_check
        with self.in_folder() as own:
            if 0 in self.warmup and len(cases) > 1:  # a single case has this process, in which nothing ran yet
                data: dict[str, Scalar] = {} if self.data is None else {"data": str(self.data)}
                names = [{"size": size} for size in self.size] or [{"workload": self.workload} if self.workload else {}]
                flags = {model: {**name, **data} for model, name in zip(models, names, strict=True)}
                records = cold_records(cases, lambda case: flags[case.source], own.out, check=check)
            else:
                records = run_cases(cases, check=check)
            return run_and_report(records, own.out, "bench step", total=len(cases))


@dataclass(frozen=True, kw_only=True)
class BenchAb(_StepCases):
    """Compare the values of one flag by runs of their own: several fresh processes per value, in random order."""

    aa: FlagCreatePairsOff[bool] = False
    """Compare a case with itself. A difference that is then found is false. No flag has several values."""
    width: float = 0.02
    """Stop when the 95 % interval of the ratio is narrower than this share of it."""
    max_runs: int = 20
    """Stop with this many runs of each value in any case; at least 2."""
    out: Path = Path("results/bench-ab")
    """Folder for results.jsonl, tables/, report.html and runs/, where each run has its output. The default has a new
    folder for each launch."""

    def run(self) -> int:
        from functools import partial

        from trainstep.bench.sweep.ab import arms_of, run_alone, run_arms

        if self.max_runs < 2 or not self.width > 0:
            raise UsageError(
                f"max-runs is {self.max_runs}, width {self.width:g}; expected 2 runs or more, and a width above 0"
            )
        for size in self.size:
            resolve_size(size)  # a mistake is told before any run
        single = {"workload": self.workload, "data": self.data}
        axes: dict[str, Any] = {name: (str(value),) for name, value in single.items() if value is not None}
        axes |= {"size": self.size, **self.grid, "mode": self.mode, "warmup": self.warmup, "steps": (self.steps,)}
        axes |= {name: (True,) for name in ("sustained", "no_check") if getattr(self, name)}
        flag, arms = arms_of(axes, self.aa)
        with self.in_folder() as own:
            rows = run_arms(flag, arms, partial(run_alone, out=own.out), width=self.width, max_runs=self.max_runs)
            return run_and_report(rows, own.out, "bench ab")


@dataclass(frozen=True, kw_only=True)
class BenchLadder(Climbed, OneModel):
    """Climb the ladder alone: from the plain step upwards, one checked change at a time."""

    warmup: int = 3
    """Steps before the timed ones."""
    out: Path = Path("results/bench-ladder")
    """Folder for results.jsonl, tables/ and report.html. The default has a new folder for each launch."""

    def run(self) -> int:
        from trainstep.ladder.change import changes_of_step, chosen
        from trainstep.ladder.steps import climb
        from trainstep.step.workload import resolve_device

        source = self.source()
        config = self.own_step(source)
        named = chosen(changes_of_step(source, resolve_device(config.device).type, config), self.changes)
        times: dict[str, Any] = {"warmup": self.warmup, "steps": self.steps, "is_named": self.changes is not None}
        with self.in_folder(source.name) as own:
            return run_and_report(
                lambda on_part: climb(source, config, **times, changes=named, on_part=on_part),
                own.out,
                f"ladder of {source.name}",
            )


@dataclass(frozen=True, kw_only=True)
class BenchAttention(Common):
    """Time attention, forward and backward, over a grid: every flag with commas is an axis. Checked before timed.

    Without a GPU, TRITON_INTERPRET=1 checks our kernels on tiny shapes in Triton's interpreter and times nothing.
    """

    grid: GridName | None = None
    """A named grid, as defaults for the axes: naive (eager against compiled) or flash (what runs everywhere)."""
    case: ListName | None = None
    """A named list of shapes instead: leaderboard (CS336's case) or peers; --dtype, --deterministic and --impl still
    apply."""
    axes: AttentionGrid = field(default_factory=dict)
    """The cases; every combination of the values is one."""
    warmup: int = 5
    """Passes before the timed ones, in each round."""
    passes: int = 100
    """Timed passes, each forward and backward, divided among the rounds."""
    rounds: int = 5
    """Turns that the implementations of a shape take, in an order drawn anew each time; ratios to ours count a round as
    one sample from 3 up."""
    device: str = "auto"
    """auto (a GPU when there is one), cpu, cuda or cuda:N."""
    out: Path = Path("results/bench-attention")
    """Folder for results.jsonl, tables/ and report.html. The default has a new folder for each launch."""

    def run(self) -> int:
        from trainstep.bench.attention import OURS, AttentionTurns
        from trainstep.measure.step import is_interpreted
        from trainstep.step.workload import resolve_device

        if self.case:
            self.refuse("--case has shapes of its own, so {flag} has nothing to change; leave one of them out", "grid")
            cases = listed_cases(self.case, self.axes)
        elif self.grid:
            cases = named_grid(self.grid, self.axes)
        else:
            is_ours = OURS in self.axes.get("impl", (AttentionCase().impl,))
            usual = INTERPRETED if is_ours and is_interpreted(resolve_device(self.device)) else {}
            cases = grid_cases(axes_of({**usual, **self.axes}, AttentionCase()))
        times = {"warmup": self.warmup, "passes": self.passes, "rounds": self.rounds}
        records = AttentionTurns(self.device).run(cases, **times)
        with self.in_folder() as own:
            return run_and_report(records, own.out, "bench attention", total=len(cases))


@dataclass(frozen=True, kw_only=True)
class BenchFused(Common):
    """Time fused operators (RoPE, head with loss) by implementation. Checked before timed.

    Every flag with commas is an axis; without flags all operators, shapes and implementations are measured.
    """

    axes: FusedGrid = field(default_factory=dict)
    """The cases; every combination of the values that there is is one."""
    warmup: int = 5
    """Passes before the timed ones, in each round."""
    passes: int = 50
    """Timed passes, each forward and backward, divided among the rounds."""
    rounds: int = 5
    """Turns that the implementations of a problem take, in an order drawn anew each time; ratios to ours count a round
    as one sample from 3 up."""
    device: str = "auto"
    """auto (a GPU when there is one), cpu (ours in Triton's interpreter alone, of the shape tiny, not timed), cuda or
    cuda:N."""
    out: Path = Path("results/bench-fused")
    """Folder for results.jsonl, tables/ and report.html. The default has a new folder for each launch."""

    def run(self) -> int:
        from trainstep.bench.fused import FusedTurns
        from trainstep.measure.step import is_interpreted
        from trainstep.step.workload import resolve_device

        usual = FUSED_INTERPRETED if is_interpreted(resolve_device(self.device)) else FUSED_AXES
        cases = fused_cases(axes_of({**usual, **self.axes}, FusedCase()))
        times = {"warmup": self.warmup, "passes": self.passes, "rounds": self.rounds}
        records = FusedTurns(self.device).run(cases, **times)
        with self.in_folder() as own:
            return run_and_report(records, own.out, "bench fused", total=len(cases))


@dataclass(frozen=True)
class Bench:
    """Run an experiment over a grid of cases."""

    experiment: (
        Annotated[BenchStep, subcommand("step")]
        | Annotated[BenchAb, subcommand("ab")]
        | Annotated[BenchLadder, subcommand("ladder")]
        | Annotated[BenchAttention, subcommand("attention")]
        | Annotated[BenchFused, subcommand("fused")]
        | Annotated[BenchCollectives, subcommand("collectives")]
        | Annotated[BenchParallel, subcommand("parallel")]
    )
