"""Every kernel once under compute-sanitizer, which sees each access to memory that a kernel had no right to."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu

TIME_LIMIT = 400  # seconds; 120 on an H200's host with an empty compiler cache


def memcheck(*arguments: str) -> subprocess.CompletedProcess[str]:
    """What memcheck says of `every_kernel`; a test skips where it cannot watch this GPU."""
    sanitizer = shutil.which("compute-sanitizer")
    if sanitizer is None:
        pytest.skip("needs CUDA's compute-sanitizer on the PATH")
    command = [sanitizer, "--tool", "memcheck", "--error-exitcode", "9", sys.executable, "-m", "tests.every_kernel"]
    # What the caching allocator hands out may lie inside of a larger piece: it would hide what is out of bounds.
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    folder = Path(__file__).parents[1]
    result = subprocess.run(
        [*command, *arguments], capture_output=True, text=True, timeout=TIME_LIMIT, env=environment, cwd=folder
    )
    if "Device not supported" in result.stdout:
        pytest.skip("compute-sanitizer cannot watch a GPU on this machine")
    return result


def test_a_write_past_the_end_is_seen() -> None:
    result = memcheck("--planted")
    assert result.returncode == 9, result.stderr
    assert "Invalid __global__ write" in result.stdout


@pytest.mark.timeout(TIME_LIMIT)
def test_no_kernel_reads_or_writes_what_is_not_its_own() -> None:
    result = memcheck()
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    assert "14 kernels launched" in result.stdout
    assert "ERROR SUMMARY: 0 errors" in result.stdout
