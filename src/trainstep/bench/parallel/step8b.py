"""`trainstep bench step8b`: the leaderboard of CS336 in 2026 as a command, on any number of GPUs.

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
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from trainstep.base.config import ModelConfig, StepConfig
from trainstep.base.errors import UsageError
from trainstep.base.schemes import Scheme
from trainstep.bench.parallel import ParallelCase
from trainstep.bench.parallel.ratios import ratio_rows
from trainstep.bench.parallel.run import Result, Timed, parallel_row, step_ms, time_in_turns
from trainstep.bench.parallel.trace import trace_rows, traced_step
from trainstep.check.ranks import agreement, expected_on_first_rank
from trainstep.check.step import plain_form
from trainstep.check.verdict import Verdict
from trainstep.checkpointing.policies import BlockPolicy, Policy
from trainstep.measure.outcome import Failure, attempt_on_all_ranks
from trainstep.parallel.process import Process, on_all_ranks
from trainstep.rows import ParallelFamilyRow, ParallelRatioRow, ParallelRow, ParallelTraceRow
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
