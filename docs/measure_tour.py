"""Run the commands of docs/tour.md and keep their rows: docs/results/cpu-tour.jsonl, or another NAME-tour.jsonl.

    python docs/measure_tour.py                      # on a CPU with nothing else to do: two to five minutes
    python docs/measure_tour.py h200 --device auto   # on a GPU

Kept are the rows that the page shows, without timelines and without the kernels that no finding is about.
"""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import time
from pathlib import Path

from tables import RESULTS
from trainstep.report.subjects.climbs import recommended_flags
from trainstep.rows import TourRow
from trainstep.rows.records import RecordWriter, Row, read_records

KINDS = ("change", "profile", "memory-timeline", "owner", "allocation")
SLOW, FAST = "examples.tour.slow:workload", "examples.tour.fast:workload"


def run(folder: str, *words: str) -> tuple[list[Row], float]:
    """The records of one command, and the seconds it took."""
    out = Path("results/tour") / folder
    start = time.perf_counter()
    subprocess.run([sys.executable, "-m", "trainstep.commands.cli", *words, "--out", str(out)], check=True)
    return read_records(out / "results.jsonl"), time.perf_counter() - start


def is_shown(row: Row) -> bool:
    """Whether the page needs the row of an analysis."""
    module = str(row.case.get("module"))
    return row.kind in KINDS or (row.kind == "kernel" and (module == "(loss)" or module.endswith(".attention")))


def main(name: str = "cpu", *device: str) -> None:
    """Measure, and write what is kept."""
    device = device or ("--device", "cpu")
    writer = RecordWriter(RESULTS / f"{name}-tour.jsonl")
    seconds = {}
    for folder, workload in (("slow", SLOW), ("fast", FAST)):
        analysis, seconds[folder] = run(folder, "analyze", "--workload", workload, *device)
        for row in filter(is_shown, analysis):
            writer.write(dataclasses.replace(row, series={}))
    flags = recommended_flags(analysis).split()
    for folder, workload, words in (("before", SLOW, []), ("after", FAST, flags)):
        rows, seconds[folder] = run(folder, "bench", "step", "--workload", workload, *words, *device)
        for row in rows:
            writer.write(row)
    writer.write(TourRow(**{f"{folder}_s": each for folder, each in seconds.items()}))
    writer.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
