"""Run the kernels' arithmetic here, without a GPU: this folder in a process of its own, in Triton's interpreter."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

NOT_HERE = ("test_interpreter.py", "test_kernels.py", "test_liger.py")  # itself, and kernels compiled or a peer's


@pytest.mark.timeout(900)  # on a slow machine, beside others, over five minutes
@pytest.mark.parametrize("which", ["not thorough", pytest.param("thorough", marks=pytest.mark.thorough)])
def test_the_operators_in_the_interpreter(which: str) -> None:
    files = [str(each) for each in sorted(Path(__file__).parent.glob("test_*.py")) if each.name not in NOT_HERE]
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", f"{which} and not gpu", *files],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-2000:]
    assert "skipped" not in result.stdout.splitlines()[-1], result.stdout[-1000:]
