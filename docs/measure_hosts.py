"""Measure what steps on two hosts send to each other, at 1 and 10 Gbit/s: docs/results/cpu-hosts.jsonl.

    python docs/measure_hosts.py               # as root, ten minutes on sixteen cores, which nothing else should use
    python docs/measure_hosts.py --mbit 1000   # one bandwidth; what was measured of the other stays
    python docs/measure_hosts.py --only collectives

Two hosts are network namespaces of this machine, each with half of its cores, joined by a switch whose ports take so
many megabits a second. First the collectives are timed that the plan is calibrated with, as many at once as a step has,
and a copy, then steps. `docs/theory.md` holds the plan against them. Rows say in their environment how fast the network
was, and how many worlds ran at once.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from tests.hosts import Hosts

from tables import RESULTS
from tables.hosts import MODEL, SHAPE
from trainstep.kinds import CeilingRow, CollectiveFitRow, ParallelRow
from trainstep.measure.environment import describe, measure_ceilings
from trainstep.records import Row, of_kind, read_records, write_whole

CPU = torch.device("cpu")
KEPT = RESULTS / "cpu-hosts.jsonl"
SIZE = " ".join(f"--{name.replace('_', '-')} {getattr(MODEL, name)}" for name in SHAPE)
STEP = "--batch 1 --context 32 --optimizer adamw-fused --steps 6 --warmup 2 --rounds 8"
CALLS = "--collective all-reduce,all-gather,reduce-scatter --size-mb 4,10,32 --tensors 1,30"
"""Of sizes beyond what the network's token buckets let through at once."""
COLLECTIVES = f"bench collectives {CALLS} --steps 6"
PAIR, ROWS, COLUMNS = ((0, 1),), ((0,), (1,)), ((0, 1), (1, 0))
"""The hosts of each world that runs at the same time; it meets at its first."""
ONE_THREAD = {"OMP_NUM_THREADS": "1"}
"""That torchrun sets by itself only where a host has several ranks."""
RUNS: Sequence[tuple[int, Sequence[Sequence[int]], str]] = (  # ranks of a world on each of its hosts, worlds, command
    (1, PAIR, COLLECTIVES),
    (1, PAIR, f"bench parallel --size tiny {SIZE} {STEP} --scheme single,flat,sharded-optimizer,fsdp"),
    (2, ROWS, COLLECTIVES),
    (1, COLUMNS, COLLECTIVES),
    (2, PAIR, f"bench parallel --size tiny {SIZE} {STEP} --scheme single,hsdp"),
)


def measure(mbit: int, only: str, folder: Path) -> list[Row]:
    """The rows of all runs at a bandwidth, or of those that are of collectives or steps `only`."""
    torch.set_num_threads(1)
    environment = {**describe(CPU), "mbit": mbit, "worlds": 0}
    copied = CeilingRow(operation="copy", gb_s=measure_ceilings(CPU, []).copy_gb_s, environment=environment)
    rows: list[Row] = [copied]
    for number, (ranks, worlds, command) in enumerate(RUNS):
        if only and (command == COLLECTIVES) != (only == "collectives"):
            continue
        where = {"mbit": mbit, "worlds": len(worlds)}
        found = run(command, mbit, ranks, worlds, folder / f"{mbit}-{number}")
        kept = [*of_kind(found, CollectiveFitRow), *of_kind(found, ParallelRow)]
        rows += [dataclasses.replace(row, samples={}, environment={**row.environment, **where}) for row in kept]
    return rows


def run(command: str, mbit: int, ranks: int, worlds: Sequence[Sequence[int]], folder: Path) -> list[Row]:
    """The rows of the first world."""
    folder.mkdir()
    print(
        f"{mbit} Mbit/s, {len(worlds)} worlds of {ranks} ranks on each of {len(worlds[0])} hosts: {command}", flush=True
    )
    with Hosts(2, apart=True) as hosts:
        hosts.limit(mbit)
        running = {}
        for number, own in enumerate(worlds):
            words = ["-m", "trainstep", *command.split(), "--device", "cpu", "--out", str(folder / str(number))]
            for host in own:
                log = folder / f"{number}-{host}.log"
                running[log] = hosts.torchrun(
                    host, *words, log=log, nodes=str(len(own)), ranks=ranks, meets=own[0], environment=ONE_THREAD
                )
        for log, each in running.items():
            if each.wait():
                sys.exit(log.read_text(errors="replace")[-3000:])
    return read_records(folder / "0" / "results.jsonl")


def main(asked: Sequence[int], only: str, before: Sequence[Row]) -> None:
    """Measure, and keep it beside what is there of other bandwidths, or of what was not asked for."""
    stays = {"": (), "collectives": (ParallelRow,), "steps": (CollectiveFitRow,)}[only]
    rows = [row for row in before if row.environment["mbit"] not in asked or isinstance(row, stays)]
    with tempfile.TemporaryDirectory() as folder:
        for mbit in asked:
            rows += measure(mbit, only, Path(folder))
            write_whole(KEPT, sorted(rows, key=lambda row: int(row.environment["mbit"])))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mbit", default="1000,10000", help="bandwidths in Mbit/s, with commas between")
    parser.add_argument("--only", choices=("collectives", "steps"), default="", help="leave the others as they are")
    given = parser.parse_args()
    kept = read_records(KEPT) if KEPT.exists() else []
    main([int(each) for each in given.mbit.split(",")], given.only, kept)
