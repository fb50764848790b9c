"""Where a number was measured: machine, versions, commit, and the GPU's clocks, power and throttling."""

from __future__ import annotations

import datetime
import functools
import importlib.metadata
import platform
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

Environment = dict[str, str | float | int]
"""Column → value."""

_THROTTLE_REASONS = {  # NVML's clocks-event bits that mean "slower than it could be"
    0x0000000000000004: "power cap",
    0x0000000000000008: "hardware slowdown",
    0x0000000000000020: "software thermal slowdown",
    0x0000000000000040: "hardware thermal slowdown",
    0x0000000000000080: "hardware power brake",
}


@functools.cache
def describe(device: torch.device) -> Environment:
    """What stays the same for the process: device, versions and commit. Goes into every record."""
    found: Environment = {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "device": device_name(device),
        "torch": torch.__version__,
        "triton": _version("triton"),
        "python": platform.python_version(),
        "trainstep": _version("trainstep"),
        "commit": _commit(),
        "threads": torch.get_num_threads(),
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found |= {
            "cuda": torch.version.cuda or "none",
            "cudnn": str(torch.backends.cudnn.version()),
            "capability": f"{properties.major}.{properties.minor}",
            "device_memory_gib": round(properties.total_memory / 2**30, 2),
        }
        found |= _nvml(device, _static_state)
    return found


def gpu_state(device: torch.device) -> Environment:
    """Clocks, power, temperature and throttling right now; empty on a CPU or where NVML does not answer."""
    return _nvml(device, _live_state) if device.type == "cuda" else {}


def device_name(device: torch.device) -> str:
    """The driver's name of a GPU, or the CPU's model."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.machine()


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _commit() -> str:
    """The checkout's commit, "+" appended where files differ from it; "unknown" outside a checkout."""
    here = Path(__file__).parents[1]

    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", *arguments], cwd=here, capture_output=True, text=True, timeout=10, check=True
        ).stdout.strip()

    try:
        return git("rev-parse", "--short=10", "HEAD") + ("+" if git("status", "--porcelain", "--", ".") else "")
    except (OSError, subprocess.SubprocessError):
        return "unknown"


def _nvml(device: torch.device, read: Callable[[Any, Any], Environment]) -> Environment:
    try:
        import pynvml
    except ImportError:
        return {}
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:  # no driver, or none that answers
        return {}
    try:
        uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
        return read(pynvml, pynvml.nvmlDeviceGetHandleByUUID(uuid))
    except pynvml.NVMLError:
        return {}
    finally:
        pynvml.nvmlShutdown()


def _static_state(nvml: Any, handle: Any) -> Environment:
    return {
        "driver": nvml.nvmlSystemGetDriverVersion(),
        "max_sm_clock_mhz": nvml.nvmlDeviceGetMaxClockInfo(handle, nvml.NVML_CLOCK_SM),
        "power_limit_w": nvml.nvmlDeviceGetEnforcedPowerLimit(handle) / 1e3,
    }


def _live_state(nvml: Any, handle: Any) -> Environment:
    reasons = nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)
    return {
        "sm_clock_mhz": nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM),
        "power_w": nvml.nvmlDeviceGetPowerUsage(handle) / 1e3,
        "temperature_c": nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU),
        "throttled_by": ", ".join(text for bit, text in _THROTTLE_REASONS.items() if reasons & bit) or "nothing",
    }
