"""Environment of a number: machine, versions, commit, the GPU's clocks, power and throttling; and its ceilings.

A ceiling is the best rate of several large matrix products (per precision) or copies, of random inputs, never zeros:
zeros run faster, as fewer bits toggle, which takes less power.
"""

from __future__ import annotations

import datetime
import functools
import importlib.metadata
import os
import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from trainstep.base.commit import commit_of
from trainstep.base.config import PhaseContext
from trainstep.base.cores import cores
from trainstep.base.precision import PrecisionName
from trainstep.measure.timing import device_clock, time_steps
from trainstep.step.casting import DTYPES, matmul_precision

Environment = dict[str, str | float | int]  # column → value

_LONG_MS = 200.0  # a matrix product that takes so long is not repeated a dozen times
_THROTTLE_REASONS = {  # NVML's clocks-event bits that mean "slower than it could be"
    0x004: "power cap",
    0x008: "hardware slowdown",
    0x020: "software thermal slowdown",
    0x040: "hardware thermal slowdown",
    0x080: "hardware power brake",
}


@functools.cache
def describe(device: torch.device, *, has_commit: bool = True) -> Environment:
    """Facts that stay the same for the process: device, host, versions and commit. Goes into every record.

    Args:
        has_commit: whether git is asked, in a child of this process.
    """
    found: Environment = {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "device": device_name(device),
        "cpu": cpu_model(),
        "torch": torch.__version__,
        "triton": _version("triton"),
        "python": platform.python_version(),
        "trainstep": _version("trainstep"),
        **({"commit": commit_of()} if has_commit else {}),
        "threads": torch.get_num_threads(),
        "cores": cores(),
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found |= {
            "cuda": torch.version.cuda or "none",
            "cudnn": str(torch.backends.cudnn.version()),
            "capability": f"{properties.major}.{properties.minor}",
            "gpu_uuid": f"GPU-{properties.uuid}",
            "device_memory_gib": round(properties.total_memory / 2**30, 2),
        }
        if settings := allocator_settings():
            found["allocator"] = settings
        found |= _nvml(device, _limits)
    return found


def allocator_settings() -> str:
    """Settings that the environment gives torch's allocator on GPUs; empty where there are none."""
    return os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or ""


def gpu_state(device: torch.device) -> Environment:
    """Clocks, power, temperature and throttling right now; empty on a CPU or where NVML does not answer."""
    return _nvml(device, _state) if device.type == "cuda" else {}


def device_name(device: torch.device) -> str:
    """The driver's name of a GPU, or the CPU's model."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_model()


def cpu_model() -> str:
    """The model of the host's CPU."""
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


def _nvml(device: torch.device, read: Callable[[Any, Any], Environment]) -> Environment:
    import pynvml

    try:
        pynvml.nvmlInit()
        try:
            uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
            return read(pynvml, pynvml.nvmlDeviceGetHandleByUUID(uuid))
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError:  # no driver, or none that answers
        return {}


def _limits(nvml: Any, handle: Any) -> Environment:
    return {
        "driver": nvml.nvmlSystemGetDriverVersion(),
        "max_sm_clock_mhz": nvml.nvmlDeviceGetMaxClockInfo(handle, nvml.NVML_CLOCK_SM),
        "memory_clock_mhz": nvml.nvmlDeviceGetMaxClockInfo(handle, nvml.NVML_CLOCK_MEM),
        "power_limit_w": nvml.nvmlDeviceGetEnforcedPowerLimit(handle) / 1e3,
    }


def _state(nvml: Any, handle: Any) -> Environment:
    reasons = nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)
    return {
        "sm_clock_mhz": nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM),
        "power_w": nvml.nvmlDeviceGetPowerUsage(handle) / 1e3,
        "temperature_c": nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU),
        "throttled_by": ", ".join(text for bit, text in _THROTTLE_REASONS.items() if reasons & bit) or "nothing",
    }


@dataclass(frozen=True)
class Ceilings:
    matmul_tflops: dict[PrecisionName, float]  # best rate of an n × n × n product, 1e12 FLOP/s
    copy_gb_s: float  # best rate of a device-to-device copy, bytes read plus bytes written, 1e9 bytes/s


def measure_ceilings(device: torch.device, precisions: Sequence[PrecisionName]) -> Ceilings:
    """Measure in a few seconds on a CPU and less on a GPU; `precisions` must be supported by the device."""
    copied = 2**30 if device.type == "cuda" else 2**27
    rates = {precision: _matmul_tflops(device, precision) for precision in precisions}
    source = torch.empty(copied // 4, device=device, dtype=torch.float32).normal_()
    target = torch.empty_like(source)
    milliseconds = _best_ms(lambda: target.copy_(source), device)
    return Ceilings(rates, 2 * copied / milliseconds / 1e6)


@functools.cache
def why_no_half(device: torch.device) -> str:
    """Reason why bf16 is not worth a try on a CPU without instructions for it; empty where it may be.

    Its products of 256 × 256 matrices are slower than float32's there.
    """
    if device.type == "cuda":
        return ""
    own, full = (_rate(device, precision, 256) for precision in ("bf16", "fp32"))
    return "" if own >= full else f"this CPU computes {1e3 * own:.3g} GFLOP/s in bf16 and {1e3 * full:.3g} in float32"


def _matmul_tflops(device: torch.device, precision: PrecisionName) -> float:
    """1e12 FLOP/s of large products; of small ones on a CPU without instructions for this precision, which is slow."""
    if device.type == "cuda":
        return _rate(device, precision, 8192)
    small = _rate(device, precision, 256)
    large_ms = 2 * 1024**3 / small / 1e9
    return _rate(device, precision, 1024) if large_ms < _LONG_MS else small


def _rate(device: torch.device, precision: PrecisionName, size: int) -> float:
    a, b = (torch.randn(size, size, device=device).to(DTYPES[precision]) for _ in range(2))
    out = torch.empty_like(a)
    with matmul_precision(precision):
        milliseconds = _best_ms(lambda: torch.mm(a, b, out=out), device)
    return 2 * size**3 / milliseconds / 1e9


def _best_ms(work: Callable[[], object], device: torch.device) -> float:
    def step(phase: PhaseContext) -> None:
        with phase("work"):
            work()

    timing = time_steps(step, device=device_clock(device), warmup=3, steps=10)
    return min(sample.laps["work"].ms for sample in timing.samples)
