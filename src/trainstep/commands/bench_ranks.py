"""`trainstep bench` over ranks that torchrun starts: collectives, and schemes of data parallel training."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from tyro.conf import FlagCreatePairsOff

from trainstep.base.config import CompileMode, StepConfig
from trainstep.base.errors import UsageError
from trainstep.base.schemes import BENCH_SCHEMES, SCHEMES, Scheme
from trainstep.bench.cases import COLLECTIVE_AXES, CollectiveCase, collective_cases
from trainstep.commands.options import Common, OneModel, axes_of, commas, flags_of
from trainstep.commands.output import OnPart, run_and_report

if TYPE_CHECKING:
    from trainstep.parallel.process import Process
    from trainstep.rows.records import Row, SoFar

CollectiveGrid: Any = flags_of(CollectiveCase, several=True, defaults=COLLECTIVE_AXES)


@dataclass(frozen=True, kw_only=True)
class BenchCollectives(Common):
    """Time collectives over a grid, started by torchrun: every flag with commas is an axis. Checked before timed."""

    axes: CollectiveGrid = field(default_factory=dict)
    """The cases; every combination of the values is one."""
    warmup: int = 5
    """Calls before the timed ones."""
    steps: int = 20
    """Timed calls per case."""
    device: str = "auto"
    """auto (the GPU of the local rank where there are GPUs, with NCCL), cpu (with Gloo) or cuda."""
    timeout: float = 600.0
    """Seconds that a rank waits for the others before it is an error."""
    out: Path = Path("results/bench-collectives")
    """Folder for results.jsonl, tables/ and report.html. The default has a new folder for each launch."""

    def run(self) -> int:
        from trainstep.bench.collectives import run_cases
        from trainstep.parallel.process import join_group

        axes = axes_of({**COLLECTIVE_AXES, **self.axes}, CollectiveCase())
        with join_group(self.device, timeout_s=self.timeout) as process:
            cases = collective_cases(axes, process.world_size)
            with folder_of_ranks(self, process) as out:
                records = run_cases(cases, process, warmup=self.warmup, steps=self.steps)
                return first_rank_reports(process, records, out, "bench collectives", len(cases))


FIRST_LOOK = ("single", "naive", "bucketed-25", "sharded-optimizer", "fsdp", "torch-ddp")
FIRST_BATCH, FIRST_CONTEXT = 1, 32
"""Batch and context of each rank, on CPUs, where nothing names a model: with these a first look takes under a minute on
two cores."""
FirstLookFlags: Any = flags_of(
    StepConfig,
    defaults={
        name: f"{getattr(StepConfig(), name)}; on a CPU {first} unless --size, --config or --workload is given"
        for name, first in (("batch", FIRST_BATCH), ("context", FIRST_CONTEXT))
    },
    without=["graph"],
)


@dataclass(frozen=True, kw_only=True)
class BenchParallel(OneModel):
    """Time one workload under schemes of data parallel training, started by torchrun. Checked before timed.

    Ranks talk over NCCL between GPUs, and over Gloo between CPUs.
    """

    step: FirstLookFlags = field(default_factory=dict)
    scheme: commas(Literal[("all", *BENCH_SCHEMES)]) = FIRST_LOOK  # type: ignore[valid-type]
    """The schemes, or all of them. single is one process without communication, which the others are held against;
    torch-* are PyTorch's."""
    replicas: commas(int) = ()  # type: ignore[valid-type]
    """Replicas of hybrid schemes (hsdp, torch-hsdp), each sharded over consecutive ranks; by default one on each host,
    or two on a single one. Several numbers are measured beside each other."""
    blocks_per_group: commas(int) = (1,)  # type: ignore[valid-type]
    """Blocks that are gathered together, in schemes that shard weights, torch's too. More ask less of the host, and
    take more memory. Several numbers are measured beside each other."""
    also_compile: commas(CompileMode) = ()  # type: ignore[valid-type]
    """Further values of --compile: every scheme is measured with each of them too, in the same run, and held against
    the same one process."""
    rounds: int = 3
    """Rounds: each scheme is built and timed so often, interleaved, in an order drawn anew each time. Ratios to torch's
    count a round as one sample from 3 up."""
    trace: FlagCreatePairsOff[bool] = False
    """Also record one step of each scheme with the profiler after timing: the report then draws them one below the
    other, and says how much communication is hidden behind computation."""
    warmup: int = 5
    """Steps before the timed ones, in each round."""
    sustained: FlagCreatePairsOff[bool] = False
    """Time a window of steps with no synchronisation between them, as training runs."""
    timeout: float = 600.0
    """Seconds that a rank waits for the others before it is an error."""
    out: Path = Path("results/bench-parallel")
    """Folder for results.jsonl, tables/, report.html and traces (ui.perfetto.dev opens them). The default has a new
    folder for each launch."""

    def run(self) -> int:
        from trainstep.bench.parallel import ParallelCase
        from trainstep.bench.parallel.run import run_cases
        from trainstep.parallel.process import join_group, on_all_ranks

        with join_group(self.step_config().device, timeout_s=self.timeout) as process:
            source = on_all_ranks(process, self.source)
            config = on_all_ranks(process, lambda: self.own_step(source))
            schemes = on_all_ranks(process, lambda: self.schemes(process))
            steps = [dataclasses.replace(config, compile=each) for each in (config.compile, *self.also_compile)]
            cases = [
                ParallelCase(source, step, scheme, self.warmup, self.steps, sustained=self.sustained)
                for step in dict.fromkeys(steps)
                for scheme in schemes
            ]
            with folder_of_ranks(self, process) as out:
                measure = partial(run_cases, cases, process, out if self.trace else None, rounds=self.rounds)
                total = len(cases) * (1 + self.trace)
                return first_rank_reports(process, lambda told: measure(on_part=told), out, "bench parallel", total)

    def step_config(self) -> StepConfig:
        step = super().step_config()
        if (self.size, self.config, self.workload) != (None, None, None) or not _on_cpus(step.device):
            return step
        return dataclasses.replace(step, **({"batch": FIRST_BATCH, "context": FIRST_CONTEXT} | self.step))

    def schemes(self, process: Process) -> list[Scheme]:
        """Schemes that were named, a hybrid one with each number of replicas."""
        if few := [each for each in self.replicas if each < 1]:
            raise UsageError(f"--replicas is {few[0]}; expected 1 or more")
        if few := [each for each in self.blocks_per_group if each < 1]:
            raise UsageError(f"--blocks-per-group is {few[0]}; expected 1 or more")
        most = max(self.blocks_per_group)
        if self.workload is None and most > (blocks := self.model_config().num_layers):
            raise UsageError(f"--blocks-per-group is {most}; the model has {blocks} blocks")
        names = BENCH_SCHEMES if "all" in self.scheme else self.scheme
        if not any(SCHEMES[name].is_hybrid for name in names):
            self.refuse("{flag} is for hsdp and torch-hsdp; name one of them by --scheme, or leave it out", "replicas")
        if not any(SCHEMES[name].shards_weights for name in names):
            why = "{flag} is for schemes that shard weights; name fsdp by --scheme, or leave it out"
            self.refuse(why, "blocks_per_group")
        named = [scheme for name in names for scheme in SCHEMES[name].by_blocks(self.blocks_per_group)]
        ranks, hosts = process.world_size, process.hosts
        return [scheme.on(ranks, hosts, each) for scheme in named for each in scheme.choices(self.replicas)]


def _on_cpus(device: str) -> bool:
    import torch

    return device == "cpu" or not torch.cuda.is_available()


@contextlib.contextmanager
def folder_of_ranks(command: Common, process: Process) -> Iterator[Path]:
    """The folder of a command, as `Common.in_folder` has it, which the first rank holds for all ranks."""
    from trainstep.parallel.process import on_first_rank

    with contextlib.ExitStack() as stack:
        yield on_first_rank(process, lambda: vars(stack.enter_context(command.in_folder()))["out"])


def first_rank_reports(
    process: Process,
    records: Iterable[Row | SoFar] | Callable[[OnPart], Iterable[Row | SoFar]],
    out: Path,
    title: str,
    total: int,
) -> int:
    """Measure on all ranks; the first one prints and writes."""
    if process.rank == 0:
        return run_and_report(records, out, title, total=total)
    for _ in records(lambda part: None) if callable(records) else records:
        raise AssertionError("only rank 0 gets records")
    return 0
