"""Run the commands of docs/tour.md and keep their rows: docs/results/cpu-tour.jsonl, or another NAME-tour.jsonl.

    python docs/measure_tour.py                      # on a CPU with nothing else to do: two to five minutes
    python docs/measure_tour.py h200 --device auto   # on a GPU

Kept are the rows that the page shows, without timelines and without the kernels that no finding is about.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence

from measuring import ROOT, run
from tables import RESULTS
from trainstep.report.subjects.climbs import recommended_flags
from trainstep.rows.records import RecordWriter, Row

KINDS = ("change", "profile", "memory-timeline", "owner", "allocation")
SLOW, FAST = "examples.tour.slow:workload", "examples.tour.fast:workload"


def rows_of(folder: str, *words: str) -> Sequence[Row]:
    """The rows of one command."""
    out = ROOT / "results/tour" / folder
    ended = run([*words, "--out", str(out)], out)
    if ended.how != "rows":
        raise SystemExit(f"{' '.join(words)}: {ended.last}")
    return ended.rows


def is_shown(row: Row) -> bool:
    """Whether the page needs the row of an analysis."""
    module = str(row.case.get("module"))
    return row.kind in KINDS or (row.kind == "kernel" and (module == "(loss)" or module.endswith(".attention")))


def main(name: str = "cpu", *device: str) -> None:
    """Measure, and write what is kept."""
    device = device or ("--device", "cpu")
    writer = RecordWriter(RESULTS / f"{name}-tour.jsonl")
    for folder, workload in (("slow", SLOW), ("fast", FAST)):
        analysis = rows_of(folder, "analyze", "--workload", workload, *device)
        for row in filter(is_shown, analysis):
            writer.write(dataclasses.replace(row, series={}))
    flags = recommended_flags(analysis).split()
    for folder, workload, words in (("before", SLOW, []), ("after", FAST, flags)):
        for row in rows_of(folder, "bench", "step", "--workload", workload, *words, *device):
            writer.write(row)
    writer.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
