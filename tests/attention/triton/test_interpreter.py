"""Run the kernels' arithmetic here, without a GPU: `interpreted` in its own process, with Triton's interpreter on."""

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.timeout(900)  # on a slow machine two minutes alone, over five beside others
@pytest.mark.parametrize("which", ["not thorough", pytest.param("thorough", marks=pytest.mark.thorough)])
def test_the_kernels_in_the_interpreter(which: str) -> None:
    file = Path(__file__).with_name("interpreted.py")
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", which, str(file)],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-2000:]
