"""`trainstep plan --workload`: a user's step traced under the policies that are shown, and, with `--measure`, timed.

Measuring times every operator of the trace alone (`measure.operators`) and adds what the host takes between operators,
which is measured on a step so small that it is nothing else. So a step can be timed that does not fit. Where it fits it
is measured as a whole too, before and after the operators, and a row says by how much the prediction is off.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Mapping, Sequence
from functools import partial
from statistics import median

import torch

from trainstep.base.config import ModelConfig, StepConfig
from trainstep.base.errors import UnsupportedError
from trainstep.base.hardware import find_device
from trainstep.base.precision import PRECISIONS, PrecisionName
from trainstep.bench.tracing import trace_calls, trace_step
from trainstep.measure.environment import describe, device_name, measure_ceilings
from trainstep.measure.memory import GIB
from trainstep.measure.operators import operator_seconds, quiet_clock
from trainstep.measure.outcome import Failure, attempt
from trainstep.measure.step import WARMUP, BatchedStep, case_columns, step_peaks
from trainstep.measure.timing import device_clock, time_steps
from trainstep.plan.communication import Link
from trainstep.plan.machine import Machine
from trainstep.plan.measured import calibrated
from trainstep.plan.traced import TracedCase, TracedStep
from trainstep.rows import CeilingRow, PlanCheckRow
from trainstep.rows.records import Scalar, make_row
from trainstep.step.training_step import build_step
from trainstep.step.workload import Workload, WorkloadSource, builtin_workload, resolve_device

STEPS = 5
"""Steps that are timed before the operators, and as many after."""


def traced_cases(
    source: WorkloadSource, config: StepConfig, policies: Sequence[str] = (), *, only_shapes: bool = True
) -> dict[str, TracedCase]:
    """The step under the policy of `config`, which comes first, and others: by default none and, as far as they can be
    traced, every-1 and selective.

    Raises:
        UnsupportedError: a step that cannot be traced; of the policies by default those that cannot be are left out.
    """
    trace = partial(trace_step, source, only_shapes=only_shapes)
    cases: dict[str, TracedCase] = {}
    for policy in dict.fromkeys([config.checkpointing, *(policies or ("none", "every-1", "selective"))]):
        each = dataclasses.replace(config, checkpointing=policy)
        if policies or policy == config.checkpointing:
            step = trace(each)
        else:
            found = attempt(partial(trace, each))
            if isinstance(found, Failure):
                continue
            step = found
        sharded: TracedStep | Failure = step
        if PRECISIONS[config.precision].is_autocast:
            sharded = attempt(partial(trace, dataclasses.replace(each, precision="bf16-pure")))
        cases[policy] = TracedCase(step, config.precision, step if isinstance(sharded, Failure) else sharded)
    return cases


def timed_here(source: WorkloadSource, config: StepConfig) -> tuple[TracedStep, PlanCheckRow]:
    """The step traced with the seconds of its operators on the device that is here, and it measured beside them.

    Raises:
        UnsupportedError: a step that cannot be traced, or with operators that cannot be timed alone.
    """
    device = resolve_device(config.device)
    traced, calls = trace_calls(source, config)
    before = attempt(partial(_measured_ms, source, config))
    host = host_seconds(device)
    seconds = operator_seconds(calls, device)
    missing = {call.name for call, each in zip(calls, seconds, strict=True) if each is None}
    if missing:
        raise UnsupportedError(f"cannot be called alone, and so not timed: {', '.join(sorted(missing))}")
    operators = [
        dataclasses.replace(operator, seconds=(each or 0.0) + host.get(operator.phase, 0.0))
        for operator, each in zip(traced.operators, seconds, strict=True)
    ]
    timed = dataclasses.replace(traced, operators=operators)
    case: dict[str, Scalar] = case_columns(source, config) | {"strategy": "single", "gpus": 1}
    environment = describe(device)
    if isinstance(before, Failure):
        row = make_row(PlanCheckRow, case, {}, status=before.status, reason=before.reason, environment=environment)
        return timed, row
    samples, peak = before
    after = attempt(partial(_measured_ms, source, config))
    samples = [*samples, *([] if isinstance(after, Failure) else after[0])]
    predicted_ms = 1e3 * sum(each.count * (each.seconds or 0.0) for each in operators)
    step_ms = median(samples)
    values: dict[str, Scalar] = {
        "step_ms": step_ms,
        "predicted_ms": predicted_ms,
        "time_error": predicted_ms / step_ms - 1,
        "peak_gib": peak / GIB,
        "predicted_gib": timed.peak / GIB,
        "memory_error": timed.peak / peak - 1,
    }
    return timed, make_row(PlanCheckRow, case, values, samples={"step": samples}, environment=environment)


def _measured_ms(source: WorkloadSource, config: StepConfig) -> tuple[list[float], int]:
    """Milliseconds of `STEPS` steps, by the clock that the operators are timed with, and the peak of another."""
    step = build_step(source, config)
    runner = BatchedStep(step)
    clock = quiet_clock(step.device)
    timing = time_steps(
        runner.run,
        device=device_clock(step.device),
        warmup=WARMUP,
        steps=STEPS,
        after_step=runner.prepare_next,
        clock=clock,
    )
    peaks = step_peaks(step, runner.batch, "step")
    assert peaks is not None, "the step is not compiled"
    return [sample.wall_ms for sample in timing.samples], peaks.peak


def host_seconds(device: torch.device) -> Mapping[str, float]:
    """Phase → what the host takes for each operator beyond the operator, from a step that has next to no arithmetic."""
    model = ModelConfig(vocab_size=64, d_model=16, d_ff=32, num_layers=4, num_heads=2)
    config = StepConfig(batch=1, context=8, attention="sdpa", device=str(device))

    def build(step: StepConfig) -> Workload:
        tokens = torch.randint(64, (2, 1, 8), generator=torch.Generator().manual_seed(0))
        made = builtin_workload(model, step, [(tokens[0], tokens[1])])
        made.optimizer = functools.partial(torch.optim.AdamW, lr=1e-3)
        return made

    source = WorkloadSource("host", build)
    traced, calls = trace_calls(source, config)
    alone = operator_seconds(calls, device)
    runner = BatchedStep(build_step(source, config))
    clock = quiet_clock(device)
    timing = time_steps(runner.run, device=device_clock(device), warmup=10, steps=30, clock=clock)
    found = {}
    for phase in traced.moments:
        inside = [
            (each.count, each.count * (seconds or 0.0))
            for each, seconds in zip(traced.operators, alone, strict=True)
            if each.phase == phase
        ]
        taken = median(sample.laps[phase].ms for sample in timing.samples) / 1e3
        calls_made = sum(count for count, _ in inside)
        found[phase] = max(0.0, taken - sum(seconds for _, seconds in inside)) / max(1, calls_made)
    return found


def machine_here(device: torch.device, precision: PrecisionName) -> Machine:
    """The device that is here, as measured: a GPU with the datasheet's connections, a CPU by itself."""
    environment, name = describe(device), device_name(device)
    rates = list(dict.fromkeys(["fp32", PRECISIONS[precision].rate]))
    found = measure_ceilings(device, rates)
    if device.type == "cuda" and (spec := find_device(name)) is not None:
        rows = [CeilingRow(operation="copy", gb_s=found.copy_gb_s, environment=environment)]
        for rate, tflops in found.matmul_tflops.items():
            rows.append(CeilingRow(operation="matmul", precision=rate, tflops=tflops, environment=environment))
        return calibrated(rows, spec)
    measured = {rate: tflops * 1e12 for rate, tflops in found.matmul_tflops.items()}
    flops = {each: measured.get(PRECISIONS[each].rate, measured["fp32"]) for each in PRECISIONS}
    if device.type == "cuda":
        memory = torch.cuda.get_device_properties(device).total_memory
    else:
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return Machine(
        name=name,
        matmul_flops=flops,
        copy_bytes_per_s=found.copy_gb_s * 1e9,
        memory_bytes=memory,
        multiprocessors=1,
        peak_flops=flops,
        link=Link(0.0, 0.0),
        basis=f"measured on {name}: rates of a large product and of a large copy",
    )
