"""Measure what steps on two hosts send to each other, at 1 and 10 Gbit/s: docs/results/cpu-hosts.jsonl.

    python docs/measure_hosts.py               # as root, twelve minutes on sixteen cores, which nothing else should use
    python docs/measure_hosts.py --mbit 1000   # one bandwidth; what was measured of the other stays
    python docs/measure_hosts.py --only collectives

Two hosts are network namespaces of this machine, each with half of its cores, joined by a switch whose ports take so
many megabits a second. The collectives that the plan is calibrated with are timed, as many at once as a step has, and a
copy, and steps. `notebook/theory.md` holds the plan against them. Rows have the network's speed in their environment.
"""

from __future__ import annotations

import dataclasses
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

from measuring import parser
from tables import RESULTS
from tables.hosts import MODEL, SHAPE
from tests.hosts import Hosts
from trainstep.measure.environment import describe, measure_ceilings
from trainstep.rows import CeilingRow, CollectiveFitRow, ParallelRow
from trainstep.rows.records import Row, of_kind, read_records, write_whole

CPU = torch.device("cpu")
KEPT = RESULTS / "cpu-hosts.jsonl"
SIZE = " ".join(f"--{name.replace('_', '-')} {getattr(MODEL, name)}" for name in SHAPE)
STEP = "--batch 1 --context 32 --optimizer adamw-fused --steps 6 --warmup 2 --rounds 8"
COLLECTIVES = "bench collectives --collective all-reduce,all-gather,reduce-scatter --steps 12"
LISTS, BUFFERS = f"{COLLECTIVES} --size-mb 10,20,32 --tensors 30", f"{COLLECTIVES} --size-mb 5,10,20"
"""Of sizes as steps send (lists of all tensors, buffers of a block), beyond what token buckets let through at once."""
GROUPS = "--world-size 2 --groups rows,columns"
ONE_THREAD = {"OMP_NUM_THREADS": "1"}
"""That torchrun sets by itself only where a host has several ranks."""
RUNS: Sequence[tuple[int, str]] = (  # ranks on each host, command
    (1, LISTS),
    (1, BUFFERS),
    (1, f"bench parallel --size tiny {SIZE} {STEP} --scheme single,flat,sharded-optimizer,fsdp"),
    (2, f"{LISTS} {GROUPS}"),
    (2, f"{BUFFERS} {GROUPS}"),
    (2, f"bench parallel --size tiny {SIZE} {STEP} --scheme single,hsdp"),
)


def measure(mbit: int, only: str, folder: Path) -> list[Row]:
    """The rows of all runs at a bandwidth, or of those that are of collectives or steps `only`."""
    torch.set_num_threads(1)
    environment = {**describe(CPU), "mbit": mbit}
    copied = CeilingRow(operation="copy", gb_s=measure_ceilings(CPU, []).copy_gb_s, environment=environment)
    rows: list[Row] = [copied]
    for number, (ranks, command) in enumerate(RUNS):
        if only and ("bench collectives" in command) != (only == "collectives"):
            continue
        found = run(command, mbit, ranks, folder / f"{mbit}-{number}")
        kept = [*of_kind(found, CollectiveFitRow), *of_kind(found, ParallelRow)]
        rows += [dataclasses.replace(row, samples={}, environment={**row.environment, "mbit": mbit}) for row in kept]
    return rows


def run(command: str, mbit: int, ranks: int, folder: Path) -> list[Row]:
    folder.mkdir()
    print(f"{mbit} Mbit/s, {ranks} ranks on each of 2 hosts: {command}", flush=True)
    words = ["-m", "trainstep", *command.split(), "--device", "cpu", "--out", str(folder)]
    with Hosts(2, apart=True) as hosts:
        hosts.limit(mbit)
        running = {}
        for host in range(2):
            log = folder / f"{host}.log"
            running[log] = hosts.torchrun(host, *words, log=log, nodes="2", ranks=ranks, environment=ONE_THREAD)
        for log, each in running.items():
            if each.wait():
                sys.exit(log.read_text(errors="replace")[-3000:])
    return read_records(folder / "results.jsonl")


def main(asked: Sequence[int], only: str, before: Sequence[Row]) -> None:
    """Measure, and keep it beside what is there of other bandwidths, or of what was not asked for."""
    stays = {"": (), "collectives": (ParallelRow,), "steps": (CollectiveFitRow,)}[only]
    rows = [row for row in before if row.environment["mbit"] not in asked or isinstance(row, stays)]
    with tempfile.TemporaryDirectory() as folder:
        for mbit in asked:
            rows += measure(mbit, only, Path(folder))
            write_whole(KEPT, sorted(rows, key=lambda row: int(row.environment["mbit"])))


if __name__ == "__main__":
    asked = parser(__doc__)
    asked.add_argument("--mbit", default="1000,10000", help="bandwidths in Mbit/s, with commas between")
    asked.add_argument("--only", choices=("collectives", "steps"), default="", help="leave the others as they are")
    given = asked.parse_args()
    kept = read_records(KEPT) if KEPT.exists() else []
    main([int(each) for each in given.mbit.split(",")], given.only, kept)
