"""`trainstep plan`: what a training step will need and take on a cluster, before anyone has one."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainstep.base.config import ModelConfig, StepConfig
from trainstep.base.errors import UsageError
from trainstep.commands.options import VARIED, Common, commas, flags_of, preset, short_name, sources
from trainstep.commands.output import run_and_report

if TYPE_CHECKING:
    from trainstep.plan.machine import Machine
    from trainstep.plan.rows import PlanRequest
    from trainstep.rows.records import Row

DEFAULT_SIZE = "2.7B"
DEFAULT_STEP = StepConfig(precision="bf16", attention="sdpa", optimizer="adamw-fused")
"""Settings that people train with, where no file says otherwise."""
NETWORK_GB_S = 40.0
PlannedModel: Any = flags_of(ModelConfig, defaults=dict.fromkeys(VARIED, "the size's"), without=["rope_theta"])
UNPLANNED = ["learning_rate", "device", "seed", "graph"]
PlannedStep: Any = flags_of(StepConfig, defaults=vars(DEFAULT_STEP), without=UNPLANNED)


@dataclass(frozen=True, kw_only=True)
class Plan(Common):
    """Predict memory, traffic, time and throughput of a step under each parallel strategy. Nothing is measured."""

    size: str | None = None
    """Named size (tiny, small, medium, large, 2.7B, 8B, 10B, and each model of CS336's handouts with its year, such as
    2025/xl or 2026/xl) or a .toml file with a [model] table; by default 2.7B. The model's own flags change it further.
    """
    workload: str | None = None
    """Your own model instead: package.module:factory, a function returning a trainstep.Workload. One step of it is
    traced, on tensors without data where that is possible. Precision is bf16 by default, all else as the workload has
    it; tensor parallelism and larger batches are planned for the built-in sizes alone."""
    config: Path | None = None
    """TOML file with [model] and [step] tables, as defaults for the flags; by default a step in bf16 with fused
    attention and fused optimizer."""
    device: str | None = None
    """Name of a known GPU, or a part of it that only one has, as H200, the default without a calibration."""
    calibration: commas(Path) = ()  # type: ignore[valid-type]
    """Results measured on the GPU: results.jsonl of `trainstep analyze`, `bench collectives`, `bench step`. Their rates
    take the place of the datasheet's, and those of collectives between hosts that of --network-gb-s. Rows of
    `bench parallel` say what a host takes to launch a step of a built-in size, which is then no shorter."""
    gpus_per_node: int = 8
    """GPUs of a node."""
    nodes: int = 1
    """Nodes."""
    tensor_parallel: int | None = None
    """GPUs over which a matrix is split in "fsdp + tp"; by default the number with the highest predicted throughput."""
    network_gb_s: float | None = None
    """Rate at which each GPU can send to other nodes, in 1e9 bytes/s; by default what --calibration measured between
    hosts, else 40: 0.8 of a connection of 400 Gbit/s per GPU."""
    memory_gib: float | None = None
    """GiB of a GPU, in place of the datasheet's or the calibration's."""
    replicas: int | None = None
    """Replicas of hsdp, each sharded over consecutive GPUs; by default one on each node, or two on a single node."""
    blocks_per_group: int = 1
    """Blocks that are gathered together, in fsdp and hsdp."""
    policies: commas(str) = ()  # type: ignore[valid-type]
    """Checkpointing policies whose memory is shown: any of none, every-1; by default both."""
    model: PlannedModel = field(default_factory=dict)
    step: PlannedStep = field(default_factory=dict)
    """Settings of the step. The batch is what each GPU brings."""
    out: Path = Path("results/plan")
    """Folder for results.jsonl, tables/ and report.html. The default has a new folder for each launch."""

    def run(self) -> int:
        from trainstep.plan.rows import plan_records

        if self.workload is not None:
            with self.in_folder(self.workload) as own:
                return run_and_report(self._own_records(self.workload), own.out, f"plan of {self.workload}")
        model, step = preset(self.size, self.config, DEFAULT_SIZE, DEFAULT_STEP)
        request = self._request(
            self._machine(),
            name=short_name(self.size or self.config or DEFAULT_SIZE),
            model=dataclasses.replace(model, **self.model),
            step=dataclasses.replace(step, **self.step),
            policies=self.policies,
        )
        records = list(plan_records(request))  # complete, or an error, before anything is written
        with self.in_folder(request.name) as own:
            return run_and_report(records, own.out, f"plan of {request.name}")

    def _own_records(self, workload: str) -> Iterator[Row]:
        """The plan of a user's model. Complete, or an error, before its first row."""
        from trainstep.bench.tracing import traced_cases
        from trainstep.measure.step import case_columns
        from trainstep.plan.rows import plan_records, refuse_for_own_models

        refuse_for_own_models(self.tensor_parallel, self.blocks_per_group)
        (source,) = sources([self.size] if self.size else [], workload, None, list(self.model))
        own_step = preset(None, self.config, DEFAULT_SIZE, StepConfig(precision="bf16"))[1]
        step = dataclasses.replace(own_step, **self.step)
        cases, machine = traced_cases(source, step, self.policies), self._machine()
        machine = dataclasses.replace(machine, basis=f"{machine.basis}; {cases[step.checkpointing].step.basis}")
        columns = case_columns(source, step)
        own = [name for name in ("batch", "context", "attention", "optimizer") if columns[name] is None]
        request = self._request(machine, name=source.name, model=None, step=step, traced=cases, own=own)
        yield from list(plan_records(request))

    def _request(self, machine: Machine, **case: Any) -> PlanRequest:
        from trainstep.plan.machine import Cluster
        from trainstep.plan.rows import PlanRequest

        if self.network_gb_s is not None:
            machine, rate = dataclasses.replace(machine, network={}), self.network_gb_s * 1e9
        else:
            measured = machine.network.get("all-reduce") or next(iter(machine.network.values()), None)
            rate = NETWORK_GB_S * 1e9 if measured is None else measured.bus_bytes_per_s
        return PlanRequest(
            cluster=Cluster(machine, self.gpus_per_node, self.nodes, rate),
            tensor_parallel=self.tensor_parallel,
            replicas=self.replicas,
            blocks_per_group=self.blocks_per_group,
            **case,
        )

    def _machine(self) -> Machine:
        from trainstep.base.hardware import require_device
        from trainstep.plan.machine import machine_of
        from trainstep.plan.measured import calibrated
        from trainstep.rows.records import read_records

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
