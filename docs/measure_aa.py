"""Measure the A/A corpus, from which the intervals of ratios are judged: docs/results/aa-NAME.jsonl.

    python docs/measure_aa.py cpu 150 4         # name (and device), runs, processes started together
    python docs/measure_aa.py cuda 120 12 h200  # on a GPU; the last word is the name, if it is not the device's

Every run is a process of its own that measures every setting once, in an order drawn from the run's number, always the
same code: whatever two runs differ by is what runs differ by. Starting takes longer than measuring, so processes are
started several at a time; when all of them have loaded torch they measure one after the other, and the others sleep.
"""

from __future__ import annotations

import dataclasses
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path

from tables import RESULTS
from trainstep.base.config import ModelConfig, StepConfig, resolve_size
from trainstep.base.stats import summarize
from trainstep.rows import StepRow
from trainstep.rows.records import RecordWriter, Times, of_kind, read_records, write_whole

WARMUP, STEPS = 5, 10
LITTLE = ModelConfig(vocab_size=512, d_model=64, d_ff=256, num_layers=2, num_heads=2)
SETTINGS: dict[str, list[tuple[str, ModelConfig, dict[str, object]]]] = {
    "cpu": [  # microseconds of arithmetic under each operator of the first two: the interpreter sets the pace
        ("little", LITTLE, {"batch": 1, "context": 8}),
        ("little", LITTLE, {"batch": 1, "context": 8, "precision": "bf16"}),
        ("little", LITTLE, {"batch": 4, "context": 64}),
        ("tiny", resolve_size("tiny"), {"batch": 1, "context": 16}),
    ],
    "cuda": [  # launches set the pace of the first three, the GPU that of the others
        ("tiny", resolve_size("tiny"), {"batch": 1, "context": 64}),
        ("tiny", resolve_size("tiny"), {"batch": 1, "context": 64, "precision": "bf16"}),
        ("small", resolve_size("small"), {"batch": 4, "context": 512, "precision": "bf16"}),
        ("small", resolve_size("small"), {"batch": 4, "context": 512}),
        ("tiny", resolve_size("tiny"), {"batch": 64, "context": 512, "precision": "bf16"}),
    ],
}


def work(device: str, run: int, out: Path) -> None:
    """One run: load, wait for the word, measure every setting."""
    import torch

    from trainstep.bench.step import StepCase, run_cases
    from trainstep.step.workload import builtin_source

    if device == "cpu":
        torch.set_num_threads(1)  # two threads that wait for each other on busy cores measure the scheduler
    print("ready", flush=True)
    sys.stdin.readline()
    rows = []
    for size, model, changes in random.Random(run).sample(SETTINGS[device], len(SETTINGS[device])):
        config = StepConfig(device=device, **changes)  # type: ignore[arg-type]
        case = StepCase(builtin_source(size, model), config, warmup=WARMUP, steps=STEPS)
        (row,) = run_cases([case], check=False)
        samples, environment = row.samples["step"], {**row.environment, "load_average": round(os.getloadavg()[0], 2)}
        times = {"step": Times.of(summarize(samples), spread=False)}
        whole = {"times": times, "samples": {"step": samples}, "environment": environment}
        rows.append(dataclasses.replace(row, run=run, repeat=None, **whole))
    write_whole(out, rows)


def main(device: str = "cpu", runs: str = "150", together: str = "4", name: str = "") -> None:
    """Measure, and write rows as runs end."""
    writer = RecordWriter(RESULTS / f"aa-{name or device}.jsonl")
    with tempfile.TemporaryDirectory() as folder:
        for first in range(0, int(runs), int(together)):
            batch = range(first, min(first + int(together), int(runs)))
            files = {run: Path(folder) / f"{run}.jsonl" for run in batch}
            children = {run: _start(device, run, file) for run, file in files.items()}
            for child in children.values():
                assert child.stdout is not None
                assert child.stdout.readline() == "ready\n", "a run did not start"
            for run, child in children.items():
                child.communicate("go\n")
                for row in of_kind(read_records(files[run]), StepRow):
                    writer.write(row)
            print(f"{max(batch) + 1} of {runs} runs", flush=True)
    writer.close()


def _start(device: str, run: int, out: Path) -> subprocess.Popen[str]:
    words = [sys.executable, __file__, "--run", device, str(run), str(out)]
    return subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--run"]:
        work(sys.argv[2], int(sys.argv[3]), Path(sys.argv[4]))
    else:
        main(*sys.argv[1:])
