"""`trainstep bench collectives`: under torchrun as a user starts it, and its parts."""

import json
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.torchrun import REPOSITORY, torchrun
from trainstep.base.errors import UsageError
from trainstep.bench import collectives as bench
from trainstep.bench.cases import CollectiveCase, collective_cases
from trainstep.bench.collectives import fit_link
from trainstep.parallel.process import Process
from trainstep.plan.communication import COLLECTIVES, Link, collective_seconds
from trainstep.rows.records import read_records


def collectives(*words):
    return torchrun("trainstep", "bench", "collectives", "--device", "cpu", *words)


@pytest.mark.distributed
def test_under_torchrun_the_first_rank_writes_what_all_ranks_measured(tmp_path):
    found = collectives("--size-mb", "0.01,0.1", "--steps", 7, "--warmup", 1, "--out", tmp_path)
    assert found.returncode == 0, found.stderr
    assert found.stdout.count("Written to") == 1
    records = read_records(tmp_path / "results.jsonl")
    rows = [row for row in records if row.kind == "collective"]
    assert [(row.case["collective"], row.case["size_mb"]) for row in rows] == [
        (name, size) for name in COLLECTIVES for size in (0.01, 0.1)
    ]
    for row in rows:
        assert row.status == "ok"
        assert row.case["world_size"] == 2
        assert row.case["backend"] == "gloo"
        by_rank = [row.samples["rank 0"], row.samples["rank 1"]]
        assert row.samples["time"] == [max(pair) for pair in zip(*by_rank, strict=True)]
        assert len(row.samples["time"]) == row.values["n"] == 7
        payload = row.case["size_mb"] * 1e6
        assert row.values["payload_bytes"] == payload
        assert row.values["algorithm_gb_s"] == pytest.approx(payload / row.values["time_ms"] / 1e6, rel=1e-4)
        factor = {"all-reduce": 1, "all-gather": 0.5, "reduce-scatter": 0.5, "broadcast": 1}[row.case["collective"]]
        assert row.values["bus_gb_s"] == pytest.approx(factor * row.values["algorithm_gb_s"], rel=1e-4)
        assert row.values["cpu_ms"] > 0, "some of each call is a rank's own"
    fits = [row for row in records if row.kind == "collective fit"]
    assert {row.case["collective"] for row in fits} <= set(COLLECTIVES)
    for fit in fits:
        own = [row for row in rows if row.case["collective"] == fit.case["collective"]]
        shares = [row.values["cpu_ms"] / row.values["time_ms"] for row in own]
        assert fit.values["cpu_share"] == pytest.approx(sum(shares) / 2, rel=1e-4), "the median of two sizes"
    assert (tmp_path / "report.html").exists()
    assert (tmp_path / "tables" / "collective.md").exists()


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("words", "line"),
    [
        (("--size-mb", "x"), "Error parsing --size-mb: could not convert string to float: 'x'; see trainstep bench"),
        (("--timeout", "-1"), "timeout is -1; expected seconds above 0"),
        (("--world-size", "9"), "world-size is 9, and torchrun started 2 processes"),
    ],
    ids=["parsing", "before the ranks meet", "after they met"],
)
def test_a_mistake_of_all_ranks_is_one_line_that_one_rank_prints(words, line):
    found = collectives(*words)
    assert found.returncode != 0
    told = [each for each in (found.stdout + found.stderr).splitlines() if each.startswith("trainstep: ")]
    assert len(told) == 1, told
    assert line in told[0]


def test_without_torchrun_it_says_what_to_run():
    found = subprocess.run(
        [sys.executable, "-m", "trainstep", "bench", "collectives", "--size-mb", "1"],
        capture_output=True, text=True, cwd=REPOSITORY,
    )  # fmt: skip
    assert found.returncode == 2
    assert "run: torchrun --nproc-per-node=2 -m trainstep bench collectives --size-mb 1" in found.stderr
    assert "Traceback" not in found.stderr


