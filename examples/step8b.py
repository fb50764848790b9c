"""The leaderboard of CS336 in 2026, on any number of GPUs.

    torchrun --nproc-per-node=2 -m examples.step8b --checkpoint-blocks 0,4

Its rules (github.com/stanford-cs336/assignment2-systems-leaderboard): one training step of an 8 B decoder (forward,
loss, backward, AdamW) in bf16, two sequences of 32,768 random token ids on two GPUs, timed by `triton.testing.do_bench`
with 10 s of warm-up and 30 s of repetitions, whose mean counts. The model's inputs and outputs stay as they are.

An arm is a scheme in one setting. Each kind of arm is first judged on a reduced model (fewer layers, heads and tokens,
a smaller vocabulary, heads of the same width), as `bench parallel` judges: beside the plain step of one process, eager
and with all logits at once. In its precision it is taken as it is timed: compiled, with its attention and its loss; in
float32, which cuDNN's attention lacks, with the plain attention and uncompiled. Then every arm is built at full size on
the GPUs, timed once, and its row is there before the next is built. Whatever fails is a row that says why.

Each rank makes the whole model's weights on its own GPU and keeps its shards; the reference has the reduced size alone.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor
from tyro.conf import FlagCreatePairsOff

from trainstep.base.config import (
    AttentionImpl,
    CompileMode,
    FusedParts,
    LossImpl,
    ModelConfig,
    StepConfig,
    resolve_size,
)
from trainstep.base.errors import UsageError
from trainstep.base.schemes import BENCH_SCHEMES, SCHEMES, Scheme
from trainstep.bench.parallel import DoBench, ParallelCase
from trainstep.bench.parallel.ratios import ratio_rows
from trainstep.bench.parallel.run import Result, Timed, parallel_row, step_ms, time_in_turns
from trainstep.bench.parallel.trace import trace_rows, traced_step
from trainstep.check.ranks import agreement, expected_on_first_rank
from trainstep.check.step import plain_form
from trainstep.check.verdict import Verdict
from trainstep.checkpointing.policies import BlockPolicy, Policy
from trainstep.commands.bench_ranks import first_rank_reports, folder_of_ranks
from trainstep.commands.options import Common, commas, parse_as, short_name
from trainstep.commands.output import OnPart
from trainstep.measure.environment import allocator_settings
from trainstep.measure.outcome import Failure, attempt_on_all_ranks
from trainstep.parallel.process import AgreedError, Process, join_group, on_all_ranks
from trainstep.rows import ParallelFamilyRow, ParallelRatioRow, ParallelRow, ParallelTraceRow
from trainstep.rows.records import Row, of_kind
from trainstep.step.workload import Workload, WorkloadSource, builtin_workload

LAYERS, HEADS, VOCABULARY, CONTEXT = 4, 8, 8192, 2048
"""At most, of the reduced model."""


def source_of(name: str, model: ModelConfig) -> WorkloadSource:
    """The built-in model on random token ids, as the leaderboard has it."""
    return WorkloadSource(name, partial(_on_random_ids, model), model)


def _on_random_ids(model: ModelConfig, step: StepConfig) -> Workload:
    return builtin_workload(model, step, _random_ids(model.vocab_size, (2, step.batch, step.context), step.seed))


def _random_ids(vocab_size: int, shape: tuple[int, ...], seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(seed)
    while True:
        ids, targets = torch.randint(vocab_size, shape, generator=draw)
        yield ids, targets


def checkpointing_of(first: int, num_layers: int, folder: Path) -> str:
    """The policy that computes the first blocks again: a name, or a file written into `folder`.

    The first, as backward comes to them last: by then the others have given back what they kept.

    Raises:
        UsageError: more blocks than there are, or the file cannot be written.
    """
    if not 0 <= first <= num_layers:
        raise UsageError(f"--checkpoint-blocks is {first}; expected 0 to {num_layers}, as many blocks as the model has")
    if first in (0, num_layers):
        return "every-1" if first else "none"
    file = folder / f"first-{first}-of-{num_layers}.json"
    try:
        Policy({f"blocks.{block}": BlockPolicy(recompute=True) for block in range(first)}).save(file)
    except OSError as error:
        raise UsageError(f"cannot write {file}: {error.strerror}") from error
    return f"@{file}"


def reduced_model(model: ModelConfig) -> ModelConfig:
    """A small model of the same kind: the same width of a head, and the same ratio of widths."""
    heads = min(model.num_heads, HEADS)
    return dataclasses.replace(
        model,
        num_heads=heads,
        d_model=heads * model.head_dim,
        d_ff=model.d_ff * heads // model.num_heads,
        num_layers=min(model.num_layers, LAYERS),
        vocab_size=min(model.vocab_size, VOCABULARY),
    )


def reduced(case: ParallelCase, folder: Path) -> ParallelCase:
    """Reduced arm by which an arm is checked: the same on the reduced model, of which half of the blocks are computed
    again if any are of the arm's."""
    assert case.source.model is not None, "it is ours"
    model, config = reduced_model(case.source.model), case.config
    first = 0 if config.checkpointing == "none" else -(-model.num_layers // 2)
    checkpointing = checkpointing_of(first, model.num_layers, folder)
    config = dataclasses.replace(config, context=min(config.context, CONTEXT), checkpointing=checkpointing)
    in_float32 = dataclasses.replace(config, precision="fp32", attention="eager", compile="off")
    source = source_of(f"{case.source.name}, reduced", model)
    return dataclasses.replace(case, source=source, config=config, float32=in_float32)


def run_arms(
    cases: Sequence[ParallelCase],
    process: Process,
    folder: Path,
    *,
    trace: bool = False,
    on_part: Callable[[str], object] = lambda part: None,
) -> Iterator[ParallelRow | ParallelRatioRow | ParallelTraceRow | ParallelFamilyRow]:
    """Judge the arms, then time each; rank 0 gets a row of each as it is done, and its ratios at the end. All ranks
    must iterate.

    Args:
        cases: of one model, precision and batch.
        folder: for policies of checkpointing, and traces.
        trace: also record a step of our fastest arm with the profiler, at the end.
        on_part: told what is done next, and how an arm ended.
    """
    judged = _judged(cases, process, folder, on_part)
    rows: dict[ParallelCase, ParallelRow] = {}
    timed: dict[ParallelCase, Timed] = {}
    for case in cases:
        on_part(f"{_name(case)}: is built and timed")
        *_, results = time_in_turns({case: judged[case]}, process, 1)
        if isinstance(result := results[case], Timed):
            timed[case] = result
        if process.rank == 0:
            rows[case] = _row(case, process, result)
            on_part(f"{_name(case)}: {_said(rows[case])}")
            yield rows[case]
    if process.rank == 0:
        yield from ratio_rows(list(rows.values()))
    ours = [case for case in timed if case.scheme.peer is None]
    if trace and ours:
        fastest = min(ours, key=lambda case: max(map(step_ms, timed[case].rounds[0])))
        file = folder / f"trace-{fastest.scheme.label}.json.gz"
        on_part(f"{_name(fastest)}: a step is recorded")
        found = attempt_on_all_ranks(partial(traced_step, partial(fastest.build, process), process, file), process)
        if process.rank == 0:
            yield from trace_rows(rows[fastest], found, trace=file.name)


def leaderboard_lines(rows: Sequence[ParallelRow]) -> list[str]:
    """A line of the leaderboard's table for each arm that was timed, the fastest first: the mean, as do_bench's."""
    means = [(statistics.fmean(row.samples["step"]), row) for row in rows if row.step_ms is not None]
    return [
        f"| trainstep: {_settings(row.scheme, row.attention, row.loss, row.fused, row.compile, row.checkpointing)}, "
        f"{row.world_size} × {row.environment['device']} | {mean:.0f} ms | |"
        for mean, row in sorted(means, key=lambda each: each[0])
    ]


def _judged(
    cases: Sequence[ParallelCase], process: Process, folder: Path, on_part: Callable[[str], object]
) -> Mapping[ParallelCase, Verdict | Failure | None]:
    """Agreement of each arm's kind with one process; on other ranks than the first, None where it does."""
    known: dict[tuple[Scheme, StepConfig], ParallelCase] = {}  # arms that differ in what is reduced alike are of a kind
    kinds: dict[ParallelCase, ParallelCase] = {}
    for case in cases:
        kind = on_all_ranks(process, partial(reduced, case, folder))
        kinds[case] = known.setdefault((kind.scheme, kind.config), kind)
    first = kinds[cases[0]]
    config = dataclasses.replace(
        plain_form(first.config),
        precision=first.config.precision,
        optimizer=first.config.optimizer,
        checkpointing="none",
    )
    plain = dataclasses.replace(first, config=config)
    on_part(f"{first.source.name}: the plain step in one process")
    wanted, _ = expected_on_first_rank(plain, process)
    judged: dict[ParallelCase, Verdict | Failure | None] = {}
    for kind in known.values():
        if isinstance(wanted, Failure):
            judged[kind] = wanted
            continue
        on_part(f"{_name(kind)}: is judged, reduced")
        found = attempt_on_all_ranks(partial(agreement, kind, wanted, process), process)
        judged[kind] = found if isinstance(found, Failure) else found[0]
    return {case: judged[kind] for case, kind in kinds.items()}


def _row(case: ParallelCase, process: Process, result: Result) -> ParallelRow:
    assert case.source.model is not None, "it is ours"
    return parallel_row(case, process, result, num_parameters=case.source.model.num_parameters)


def _said(row: ParallelRow) -> str:
    """Say in a line how an arm ended."""
    if row.step_ms is None:
        return f"{row.status}: {row.reason}"
    memory = ""
    if row.peak_gib is not None and row.peak_reserved_gib is not None:
        memory = f", peak {row.peak_gib:.1f} GiB allocated and {row.peak_reserved_gib:.1f} reserved"
    return f"{row.step_ms:.1f} ms ({row.n} steps){memory}"


def _name(case: ParallelCase) -> str:
    config = case.config
    return _settings(
        case.scheme.name, config.attention, config.loss, config.fused, config.compile, config.checkpointing
    )


def _settings(
    scheme: str, attention: str | None, loss: str | None, fused: str | None, compile: str | None, policy: str | None
) -> str:
    blocks = "no blocks" if policy in (None, "none") else Path(str(policy).lstrip("@")).stem
    parts = [scheme, attention, f"{loss} loss", *([] if fused in (None, "none") else [f"fused {fused}"])]
    return f"{', '.join(map(str, parts))}, compile {compile or 'off'}, {blocks} checkpointed"


_FLAT_SCHEMES = tuple(name for name in BENCH_SCHEMES if SCHEMES[name].communicates and not SCHEMES[name].is_hybrid)


@dataclass(frozen=True, kw_only=True)
class Step8b(Common):
    """Time a step of an 8 B model at context 32,768, ours and torch's.

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
    """Folder for results.jsonl, tables/, report.html, policies of checkpointing and the trace. The default has a new
    folder for each launch."""

    def run(self) -> int:
        _allocate_in_expandable_segments()
        rows: list[ParallelRow] = []

        def records(on_part: OnPart) -> Iterator[Row]:
            for row in run_arms(arms, process, out, trace=self.trace, on_part=on_part):
                rows.extend(of_kind([row], ParallelRow))
                yield row

        with join_group(self.device, timeout_s=self.timeout) as process:
            try:
                with folder_of_ranks(self, process) as out:
                    arms = on_all_ranks(process, dataclasses.replace(self, out=out).arms)
                    code = first_rank_reports(process, records, out, "step8b", len(arms) + self.trace)
                for line in leaderboard_lines(rows):
                    print(line)
                return code
            except AgreedError as error:
                mistake = error
        raise mistake

    def arms(self) -> list[ParallelCase]:
        """Arms to time, in order."""
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
    if torch.cuda.is_available() and not allocator_settings():
        settings = os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"  # from where rows have it
        torch._C._accelerator_setAllocatorSettings(settings)


if __name__ == "__main__":
    try:
        code = parse_as(Step8b, sys.argv[1:]).run()
    except UsageError as error:
        code = f"step8b: {error}"
    sys.exit(code)
