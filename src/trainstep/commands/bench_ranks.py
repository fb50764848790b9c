"""`trainstep bench` over ranks that torchrun starts: collectives, schemes of data parallel training, step8b."""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from tyro.conf import FlagCreatePairsOff

from trainstep.base.config import AttentionImpl, CompileMode, FusedParts, LossImpl, StepConfig, resolve_size
from trainstep.base.errors import UsageError
from trainstep.base.schemes import BENCH_SCHEMES, SCHEMES, Scheme
from trainstep.bench.cases import COLLECTIVE_AXES, CollectiveCase, collective_cases
from trainstep.commands.options import Common, OneModel, axes_of, commas, flags_of, short_name
from trainstep.commands.output import OnPart, run_and_report

if TYPE_CHECKING:
    from trainstep.bench.parallel import ParallelCase
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
    """Folder for results.jsonl, tables/ and report.html."""

    def run(self) -> int:
        from trainstep.bench.collectives import run_cases
        from trainstep.parallel.process import join_group

        axes = axes_of({**COLLECTIVE_AXES, **self.axes}, CollectiveCase())
        with join_group(self.device, timeout_s=self.timeout) as process:
            cases = collective_cases(axes, process.world_size)
            records = run_cases(cases, process, warmup=self.warmup, steps=self.steps)
            return _first_rank_reports(process, records, self.out, "bench collectives", len(cases))


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
    """Rounds: each scheme is built and timed so often, in turns, in an order drawn anew each time; ratios to torch's
    count a round as one sample from 3 up."""
    trace: FlagCreatePairsOff[bool] = False
    """Also record one step of each scheme with the profiler after timing: the report then draws them one below the
    other, and says how much communication is hidden behind computation."""
    gathers: FlagCreatePairsOff[bool] = False
    """Also mark, after timing, when each block's gather ended and when forward or backward needed it, without a
    profiler and under it; of schemes that shard weights, torch's too."""
    warmup: int = 5
    """Steps before the timed ones, in each round."""
    sustained: FlagCreatePairsOff[bool] = False
    """Time a window of steps with no synchronisation between them, as training runs."""
    timeout: float = 600.0
    """Seconds that a rank waits for the others before it is an error."""
    out: Path = Path("results/bench-parallel")
    """Folder for results.jsonl, tables/, report.html and traces (ui.perfetto.dev opens them)."""

    def run(self) -> int:
        from trainstep.bench.parallel import ParallelCase
        from trainstep.bench.parallel.run import run_cases
        from trainstep.parallel.process import AgreedError, join_group, on_all_ranks

        with join_group(self.step_config().device, timeout_s=self.timeout) as process:
            try:
                source = on_all_ranks(process, self.source)
                config = on_all_ranks(process, lambda: self.own_step(source))
                schemes = on_all_ranks(process, lambda: self.schemes(process))
                steps = [dataclasses.replace(config, compile=each) for each in (config.compile, *self.also_compile)]
                cases = [
                    ParallelCase(source, step, scheme, self.warmup, self.steps, sustained=self.sustained)
                    for step in dict.fromkeys(steps)
                    for scheme in schemes
                ]
                traces = self.out if self.trace else None

                def records(on_part: OnPart) -> Iterator[Row | SoFar]:
                    return run_cases(cases, process, traces, gathers=self.gathers, rounds=self.rounds, on_part=on_part)

                return _first_rank_reports(process, records, self.out, "bench parallel", len(cases) * (1 + self.trace))
            except AgreedError as error:  # all ranks have it, so they leave the group in order
                mistake = error
        raise mistake

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
            self.refuse(why, "blocks_per_group", "gathers")
        named = [scheme for name in names for scheme in SCHEMES[name].by_blocks(self.blocks_per_group)]
        ranks, hosts = process.world_size, process.hosts
        return [scheme.on(ranks, hosts, each) for scheme in named for each in scheme.choices(self.replicas)]


def _on_cpus(device: str) -> bool:
    import torch

    return device == "cpu" or not torch.cuda.is_available()


_FLAT_SCHEMES = tuple(name for name in BENCH_SCHEMES if SCHEMES[name].communicates and not SCHEMES[name].is_hybrid)


