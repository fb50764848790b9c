"""Run the commands whose output the pages show, and keep what they printed: docs/results/outputs.json.

python docs/measure_outputs.py        # on a CPU: a run, a ladder with its patch, a patched run beside the first
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from subprocess import PIPE, STDOUT

from measuring import LAUNCH, ROOT, keep, origin_of
from tables import RESULTS

SCRIPT = "python examples/data_bound.py"
OUTPUTS = {
    "run": f"run {SCRIPT}",
    "ladder": f"run --ladder --patch fix.diff {SCRIPT}",
    "compare": "compare results/run/01-data_bound results/run/latest",
}
"""Name of a block → the words after `trainstep`, in a folder with the examples."""


def main() -> None:
    """Run each in a terminal's width, and keep its lines with the machine, the date and the commit."""
    origin = origin_of("cpu", "device")
    own = os.environ | {"PYTHONPATH": str(ROOT / "src"), "COLUMNS": "80", "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as name:
        shutil.copytree(ROOT / "examples", Path(name) / "examples")

        def printed(*words: str) -> str:
            done = subprocess.run(
                words, cwd=name, env=own, stdout=PIPE, stderr=STDOUT, encoding="utf-8", check=True
            ).stdout
            return f"\n{done}".rpartition("\n trainstep ")[2].rstrip()  # below the progress

        for block, words in OUTPUTS.items():
            if block == "compare":
                printed("git", "apply", "fix.diff")
                printed(sys.executable, *LAUNCH, *OUTPUTS["run"].split())
            answer = f" trainstep {printed(sys.executable, *LAUNCH, *words.split())}"
            patches = [f"$ cat {each.name}\n{each.read_text('utf-8')}" for each in Path(name).glob("*.diff")]
            told = "\n".join([f"$ trainstep {words}\n", f"{answer}\n", *(patches if block == "ladder" else ())])
            cell = {"text": told} | origin | {"device": f"{origin['device']}, one thread"}
            keep(RESULTS / "outputs.json", block, cell, (*OUTPUTS, "picture"))


if __name__ == "__main__":
    main()
