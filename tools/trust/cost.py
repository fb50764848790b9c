"""Measure the time that `trainstep run` adds to a script's process: 1 % of its steps plus one second is allowed.

    python -m tools.trust.cost              # steps of 5 and 500 ms, 10 and 5,000 modules: six minutes on an idle core
    python -m tools.trust.cost --turns 7
    python -m tools.trust.cost --gpu        # wall time of 2,000 steps that a GPU does: five minutes

The plain script and the same one under `trainstep run` take turns. A step of the script does little and then sleeps
until its time is over. On a busy machine, the CPU time of a step full of work varies by more than 1 %, which would hide
the cost. The time is the process's own (rusage) from its start to its end. trainstep's first process and its report are
left out: they run beside the script or after it.

Steps of a GPU follow one another without a pause, and the time is the clock's from the process's start to its last
step. A host's pace changes by more within minutes than the cost, so three pairs run at once.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import resource
import statistics
import sys
import tempfile
from pathlib import Path
from subprocess import DEVNULL, PIPE, Popen, check_call

SCRIPT = """
import os, sys, time, torch
from torch import nn
steps, step_s, modules, device = int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
model = nn.Sequential(nn.Linear(8, 8), *(nn.Sequential(nn.Identity()) for _ in range(modules // 2 - 1))).to(device)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
start = time.monotonic()
for step in range(1, steps + 1):
    loss = model(torch.randn(4, 8, device=device)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    loss.item()
    time.sleep(max(0.0, start + step * step_s - time.monotonic()))
ticks = int(open("/proc/self/stat").read().rpartition(")")[2].split()[19])
print("CLOCK", time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK"))
"""


def one(way: str, *words: str) -> None:
    """Run `python` or `trainstep run` with these words here, and print the CPU time of the process that it starts."""
    if way == "plain":
        check_call([sys.executable, *words])
    else:
        from trainstep.commands.cli import main as trainstep

        with contextlib.suppress(SystemExit):
            trainstep([way, *words])
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    print("CPU", used.ru_utime + used.ru_stime)


def measured(ways: list[list[str]], what: str, folder: str) -> list[float]:
    """CPU or CLOCK time in s of the scripts that these commands run at once: Python, or what `run` starts for them."""
    started = [Popen(way, cwd=folder, stdout=PIPE, stderr=DEVNULL, text=True) for way in ways]
    return [float(each.communicate()[0].rpartition(what)[2].split()[0]) for each in started]


def main() -> None:
    """Print a line for each length of a step and number of modules; exit 1 if one is over its budget."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--gpu", action="store_true", help="2,000 steps of a GPU, by the clock")
    options = parser.parse_args()
    what, device, lengths = "CPU", "cpu", [(0.005, 1000), (0.5, 40)]
    if options.gpu:
        what, device, lengths = "CLOCK", "cuda", [(0.0, 2000)]
    is_over = False
    print(f"step (ms)  modules  steps  plain {what} (s)  run {what} (s)  added (s)  allowed (s)")
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "train.py").write_text(SCRIPT)
        for (step_s, steps), modules in itertools.product(lengths, (10, 5000)):
            words = ["train.py", str(steps), str(step_s), str(modules), device]
            ways = [[sys.executable, __file__, "one", way, *words] for way in ("plain", "run")]
            together = [ways * 3] if options.gpu else [[way] for way in ways]
            turns = [[s for each in together for s in measured(each, what, folder)] for _ in range(options.turns)]
            plain, run = (statistics.median(s for turn in turns for s in turn[way::2]) for way in (0, 1))
            added = statistics.median(statistics.mean(turn[1::2]) - statistics.mean(turn[::2]) for turn in turns)
            allowed = 1.0 + 0.01 * (steps * step_s or plain)
            is_over |= added > allowed
            figures = f"{plain:13.2f}  {run:11.2f}  {added:9.2f}  {allowed:11.2f}"
            print(f"{step_s * 1e3:9.0f}  {modules:7}  {steps:5}  {figures}", flush=True)
    sys.exit(is_over)


if __name__ == "__main__":
    one(*sys.argv[2:]) if sys.argv[1:2] == ["one"] else main()
