"""Climb the ladder of eleven models that others wrote on a quiet machine and beside other work: cpu-load.jsonl.

    python docs/measure_load.py                         # all: half an hour on two cores, which nothing else should use
    python docs/measure_load.py --models t5 --beside 2  # one model, beside other work alone

The other work is one process per core. Each multiplies matrices for a time drawn between 0.2 and 2 seconds, sleeps for
another, and so on: whoever times one step in a burst and the other between bursts finds a difference that is not there.
Rows say in their environment how many processes were `beside` them. What is measured again takes the place of what was.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from measuring import parser, run
from tables import RESULTS
from trainstep.rows import ChangeRow
from trainstep.rows.records import Row, of_kind, read_records, write_whole

MODELS = ("llama", "gpt2", "mixtral", "bert", "t5", "vit", "convnext", "mamba", "lora", "nanogpt", "nanochat")
KEPT = RESULTS / "cpu-load.jsonl"
BUSY = """
import random, time
import numpy as np
rng, a = random.Random({seed}), np.ones((512, 512), np.float32)
while True:
    end = time.monotonic() + rng.uniform(0.2, 2)
    while time.monotonic() < end:
        a @ a
    time.sleep(rng.uniform(0.2, 2))
"""


@contextlib.contextmanager
def other_work(processes: int) -> Iterator[None]:
    """That many processes that work in bursts."""
    alone = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    words = [[sys.executable, "-c", BUSY.format(seed=seed)] for seed in range(processes)]
    running = [subprocess.Popen(each, env=alone) for each in words]
    try:
        yield
    finally:
        for each in running:
            each.kill()
            each.wait()


def ladder(model: str, beside: int, limit_s: float) -> list[Row]:
    """The changes of a model's ladder."""
    with tempfile.TemporaryDirectory() as folder:
        words = ["bench", "ladder", "--workload", f"tests.realworld.models:{model}", "--out", folder]
        with other_work(beside):
            ended = run(words, Path(folder), limit_s=limit_s)
    if ended.how != "rows":
        print(f"{model}: {ended.how}: {ended.last}", flush=True)
    return [
        dataclasses.replace(row, samples={}, environment={**row.environment, "beside": beside})
        for row in of_kind(ended.rows, ChangeRow)
    ]


def main() -> None:
    """Measure what was asked for, and keep it beside what is there."""
    cores = os.cpu_count() or 1
    asked = parser(__doc__)
    asked.add_argument("--models", default=",".join(MODELS))
    asked.add_argument("--beside", default=f"0,{cores}", help="processes of other work: 0 for none")
    asked.add_argument("--seconds", type=float, default=900, help="of a ladder, after which it is ended")
    given = asked.parse_args()
    for beside in map(int, given.beside.split(",")):
        for model in given.models.split(","):
            start = time.monotonic()
            rows = ladder(model, beside, given.seconds)
            name = f"tests.realworld.models:{model}"
            kept = read_records(KEPT) if KEPT.exists() else []
            others = [row for row in kept if (row.case["workload"], row.environment["beside"]) != (name, beside)]
            write_whole(KEPT, [*others, *rows])
            print(f"{model:12} beside {beside}: {len(rows)} rows in {time.monotonic() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main()
