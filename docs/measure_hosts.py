"""Measure what steps on two hosts send to each other, at 1 and 10 Gbit/s: docs/results/cpu-hosts.jsonl.

    python docs/measure_hosts.py               # as root, ten minutes on two cores, which nothing else should use
    python docs/measure_hosts.py --mbit 1000   # one bandwidth; what was measured of the other stays

Two hosts are network namespaces of this machine, joined by a switch whose ports take so many megabits a second. First
the collectives are timed that the plan is calibrated with, then steps. `docs/theory.md` holds the plan against them.
Rows say in their environment how fast the network was.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.hosts import Hosts

from tables import RESULTS
from tables.hosts import MODEL, SHAPE
from trainstep.kinds import CollectiveFitRow, ParallelRow
from trainstep.records import Row, of_kind, read_records, write_whole

KEPT = RESULTS / "cpu-hosts.jsonl"
SIZE = " ".join(f"--{name.replace('_', '-')} {getattr(MODEL, name)}" for name in SHAPE)
STEP = "--batch 1 --context 32 --steps 6 --warmup 2 --rounds 2"
CALLS = "--collective all-reduce,all-gather,reduce-scatter --size-mb 4,10,25 --tensors 1,30"
COLLECTIVES = f"bench collectives {CALLS} --steps 10"
RUNS = {  # ranks on each of so many hosts → commands
    (1, 2): (COLLECTIVES, f"bench parallel --size tiny {SIZE} {STEP} --scheme single,flat,sharded-optimizer,fsdp"),
    (2, 1): (COLLECTIVES,),
    (2, 2): (f"bench parallel --size tiny {SIZE} {STEP} --scheme single,hsdp",),
}


def measure(mbit: int, folder: Path) -> list[Row]:
    """The rows of all runs at a bandwidth."""
    rows: list[Row] = []
    for (ranks, count), commands in RUNS.items():
        for number, command in enumerate(commands):
            out = folder / f"{mbit}-{ranks}-{count}-{number}"
            rows += run(command, mbit, ranks, count, out)
    kept = [*of_kind(rows, CollectiveFitRow), *of_kind(rows, ParallelRow)]
    return [dataclasses.replace(row, samples={}, environment={**row.environment, "mbit": mbit}) for row in kept]


def run(command: str, mbit: int, ranks: int, count: int, out: Path) -> list[Row]:
    """The rows of one command."""
    print(f"{mbit} Mbit/s, {ranks} ranks on each of {count} hosts: {command}", flush=True)
    words = ["-m", "trainstep", *command.split(), "--device", "cpu", "--out", str(out)]
    with Hosts(2) as hosts:
        hosts.limit(mbit)
        logs = [out.with_suffix(f".{name}.log") for name in hosts.names[:count]]
        running = [
            hosts.torchrun(host, *words, log=log, nodes=str(count), ranks=ranks) for host, log in enumerate(logs)
        ]
        codes = [each.wait() for each in running]
    if any(codes):
        sys.exit(logs[0].read_text(errors="replace")[-3000:])
    return read_records(out / "results.jsonl")


def main(asked: Sequence[int], before: Sequence[Row]) -> None:
    """Measure, and keep it beside what is there of other bandwidths."""
    rows = [row for row in before if row.environment["mbit"] not in asked]
    with tempfile.TemporaryDirectory() as folder:
        for mbit in asked:
            rows += measure(mbit, Path(folder))
            write_whole(KEPT, sorted(rows, key=lambda row: int(row.environment["mbit"])))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mbit", default="1000,10000", help="bandwidths in Mbit/s, with commas between")
    main([int(each) for each in parser.parse_args().mbit.split(",")], read_records(KEPT) if KEPT.exists() else [])
