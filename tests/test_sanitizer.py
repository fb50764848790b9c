"""Every kernel under compute-sanitizer, which sees loads and stores outside of what was allocated."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tools.trust.every_kernel import ours, values
from trainstep.attention.triton import Launcher

TIME_LIMIT = 400  # seconds; some 100 on an H200's host with an empty compiler cache


def memcheck(*arguments: str) -> subprocess.CompletedProcess[str]:
    """What memcheck says of `every_kernel`; a test skips where it cannot watch this GPU."""
    sanitizer = shutil.which("compute-sanitizer")
    if sanitizer is None:
        pytest.skip("needs CUDA's compute-sanitizer on the PATH")
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs compute capability 9.0, where all of the kernels run")
    command = [
        sanitizer,
        "--tool",
        "memcheck",
        "--error-exitcode",
        "9",
        sys.executable,
        "-m",
        "tools.trust.every_kernel",
    ]
    # What the caching allocator hands out may lie inside of a larger piece: it would hide what is out of bounds.
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    folder = Path(__file__).parents[1]
    result = subprocess.run(
        [*command, *arguments], capture_output=True, text=True, timeout=TIME_LIMIT, env=environment, cwd=folder
    )
    if "Device not supported" in result.stdout:
        pytest.skip("compute-sanitizer cannot watch a GPU on this machine")
    return result


@pytest.mark.gpu
@pytest.mark.timeout(TIME_LIMIT + 60)
def test_a_write_past_the_end_is_seen() -> None:
    result = memcheck("--planted")
    assert result.returncode == 9, result.stderr
    assert "Invalid __global__ write" in result.stdout


@pytest.mark.gpu
@pytest.mark.timeout(TIME_LIMIT + 60)
def test_no_kernel_loads_or_stores_outside_of_what_was_allocated() -> None:
    result = memcheck()
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    assert f"{len(ours())} kernels launched" in result.stdout
    assert "ERROR SUMMARY: 0 errors" in result.stdout


def test_every_launcher_has_one_of_these_kernels() -> None:
    assert {each._kernel for each in values() if isinstance(each, Launcher)} == ours()
