"""`trainstep plan`: what a training step will need and take on a cluster, before anyone has one."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainstep.commands.options import Common, ModelFlags, commas, flags_of, preset, short_name
from trainstep.commands.output import run_and_report
from trainstep.config import StepConfig
from trainstep.errors import UsageError

if TYPE_CHECKING:
    from trainstep.plan.machine import Machine

DEFAULT_SIZE = "2.7B"
DEFAULT_STEP = StepConfig(precision="bf16", attention="sdpa", optimizer="adamw-fused")
"""What people train with, where no file says otherwise."""
PlannedStep: Any = flags_of(StepConfig, defaults=vars(DEFAULT_STEP), without=["learning_rate", "device", "seed"])


@dataclass(frozen=True, kw_only=True)
class Plan(Common):
    """Predict memory, traffic, time and throughput of a step under each parallel strategy. Nothing is measured."""

    size: str | None = None
    """Named size (tiny, small, medium, large, xl, 2.7B, 10B) or a .toml file with a [model] table; by default 2.7B. The
    model's own flags change it further."""
    config: Path | None = None
    """TOML file with [model] and [step] tables, as defaults for the flags; by default a step in bf16 with fused
    attention and fused optimizer."""
    device: str | None = None
    """Name of a known GPU, or a part of it that only one has, as H200 (the default, where there is no calibration)."""
    calibration: commas(Path) = ()  # type: ignore[valid-type]
    """Results measured on the GPU: results.jsonl of `trainstep analyze`, `bench collectives`, `bench step`. Their rates
    take the place of the datasheet's."""
    gpus_per_node: int = 8
    """GPUs of a node."""
    nodes: int = 1
    """Nodes."""
    tensor_parallel: int | None = None
    """GPUs over which a matrix is split in "fsdp + tp"; by default the number with the highest predicted throughput."""
    network_gb_s: float = 40.0
    """What each GPU can send to other nodes, in 1e9 bytes/s: 0.8 of a connection of 400 Gbit/s per GPU, by default."""
    memory_gib: float | None = None
    """GiB of a GPU, in place of the datasheet's or the calibration's."""
    policies: commas(str) = ()  # type: ignore[valid-type]
    """Checkpointing policies whose memory is shown: any of none, every-K; by default none, every-1 and the best K."""
    model: ModelFlags = field(default_factory=dict)
    step: PlannedStep = field(default_factory=dict)
    """How the step is taken. The batch is what each GPU brings."""
    out: Path = Path("results/plan")
    """Folder for results.jsonl, tables/ and report.html."""

    def run(self) -> int:
        from trainstep.plan.machine import Cluster
        from trainstep.plan.rows import PlanRequest, plan_records

        model, step = preset(self.size, self.config, DEFAULT_SIZE, DEFAULT_STEP)
        request = PlanRequest(
            name=short_name(self.size or self.config or DEFAULT_SIZE),
            model=dataclasses.replace(model, **self.model),
            step=dataclasses.replace(step, **self.step),
            cluster=Cluster(self._machine(), self.gpus_per_node, self.nodes, self.network_gb_s * 1e9),
            tensor_parallel=self.tensor_parallel,
            policies=self.policies,
        )
        records = list(plan_records(request))  # complete, or an error, before anything is written
        return run_and_report(records, self.out, f"plan of {request.name}")

    def _machine(self) -> Machine:
        from trainstep.hardware import require_device
        from trainstep.plan.machine import machine_of
        from trainstep.plan.measured import calibrated
        from trainstep.records import read_records

        spec = require_device(self.device) if self.device is not None else None
        if self.calibration:
            machine = calibrated([row for path in self.calibration for row in read_records(path)], spec)
        else:
            machine = machine_of(spec or require_device("NVIDIA H200"))
        if self.memory_gib is None:
            return machine
        if not 0 < self.memory_gib < 1e6:
            raise UsageError(f"memory_gib is {self.memory_gib}; expected a positive number")
        return dataclasses.replace(machine, memory_bytes=int(self.memory_gib * 2**30))
