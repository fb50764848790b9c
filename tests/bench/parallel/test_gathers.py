"""`bench parallel --gathers`: each gather with when it ended and when it was needed, ours and torch's FSDP2's."""

import time
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import pytest
import torch
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

from tests.report.page import Page
from trainstep.base.config import ModelConfig, StepConfig
from trainstep.base.errors import UsageError
from trainstep.base.schemes import SCHEMES
from trainstep.bench.parallel import ParallelCase, gathers
from trainstep.bench.parallel.gathers import REST, GatherTimes, gather_rows
from trainstep.bench.parallel.run import run_cases
from trainstep.measure.outcome import Failure
from trainstep.parallel import gloo
from trainstep.parallel.fsdp.group import GatherGroup
from trainstep.parallel.fsdp.schedule import Schedule
from trainstep.parallel.process import Process
from trainstep.report.page import render
from trainstep.report.subjects.parallel import gather_findings
from trainstep.rows import ParallelGatherRow, ParallelRow
from trainstep.step.workload import builtin_source

MODEL = ModelConfig(vocab_size=256, d_model=32, d_ff=64, num_layers=4, num_heads=2, max_context=16)
CONFIG = StepConfig(context=16, batch=2, device="cpu")
SLOW_S = 0.2
MARKED = [(GatherGroup, "gather"), (GatherGroup, "wait"), (FSDPParamGroup, "unshard"), (Schedule, "gather")]
ALONE = Process(0, 1, torch.device("cpu"), None)


def case_of(scheme):
    return ParallelCase(builtin_source("little", MODEL), CONFIG, SCHEMES[scheme], warmup=1, steps=2)


def _gathers(process, schemes, slow=None):
    """The rows of these schemes; `slow`: the blocks that compute for long, or "gathers" for what carries ours."""
    before = [getattr(owner, name) for owner, name in MARKED]
    cases, build, all_gather = list(map(case_of, schemes)), ParallelCase.build, gloo.all_gather

    def slow_blocks(case, process):
        step = build(case, process)
        for number in slow:
            step.module.blocks[number].register_forward_pre_hook(lambda *_: time.sleep(SLOW_S))
        return step

    def slowly(*arguments):
        call = all_gather(*arguments)
        done = pool.submit(lambda work: (work.wait(), time.sleep(SLOW_S)), call._work)
        call._work = mock.Mock(wait=done.result, get_future=lambda: done)
        return call

    with (
        ThreadPoolExecutor(1) as pool,
        mock.patch.object(gathers, "STEPS", 1),
        mock.patch.object(ParallelCase, "build", build if slow in (None, "gathers") else slow_blocks),
        mock.patch.object(gloo, "all_gather", slowly if slow == "gathers" else all_gather),
    ):
        rows = {case: ParallelRow(**case.columns(process.world_size)) for case in cases}
        found = list(gather_rows(cases, rows, process))
    return found, [getattr(owner, name) for owner, name in MARKED] == before


@pytest.mark.distributed
def test_every_gather_of_a_step_is_a_row_in_the_order_in_which_it_is_needed(two):
    (rows, is_restored), (nothing, _) = two.run(_gathers, ("fsdp", "torch-fsdp2"))
    assert (nothing, is_restored) == ([], True)
    found = {name: [(row.phase, row.block) for row in rows if row.scheme == name] for name in ("fsdp", "torch-fsdp2")}
    blocks = [f"blocks.{number}" for number in range(4)]
    assert found == {
        "fsdp": [
            *(("forward", name) for name in ("embedding", *blocks, "head")),
            *(("backward", name) for name in ("blocks.2", "blocks.1", "blocks.0", "embedding")),
        ],
        "torch-fsdp2": [
            *(("forward", name) for name in (REST, *blocks)),
            *(("backward", name) for name in reversed(blocks)),
        ],
    }, "what stays from forward to backward is not gathered again"
    for row in rows:
        assert row.status == "ok"
        assert row.started_ms <= row.ended_ms
        assert row.exposed_ms == pytest.approx(max(0.0, row.ended_ms - row.needed_ms))
        assert row.profiled_exposed_ms >= 0
    assert all(row.exposed_ms > 0 for row in rows if row.block in ("embedding", REST) and row.phase == "forward"), (
        "nothing is computed before the first"
    )


