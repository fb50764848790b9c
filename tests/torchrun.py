"""Commands of ours under torchrun, as a user starts them."""

import os
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]


def torchrun(*words, cwd=REPOSITORY, timeout=560, **environment):
    """The process of `torchrun -m` and these words on two ranks, which has ended."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m"]
    options = {"capture_output": True, "text": True, "env": os.environ | environment}
    return subprocess.run([*command, *map(str, words)], cwd=cwd, timeout=timeout, **options)
