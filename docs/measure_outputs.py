"""Run the commands whose output the pages show, and keep what they printed: docs/results/outputs.json.

python docs/measure_outputs.py        # on a CPU: a run, and a ladder with its patch, five minutes
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from measuring import LAUNCH, ROOT, keep, origin_of
from tables import RESULTS

SCRIPT = "python examples/data_bound.py"
OUTPUTS = {
    "run": f"run {SCRIPT}",
    "ladder": f"run --ladder --patch fix.diff {SCRIPT}",
}
"""Name of a block → the words after `trainstep`, in a folder with the examples."""


def main() -> None:
    """Run each in a terminal's width, and keep its lines with the machine, the date and the commit."""
    origin = origin_of("cpu", "device")
    own = os.environ | {"PYTHONPATH": str(ROOT / "src"), "COLUMNS": "80", "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as name:
        shutil.copytree(ROOT / "examples", Path(name) / "examples")
        for block, words in OUTPUTS.items():
            command = [sys.executable, *LAUNCH, *words.split()]
            done = subprocess.run(command, cwd=name, env=own, stderr=subprocess.PIPE, encoding="utf-8", check=True)
            answer = done.stderr[done.stderr.rindex("\n trainstep run") + 1 :].rstrip()  # below the progress
            patches = [f"$ cat {each.name}\n{each.read_text('utf-8')}" for each in Path(name).glob("*.diff")]
            told = "\n".join([f"$ trainstep {words}\n", f"{answer}\n", *patches])
            cell = {"text": told} | origin | {"device": f"{origin['device']}, one thread"}
            keep(RESULTS / "outputs.json", block, cell, (*OUTPUTS, "picture"))


if __name__ == "__main__":
    main()