@pytest.mark.distributed
def test_a_gather_behind_a_slow_block_is_in_time_and_a_slow_gather_is_late_by_as_much(two):
    (behind, _), _ = two.run(_gathers, ("fsdp",), (1,))
    found = {(row.phase, row.block): row for row in behind}
    for block in ("blocks.2", "blocks.3"):
        row = found["forward", block]
        assert row.exposed_ms == 0, row
        assert row.needed_ms - found["forward", "blocks.1"].needed_ms >= 1e3 * SLOW_S
    (slow, _), _ = two.run(_gathers, ("fsdp",), "gathers")
    found = {(row.phase, row.block): row for row in slow}
    first = found["forward", "embedding"]
    assert first.ended_ms - first.started_ms >= 1e3 * SLOW_S
    assert first.exposed_ms >= 1e3 * SLOW_S, "the thread that carries it takes so long, and forward waits for it"
    assert sum(row.exposed_ms for row in slow) >= 3e3 * SLOW_S


def test_of_the_ranks_the_one_that_waits_longest_is_shown():
    def times(exposed):
        return {("forward", "blocks.0", 0): GatherTimes(1.0, 2.0 + exposed, 2.0, exposed)}

    case, taken = case_of("fsdp"), [[times(1.0), times(3.0)], [times(7.0), times(5.0)]]
    rows = {case: ParallelRow(**case.columns(2))}
    with mock.patch.object(gathers, "attempt_on_all_ranks", side_effect=taken):
        (row,) = gather_rows([case], rows, ALONE)
    assert (row.rank, row.exposed_ms, row.ended_ms, row.profiled_exposed_ms) == (1, 3.0, 5.0, 5.0)
    failed = Failure("out of memory", "needed 9 GiB")
    with mock.patch.object(gathers, "attempt_on_all_ranks", side_effect=[failed, failed]):
        (row,) = gather_rows([case], rows, ALONE)
    assert (row.status, row.reason) == ("out of memory", "needed 9 GiB")


def test_without_a_scheme_that_shards_weights_there_is_nothing_to_mark():
    for scheme in ("single", "torch-ddp"):
        with pytest.raises(UsageError, match="none of those named does; add --scheme fsdp or torch-fsdp2"):
            next(run_cases([case_of(scheme)], ALONE, gathers=True))


def row(phase, block, exposed, profiled, place, scheme="fsdp"):
    return ParallelGatherRow(scheme=scheme, world_size=2, phase=phase, block=block, place=place, step_ms=100.0,
                             exposed_ms=exposed, profiled_exposed_ms=profiled)  # fmt: skip


def test_whether_gathers_are_in_time_is_told_in_words_and_where_the_profiler_makes_them_late():
    rows = [row("forward", "embedding", 2.5, 2.75, 0), row("forward", "blocks.0", 0.5, 0.0, 1),
            row("forward", "blocks.1", 0.0, 1.25, 2), row("backward", "blocks.0", 0.0, 1.0, 3)]  # fmt: skip
    (found,) = gather_findings(rows)
    assert found.figures == {
        "scheme": "fsdp", "gathers": 4, "in_time": 2, "exposed_ms": 3.0, "step_ms": 100.0, "block": "embedding",
        "phase": "forward", "most_ms": 2.5, "profiled_exposed_ms": 5.0,
        "made_late": ("blocks.1 in forward", "blocks.0 in backward"),
    }  # fmt: skip
    assert found.sentence == (
        "fsdp: 2 of 4 gathers are over when they are needed; the step waits 3.00 ms of its 100 ms for the others, most "
        "for embedding in forward (2.50 ms). Under the profiler it waits 5.00 ms, and blocks.1 in forward and blocks.0 "
        "in backward are late there alone."
    )
    (all_there,) = gather_findings([row("forward", "blocks.0", 0.0, 0.0, 0, "torch-fsdp2")])
    assert all_there.sentence == (
        "torch-fsdp2: 1 of 1 gathers are over when they are needed. Under the profiler it waits 0 ms."
    )
    failed = ParallelGatherRow(scheme="fsdp", world_size=2, phase="forward", block="all", place=0, status="failed")
    assert gather_findings([failed]) == []
    shown = Page(render([ParallelRow(scheme="fsdp", world_size=2), *rows])).values["parallel gathers"]
    late = {"phase": "forward", "block": "embedding", "exposed_ms": "2.5", "profiled_exposed_ms": "2.75"}
    assert late.items() <= shown["0"].items()