def _measure(process, cases, sabotage):
    """Records as JSON, with something wrong on the second rank."""
    right = bench._CALLS["all-reduce"]
    if process.rank == 1 and sabotage == "result":
        bench._CALLS["all-reduce"] = lambda tensors, group: (right(tensors, group), tensors[0][3:4].add_(1))
    empty, failed = torch.empty, []

    def fail_once(*sizes, **options):
        if not failed:
            failed.append(True)
            raise torch.OutOfMemoryError("out of memory")
        return empty(*sizes, **options)

    if process.rank == 1 and sabotage == "memory":
        torch.empty = fail_once
    records = list(bench.run_cases(cases, process, warmup=0, steps=2))
    bench._CALLS["all-reduce"], torch.empty = right, empty
    return json.dumps(
        [
            (row.kind, dict(row.case), row.status, row.reason, sorted(row.samples), row.values.get("wrong_ranks"))
            for row in records
        ]
    )


@pytest.mark.distributed
def test_a_subset_of_ranks_takes_part_and_all_types_are_right(four):
    axes = {"collective": COLLECTIVES, "world_size": (1, 3), "dtype": ("fp32",), "size_mb": (0.001,)}
    cases = collective_cases(axes, started=4)
    cases += collective_cases(axes | {"world_size": (0,), "dtype": ("bf16", "fp16")}, started=4)
    lists = tuple(name for name in COLLECTIVES if name != "broadcast")
    cases += collective_cases(axes | {"collective": lists, "world_size": (3,), "tensors": (5,)}, started=4)
    first, *others = four.run(_measure, cases, None)
    rows = json.loads(first)
    assert [json.loads(other) for other in others] == [[], [], []]
    assert len(rows) == len(cases) == 19
    for (kind, case, status, reason, samples, _), expected in zip(rows, cases, strict=True):
        assert (kind, status, reason) == ("collective", "ok", ""), case
        assert case["world_size"] == expected.world_size
        assert case.get("tensors", 1) == expected.tensors
        assert samples == sorted(["time", *(f"rank {rank}" for rank in range(expected.world_size))])


@pytest.mark.distributed
def test_rows_and_columns_of_all_ranks_do_the_same_at_once(four):
    axes = {"collective": COLLECTIVES, "world_size": (2,), "size_mb": (0.001,), "groups": ("rows", "columns")}
    cases = collective_cases(axes, started=4)
    rows = json.loads(four.run(_measure, cases, None)[0])
    assert len(rows) == len(cases) == 8
    for (_, case, status, reason, samples, _), expected in zip(rows, cases, strict=True):
        assert (status, reason, case["groups"]) == ("ok", "", expected.groups)
        assert samples == ["rank 0", "rank 1", "rank 2", "rank 3", "time"], "every rank's, of both groups"


def test_a_row_that_crosses_hosts_is_not_within_one():
    case, parts = CollectiveCase(world_size=2, size_mb=0.001, groups="rows"), [bench._Part([1.0])] * 6
    process = Process(0, 6, torch.device("cpu"), None, 1.0, hosts=2)
    assert bench._row(case, process, parts).hosts == 2, "the second of three"
    assert bench._members(case, process) == [[0, 1], [2, 3], [4, 5]]
    assert bench._members(replace(case, groups="columns"), process) == [[0, 3], [1, 4], [2, 5]], "far apart"


@pytest.mark.distributed
def test_a_wrong_rank_of_another_group_is_seen(four):
    cases = [CollectiveCase("all-reduce", 2, "fp32", 0.001, groups="columns")]
    (row,) = json.loads(four.run(_measure, cases, "result")[0])
    assert row[2:] == ["wrong", "rank 1 did not get what it should", [], [1]], "rank 0 is in another column"


