"""Measure the CPU time that `trainstep run` adds to a script's process: 1 % of its steps plus one second is allowed.

    python -m tools.trust.cost              # steps of 5 and 500 ms, 10 and 5,000 modules: six minutes on an idle core
    python -m tools.trust.cost --turns 7 --steps 400,100

The plain script and the same one under `trainstep run` take turns. A step of the script does little and then sleeps
until its time is over. On a busy machine, the CPU time of a step full of work varies by more than 1 %, which would hide
the cost. The time is the process's own (rusage) from its start to its end. trainstep's first process and its report are
left out: they run beside the script or after it.
"""

from __future__ import annotations

import argparse
import contextlib
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ALLOWED_SHARE, ALLOWED_S = 0.01, 1.0
SCRIPT = """
import sys, time, torch
from torch import nn
steps, step_s, modules = int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])
model = nn.Sequential(nn.Linear(8, 8), *(nn.Sequential(nn.Identity()) for _ in range((modules - 2) // 2)))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
start = time.monotonic()
for step in range(1, steps + 1):
    loss = model(torch.randn(4, 8)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    loss.item()
    time.sleep(max(0.0, start + step * step_s - time.monotonic()))
"""


def one(way: str, *words: str) -> None:
    """Run `python` or `trainstep run` with these words here, and print the CPU time of the process that it starts."""
    if way == "plain":
        subprocess.run([sys.executable, *words], check=True)
    else:
        from trainstep.commands.cli import main as trainstep

        with contextlib.suppress(SystemExit):
            trainstep([way, *words])
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    print("CPU", used.ru_utime + used.ru_stime)


def measured(words: list[str]) -> float:
    """CPU time of a script's process in s: of Python with these words, or of what `trainstep run` starts for them."""
    ended = subprocess.run(words, check=True, capture_output=True, text=True)
    return float(ended.stdout.rpartition("CPU ")[2])


def main() -> None:
    """Print a line for each length of a step and number of modules; exit 1 if one is over its budget."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--steps", default="1000,40", help="how many steps of 5 ms and of 500 ms")
    options = parser.parse_args()
    counts = [int(count) for count in options.steps.split(",")]
    is_over = False
    print("step (ms)  modules  steps  plain CPU (s)  run CPU (s)  added (s)  allowed (s)")
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "train.py"
        script.write_text(SCRIPT)
        for step_s, steps in zip((0.005, 0.5), counts, strict=True):
            for modules in (10, 5000):
                words = [str(script), str(steps), str(step_s), str(modules)]
                start = [sys.executable, "-m", "tools.trust.cost", "one"]
                ways = [*start, "plain", *words], [*start, "run", "--out", f"{folder}/out", *words]
                pairs = [[measured(way) for way in ways] for _ in range(options.turns)]
                plain, run = (statistics.median(times) for times in zip(*pairs, strict=True))
                added = statistics.median(run - plain for plain, run in pairs)
                allowed = ALLOWED_S + ALLOWED_SHARE * steps * step_s
                is_over |= added > allowed
                figures = f"{plain:13.2f}  {run:11.2f}  {added:9.2f}  {allowed:11.2f}"
                print(f"{step_s * 1e3:9.0f}  {modules:7}  {steps:5}  {figures}", flush=True)
    sys.exit(is_over)


if __name__ == "__main__":
    one(*sys.argv[2:]) if sys.argv[1:2] == ["one"] else main()
