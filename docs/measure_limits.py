"""Train every odd model (tests/parallel/odd) under our wrappers and torch's: docs/results/cpu-limits.json.

python docs/measure_limits.py                # all of them: minutes, on the CPU
python docs/measure_limits.py "torch's clip" # only print these
"""

from __future__ import annotations

import json
import sys
import time

import torch

import measuring  # noqa: F401 puts tests on the path
from tables import RESULTS
from tests.parallel.odd.runs import OURS, PEERS, outcome_of
from tests.parallel.odd.scenarios import SCENARIOS
from tests.workers import Workers
from trainstep.measure.environment import describe


def main(*names: str) -> None:
    """Run, print, and keep what came out."""
    environment = describe(torch.device("cpu"))
    scenarios: dict[str, dict[str, object]] = {}
    with Workers(2, timeout_s=10, limit_s=60, preload=["tests.parallel.odd.scenarios"]) as workers:
        for name in names or SCENARIOS:
            outcomes: dict[str, object] = {}
            scenarios[name] = {"odd": SCENARIOS[name].what, "outcomes": outcomes}
            for scheme in (*OURS, *PEERS):
                start = time.monotonic()
                outcome = outcome_of(name, scheme, workers)
                outcomes[scheme] = vars(outcome)
                took = f"{time.monotonic() - start:5.1f} s"
                print(f"{name:26} {scheme:18} {took} {outcome.what} {outcome.detail[:100]}", flush=True)
    if not names:
        kept = json.dumps({"environment": environment, "scenarios": scenarios}, indent=1)
        (RESULTS / "cpu-limits.json").write_text(kept + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
