"""A campaign of kills: six commands are stopped at a random moment, and all that they leave must be whole.

`python docs/measure_kills.py` starts each command on a small case. It sends Ctrl-C, SIGTERM, SIGHUP or SIGKILL, stops
it for a while, or closes its output. Afterwards no process of it may run, every file must be whole, its script must
be the same, no draft may be left, and the exit code must be one of docs/commands.md. SIGKILL may leave a draft that the
next start in the folder removes. The results go to docs/results/kills.json, from which docs/trust.md has its table.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import random
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from measuring import parser
from tables import RESULTS
from trainstep.base.guards import held_folder
from trainstep.measure.environment import describe

SCRIPT = """import torch
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))
optimizer = torch.optim.AdamW(model.parameters())
for step in range(200):
    model(torch.ones(64, 64)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    print("step", step, flush=True)
"""
FILES = {
    "train.py": SCRIPT,
    "text.txt": "Every file is whole. " * 200,
    "toy.toml": "[model]\nnum_layers = 1\nd_model = 32\nd_ff = 64\nnum_heads = 2\nvocab_size = 256\n",
    "sweep.toml": 'command = "bench step"\n[axes]\ncontext = [16, 32]\n[fixed]\nsize = "toy.toml"\nsteps = 3\n',
}
SMALL = "--size toy.toml --context 32 --batch 2 --device cpu"
COMMANDS = {
    "run": "run --out out train.py",
    "run --ladder": "run --ladder --steps 5 --changes 'fused optimizer' --out out train.py",
    "bench step": f"bench step {SMALL} --precision fp32,bf16 --warmup 1,2 --steps 3 --out out",
    "sweep": "sweep sweep.toml --out out",
    "analyze": f"analyze --quick {SMALL} --out out",
    "train": f"train {SMALL} --data text.txt --steps 60 --out out",
}
"""Commands by name, in a folder with `FILES`."""
CODES = {"INT": (130, 130), "TERM": (143, 143), "HUP": (143, 129), "KILL": (137, 137), "closed output": (0, 1)}
"""Kind → exit codes of a command, and of `run` whose script ended as plain Python. 0 is its own end."""
KINDS = (*CODES, "STOP+CONT")
PATIENCE_S, ENDING_S = 30.0, 20.0
"""Seconds after which a command that goes on gets SIGTERM too, and in which one that is ended has done so."""


def kill(command: str, kind: str, after_s: float) -> dict[str, Any]:
    """Start a command, disturb it, and return its code and all that is wrong."""
    mark, began = str(uuid.uuid4()), time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        for name, text in FILES.items():
            Path(folder, name).write_text(text)
        words = [sys.executable, "-m", "trainstep", *shlex.split(COMMANDS[command])]
        said = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        running = subprocess.Popen(words, cwd=folder, env=os.environ | {"MARK": mark}, text=True, **said)  # type: ignore[call-overload]
        with contextlib.suppress(subprocess.TimeoutExpired):
            running.wait(after_s)
        if kind == "closed output":
            running.stdout.close()
        else:
            for each in kind.split("+"):
                running.send_signal(signal.Signals[f"SIG{each}"])
                time.sleep(0.5)
        goes_on = kind in ("closed output", "STOP+CONT")
        ending = threading.Timer(PATIENCE_S if goes_on else 600, running.terminate)
        ending.start()
        text = "" if running.stdout.closed else running.communicate()[0]
        code = running.wait()
        ending.cancel()
        took_s = time.monotonic() - began
        wrong = damaged(Path(folder), is_killed=kind == "KILL") + [f"left: {each}" for each in _left(mark)]
    code = 128 - code if code < 0 else code
    told = {0, *CODES.get(kind, ())[: 2 if command == "run" else 1], 143 if goes_on else 0}
    told |= {129} if kind == "HUP" and not text.strip() else set()  # while Python starts
    told |= {1} if command == "run" and "KeyboardInterrupt" in text else set()  # the script's own
    if code not in told:
        wrong.append(f"exit code {code}")
    went_on = ("interrupted" in text) > ("script had ended" in text) or took_s > after_s + ENDING_S
    went_on &= not (command == "run" and "step 199" in text)  # torch's imports lose a Ctrl-C now and then, run or not
    if code == 0 and kind in ("INT", "TERM", "HUP") and command != "train" and went_on:
        wrong.append("exit code 0, though interrupted")
    row = {"command": command, "kind": kind, "after_s": round(after_s, 1), "took_s": round(took_s, 1), "code": code}
    return row | {"wrong": wrong} | ({"said": text[-500:]} if wrong else {})


def _left(mark: str) -> list[str]:
    """Command lines of processes with this mark in their environment, once they have had 10 s to end."""
    deadline, found = time.monotonic() + 10, [""]
    while found and time.monotonic() < deadline:
        found = []
        for each in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if mark in (each / "environ").read_text(errors="replace"):
                    found.append((each / "cmdline").read_text().replace("\0", " ")[:100])
        time.sleep(0.1)
    return found


def damaged(place: Path, *, is_killed: bool) -> list[str]:
    """What is wrong with the files that a launch left in `place`: cut ones, drafts, or another script."""
    out = place / "out"
    for lock in (*place.glob("out/.lock"), *place.glob("out/cases/*/.lock")) if is_killed else ():
        with held_folder(lock.parent, "the next start"):
            pass
    found = [f"{name} was changed" for name, text in FILES.items() if (place / name).read_text() != text]
    for path in (each for each in out.rglob("*") if each.is_file()):
        try:
            content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
            if path.name.startswith(".draft-"):
                raise ValueError("a draft")
            for text in content.splitlines() if path.suffix == ".jsonl" else [content] * (".json" in path.suffixes):
                json.loads(text)
            end = {".html": b"</html>"}.get(path.suffix, b"\n")
            if path.suffix in (".jsonl", ".html", ".md", ".csv", ".tex", ".typ") and end not in content[-10:]:
                raise ValueError("cut")
        except (ValueError, EOFError, OSError) as error:
            found.append(f"{path.relative_to(out)}: {error}")
    return found


def main() -> None:
    """Print a line for each kill, and exit with 1 if anything is wrong."""
    options = parser(__doc__)
    options.add_argument("--count", type=int, default=200)
    options.add_argument("--seed", type=int, default=65)
    options.add_argument("--latest", type=float, default=20.0, help="seconds within which a command is disturbed")
    options.add_argument("--keep", action="store_true", help="write docs/results/kills.json")
    asked = options.parse_args()
    for number in (signal.SIGINT, signal.SIGHUP):  # ignored where a shell has started this in its background
        signal.signal(number, signal.default_int_handler)
    environment, dice = describe(torch.device("cpu")) | {"seed": asked.seed}, random.Random(asked.seed)
    every, found = [(command, kind) for command in COMMANDS for kind in KINDS], list[dict[str, Any]]()
    drawn = [each for _ in range(-(-asked.count // len(every))) for each in dice.sample(every, len(every))]
    cases = [(*each, dice.uniform(0.1, asked.latest)) for each in drawn[: asked.count]]
    with ThreadPoolExecutor(2) as pool:
        for row in pool.map(lambda case: kill(*case), cases):
            found.append(row)
            print(f"{len(found)}/{asked.count}", *row.values(), sep=" | ", flush=True)
            if asked.keep:
                lines = ",\n".join(json.dumps(each, ensure_ascii=False) for each in found)
                text = f'{{"environment": {json.dumps(environment)},\n"kills": [\n{lines}\n]}}\n'
                (RESULTS / "kills.json").write_text(text, encoding="utf-8")
    sys.exit(any(each["wrong"] for each in found))


if __name__ == "__main__":
    main()