@dataclass(frozen=True, kw_only=True)
class BenchStep8b(Common):
    """CS336's leaderboard of 2026: a step of an 8 B model at context 32,768, ours and torch's, started by torchrun.

    The arms are every combination of scheme, checkpointed blocks and compilation, and for ours of loss and kernels.
    Each is judged on a reduced model before it is timed at full size; one that runs out of memory is a row and says so.
    """

    scheme: commas(Literal[_FLAT_SCHEMES]) = ("torch-fsdp2", "fsdp")  # type: ignore[valid-type]
    """The schemes, in this order."""
    checkpoint_blocks: commas(int) = (0,)  # type: ignore[valid-type]
    """Blocks, counted from the first, that are computed again in backward: few take less time, and more memory. All
    schemes are timed with a number before the next."""
    attention: AttentionImpl = "flash-triton"
    """Attention of our schemes."""
    loss: commas(LossImpl) = ("fused",)  # type: ignore[valid-type]
    """Loss of our schemes: fused or chunked; each is an arm."""
    fused: commas(FusedParts) = ("rope",)  # type: ignore[valid-type]
    """Fused operators of our schemes: none or rope; each is an arm."""
    peer_attention: AttentionImpl = "sdpa-cudnn"
    """Attention of torch's schemes, whose loss is chunked."""
    size: str = "8B"
    """Another named size or .toml file, to try the command on a smaller machine."""
    context: int = 32_768
    """Tokens per sequence; one sequence on each rank."""
    precision: Literal["bf16", "bf16-pure"] = "bf16-pure"
    """Precision of all arms: bf16 autocast over float32 weights and states, or bf16-pure, where weights, gradients and
    states are bf16, half of the bytes."""
    compile: commas(CompileMode) = ("blocks-recompute",)  # type: ignore[valid-type]
    """Compilation of all arms: off, blocks, blocks-recompute (norms and the SwiGLU's product are computed again in
    backward) or model; each is an arm."""
    warmup: float = 10_000.0
    """Milliseconds of steps before the timed ones, as do_bench takes it; the first step, which compiles, is before."""
    rep: float = 30_000.0
    """Milliseconds of timed steps, as many as fit; six steps or more have a 95 % interval."""
    trace: FlagCreatePairsOff[bool] = False
    """Also record one step of our fastest arm with the profiler after timing."""
    device: str = "auto"
    """auto (the GPU of the local rank where there are GPUs, with NCCL), cpu (with Gloo) or cuda."""
    timeout: float = 600.0
    """Seconds that a rank waits for the others before it is an error."""
    out: Path = Path("results/bench-step8b")
    """Folder for results.jsonl, tables/, report.html, policies of checkpointing and the trace."""

    def run(self) -> int:
        from trainstep.bench.parallel.step8b import leaderboard_lines, run_arms
        from trainstep.parallel.process import AgreedError, join_group, on_all_ranks
        from trainstep.rows import ParallelRow
        from trainstep.rows.records import of_kind

        _allocate_in_expandable_segments()
        rows: list[ParallelRow] = []

        def records(on_part: OnPart) -> Iterator[Row]:
            for row in run_arms(arms, process, self.out, trace=self.trace, on_part=on_part):
                rows.extend(of_kind([row], ParallelRow))
                yield row

        with join_group(self.device, timeout_s=self.timeout) as process:
            try:
                arms = on_all_ranks(process, self.arms)
                code = _first_rank_reports(process, records, self.out, "bench step8b", len(arms) + self.trace)
                for line in leaderboard_lines(rows):
                    print(line)
                return code
            except AgreedError as error:
                mistake = error
        raise mistake

    def arms(self) -> list[ParallelCase]:
        """Arms to time, in order."""
        from trainstep.bench.parallel import DoBench, ParallelCase
        from trainstep.bench.parallel.step8b import checkpointing_of, source_of

        if not (0 <= self.warmup < math.inf and 0 < self.rep < math.inf):
            raise UsageError(f"warmup is {self.warmup:g} ms, rep {self.rep:g}; expected 0 or more, and more than 0")
        peers = {SCHEMES[name].peer is not None for name in self.scheme}
        if False not in peers:
            self.refuse(
                "{flag} is for our schemes; name one of them by --scheme, or leave it out",
                *("attention", "loss", "fused", "trace"),
            )
        if True not in peers:
            self.refuse(
                "{flag} is for torch's schemes; name one of them by --scheme, or leave it out", "peer_attention"
            )
        model, rules = resolve_size(self.size), DoBench(self.warmup, self.rep)
        source, arms = source_of(short_name(self.size), model), []
        shared = StepConfig(batch=1, context=self.context, precision=self.precision, device=self.device)
        for first, compile, name in itertools.product(self.checkpoint_blocks, self.compile, self.scheme):
            scheme, checkpointing = SCHEMES[name], checkpointing_of(first, model.num_layers, self.out)
            step = dataclasses.replace(shared, compile=compile, optimizer="adamw-fused", checkpointing=checkpointing)
            if scheme.peer is None:
                step = dataclasses.replace(step, attention=self.attention)
                steps = [dataclasses.replace(step, loss=a, fused=b) for a in self.loss for b in self.fused]
            else:
                steps = [dataclasses.replace(step, attention=self.peer_attention, loss="chunked")]
            arms += [ParallelCase(source, each, scheme, do_bench=rules) for each in steps]
        return arms


def _allocate_in_expandable_segments() -> None:
    """Let the allocator expand segments, of all arms alike, as torchtitan trains: what lies free between blocks can be
    had then, which a step that nearly fills a GPU needs. What the environment says of the allocator stays."""
    import torch

    from trainstep.measure.environment import allocator_settings

    if torch.cuda.is_available() and not allocator_settings():
        settings = os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"  # from where rows have it
        torch._C._accelerator_setAllocatorSettings(settings)


def _first_rank_reports(
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
