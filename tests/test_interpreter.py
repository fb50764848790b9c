"""Run the kernels' arithmetic here, without a GPU: files of tests in a process of its own, in Triton's interpreter."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
NOT_HERE = ("test_kernels.py", "test_liger.py")  # compiled kernels, and a peer's
OPERATORS = [each for each in sorted(HERE.glob("fused/test_*.py")) if each.name not in NOT_HERE]
ATTENTION = [HERE / "attention/triton/interpreted.py"]


@pytest.mark.timeout(900)  # on a slow machine, beside others, over five minutes
@pytest.mark.parametrize("which", ["not thorough", pytest.param("thorough", marks=pytest.mark.thorough)])
@pytest.mark.parametrize("files", [OPERATORS, ATTENTION], ids=["fused", "attention"])
def test_kernels_in_the_interpreter(files: list[Path], which: str) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", f"{which} and not gpu", *files],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-2000:]
    assert "skipped" not in result.stdout.splitlines()[-1], result.stdout[-1000:]