@pytest.mark.distributed
def test_a_wrong_result_has_no_time(two):
    cases = collective_cases({"collective": ("all-reduce", "broadcast"), "world_size": (2,)}, started=2)
    small = [CollectiveCase(case.collective, 2, "fp32", 0.001) for case in cases]
    wrong, right = json.loads(two.run(_measure, small, "result")[0])
    assert wrong[2:] == ["wrong", "rank 1 did not get what it should", [], [1]]
    assert right[2] == "ok"


@pytest.mark.distributed
def test_memory_that_one_rank_lacks_is_a_row(two):
    cases = [CollectiveCase("all-reduce", 2, "fp32", 0.001), CollectiveCase("all-reduce", 2, "fp32", 0.002)]
    failed, worked = json.loads(two.run(_measure, cases, "memory")[0])
    assert failed[2:] == ["out of memory", "out of memory", [], None]
    assert worked[2] == "ok"


def test_cases_are_checked():
    with pytest.raises(UsageError, match="world-size is 4, and torchrun started 2 processes"):
        collective_cases({"world_size": (4,)}, started=2)
    with pytest.raises(UsageError, match="less than one element of each tensor for each of 2 ranks"):
        collective_cases({"world_size": (2,), "size_mb": (0.000001,)}, started=2)
    with pytest.raises(UsageError, match="columns of 2 ranks are all that torchrun started"):
        collective_cases({"world_size": (0,), "groups": ("columns",)}, started=2)
    with pytest.raises(UsageError, match="rows of 2 ranks cannot be made of the 3 that torchrun started"):
        collective_cases({"world_size": (2,), "groups": ("rows",)}, started=3)
    with pytest.raises(UsageError, match="tensors is 0; expected 1 or more"):
        collective_cases({"world_size": (2,), "tensors": (0,)}, started=2)
    with pytest.raises(UsageError, match="a broadcast sends one tensor"):
        collective_cases({"world_size": (2,), "collective": ("broadcast",), "tensors": (2,)}, started=2)
    (case,) = collective_cases({"world_size": (0,), "size_mb": (0.001,), "dtype": ("bf16",)}, started=3)
    assert (case.elements, case.payload_bytes) == (498, 996), "the largest number that three can share"


@pytest.mark.parametrize("collective", COLLECTIVES)
@pytest.mark.parametrize("world_size", [2, 4, 8])
def test_the_fit_finds_the_link(collective, world_size):
    link = Link(overhead_s=3e-5, bus_bytes_per_s=3.2e11)
    sizes = [10**6, 10**7, 10**8, 10**9]
    points = [(size, collective_seconds(collective, size, world_size, link)) for size in sizes]
    fit = fit_link(collective, world_size, points)
    assert fit.link.overhead_s == pytest.approx(3e-5, rel=1e-9)
    assert fit.link.bus_bytes_per_s == pytest.approx(3.2e11, rel=1e-9)
    assert fit.worst_error < 1e-9
    noise = np.random.default_rng(0).uniform(0.9, 1.1, len(points))
    noisy = fit_link(collective, world_size, [(size, t * n) for (size, t), n in zip(points, noise, strict=True)])
    assert noisy.link.overhead_s == pytest.approx(3e-5, rel=0.3)
    assert noisy.link.bus_bytes_per_s == pytest.approx(3.2e11, rel=0.15)
    assert 0 < noisy.worst_error < 0.2, "no line goes through all of them"


def test_the_fit_knows_what_it_cannot_find():
    assert fit_link("all-reduce", 2, [(10, 1.0)]) is None, "one size"
    assert fit_link("all-reduce", 1, [(10, 1.0), (20, 2.0)]) is None, "one rank"
    assert fit_link("all-reduce", 2, [(10, 2.0), (20, 1.0)]) is None, "larger is faster"
    through_zero = fit_link("all-reduce", 2, [(10, 1.0), (100, 20.0)])
    assert through_zero.link.overhead_s == 0.0
    assert through_zero.worst_error > 0.1
