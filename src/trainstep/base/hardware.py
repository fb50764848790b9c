"""Abilities of known devices: peak arithmetic, memory bandwidth and memory size, each with its source.

Peaks are the vendors' dense figures (no sparsity), in units of 1e12 FLOP/s and 1e9 bytes/s. They are what utilisation
is a fraction *of*; what a device really reaches, `trainstep.measure.environment` measures. Memory is no datasheet's
figure but what the driver gives, see `DeviceSpec.memory_gib`. Of the host, how much memory is free. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from trainstep.base.errors import UsageError
from trainstep.base.precision import PRECISIONS

CGROUP = Path("/sys/fs/cgroup")
"""Folder in which Linux tells the limits of a container."""


@dataclass(frozen=True)
class DeviceSpec:
    """A device's datasheet."""

    name: str  # the vendor's, as the driver reports it
    fp32_tflops: float  # peak of ordinary float32 units
    tf32_tflops: float  # of tensor cores on float32 inputs rounded to TF32; fp32_tflops where there are none
    bf16_tflops: float  # of tensor cores on bfloat16 or float16 inputs, dense
    bandwidth_gb_s: float  # of device memory
    memory_gib: float
    """Device memory as the driver reports it to torch, in GiB, rounded down to 0.01.

    Vendors' "GB" of memory are GiB, less what the driver keeps (error correction, firmware). That differs by driver, by
    up to 2 %: this is the least that was found. The H200's was measured here; the H100 SXM's is from torch's
    out-of-memory message; the others are the `total_memory` of torch's device properties, in logs that users published.
    For a device of which none is found take 0.9 of its "GB": every device here has more (the T4 least, 0.91).
    """
    link_gb_s: float
    """Rate at which a GPU can send to the others of its node at once, in 1e9 bytes/s: NVLink, or else PCIe, one
    direction."""
    multiprocessors: int  # streaming multiprocessors: what the tiles of a matrix product are dealt out to
    source: str  # the document the figures were read in

    def peak_tflops(self, precision: str) -> float:
        """Peak of the units that matrix products run on at this precision, in 1e12 FLOP/s."""
        rates = {"fp32": self.fp32_tflops, "tf32": self.tf32_tflops, "bf16": self.bf16_tflops}
        return rates[PRECISIONS[precision].rate]


DEVICES: Mapping[str, DeviceSpec] = {
    spec.name: spec
    for spec in (
        DeviceSpec("NVIDIA H200", 67, 494.7, 989.4, 4800, 139.8, 450, 132, "NVIDIA H200 datasheet, SXM"),
        DeviceSpec("NVIDIA H100 80GB HBM3", 67, 494.7, 989.4, 3350, 79.11, 450, 132, "NVIDIA H100 datasheet, SXM"),
        DeviceSpec("NVIDIA H100 PCIe", 51, 378, 756, 2000, 79.1, 64, 114, "NVIDIA H100 datasheet, PCIe"),
        DeviceSpec("NVIDIA A100-SXM4-80GB", 19.5, 156, 312, 2039, 79.13, 300, 108, "NVIDIA A100 datasheet, SXM 80 GB"),
        DeviceSpec("NVIDIA A100-SXM4-40GB", 19.5, 156, 312, 1555, 39.49, 300, 108, "NVIDIA A100 datasheet, SXM 40 GB"),
        DeviceSpec("NVIDIA A100 80GB PCIe", 19.5, 156, 312, 1935, 79.25, 32, 108, "NVIDIA A100 datasheet, PCIe 80 GB"),
        DeviceSpec("NVIDIA B200", 75, 1125, 2250, 8000, 178.35, 900, 148, "NVIDIA DGX B200 datasheet, one of eight"),
        DeviceSpec("NVIDIA L40S", 91.6, 183, 362, 864, 44.42, 32, 142, "NVIDIA L40S datasheet"),
        DeviceSpec("NVIDIA L4", 30.3, 60, 121, 300, 22.03, 32, 58, "NVIDIA L4 datasheet"),
        DeviceSpec("NVIDIA A10G", 31.2, 35, 70, 600, 22.05, 32, 80, "AWS G5 and NVIDIA A10 datasheets"),
        DeviceSpec("NVIDIA GeForce RTX 4090", 82.6, 82.6, 165.2, 1008, 23.51, 32, 128, "NVIDIA Ada paper, appendix A"),
        DeviceSpec("NVIDIA GeForce RTX 3090", 35.6, 35.6, 71, 936, 23.55, 32, 82, "NVIDIA Ampere GA102 paper, table 2"),
        DeviceSpec(
            "Tesla V100-SXM2-32GB", 15.7, 15.7, 125, 900, 31.73, 150, 80, "NVIDIA V100 datasheet (float16; no bfloat16)"
        ),
        DeviceSpec("Tesla T4", 8.1, 8.1, 65, 320, 14.56, 16, 40, "NVIDIA T4 datasheet (float16; no bfloat16)"),
    )
}


def find_device(name: str) -> DeviceSpec | None:
    """The datasheet of the device the driver calls `name`, or None where it is not in the table."""
    return DEVICES.get(name)


def require_device(name: str) -> DeviceSpec:
    """Like `find_device`, for a name that a user typed; short forms such as `H200` are accepted.

    Raises:
        UsageError: no device matches, or more than one.
    """
    if name in DEVICES:
        return DEVICES[name]
    matches = [spec for known, spec in DEVICES.items() if name.lower() in known.lower()]
    if len(matches) == 1:
        return matches[0]
    found = "matches more than one device" if matches else "is not a known device"
    names = ", ".join(f"'{spec.name}'" for spec in matches or DEVICES.values())
    raise UsageError(f"{name!r} {found}; expected a part that only one of these has: {names}")


def free_host_bytes() -> int:
    """Bytes of this machine's memory that programs can still have, as Linux tells it; in a container at most what its
    limit leaves."""
    said = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    free = int(said["MemAvailable"].split()[0]) * 1024
    with suppress(OSError, ValueError):  # without a limit it says "max"
        free = min(free, int((CGROUP / "memory.max").read_text()) - int((CGROUP / "memory.current").read_text()))
    return max(free, 0)
