"""Records of analyses that never ran: the same on every machine, and with every outcome that a report must show.

`cpu_analysis()` is what a laptop gives; `h200_analysis()` a GPU, with a wrong rung, a slower one, one that does not
fit, one that is unsupported, one with too few samples for an interval, and a GPU that was throttled.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tests.report.changes import carried
from trainstep.base.stats import Ratio, ratio_of_medians, summarize, verdict
from trainstep.rows import FINAL, CeilingRow, ChangeRow, StepRow, WorkloadRow
from trainstep.rows.records import Row, Scalar, Status, make_row

CPU: Mapping[str, Scalar] = {
    "date": "2026-01-02", "device": "A CPU with 2 cores", "cpu": "A CPU with 2 cores", "torch": "2.13.0+cpu",
    "triton": "3.7.1", "python": "3.12.1", "trainstep": "0.1.0", "commit": "0123456789", "threads": 2,
}  # fmt: skip
H200: Mapping[str, Scalar] = {
    **CPU, "device": "NVIDIA H200", "cpu": "A CPU with 16 cores", "torch": "2.13.0+cu130", "threads": 16,
    "gpu_uuid": "GPU-01234567-89ab-cdef-0123-456789abcdef", "cuda": "13.0", "cudnn": "91300", "capability": "9.0",
    "device_memory_gib": 139.8, "driver": "580.65.06", "max_sm_clock_mhz": 1980, "power_limit_w": 700.0,
}  # fmt: skip
GPU_STATE: Mapping[str, Scalar] = {
    "sm_clock_mhz": 1755, "power_w": 689.4, "temperature_c": 61, "throttled_by": "power cap"
}  # fmt: skip


@dataclass(frozen=True)
class Machine:
    """Where the records pretend to come from."""

    environment: Mapping[str, Scalar]
    case: Mapping[str, Scalar]
    tflop: float
    tokens: int
    at_rest_gib: float
    optimizer_gib: float
    first_loss: float
    is_gpu: bool
    random: random.Random


@dataclass(frozen=True)
class Speed:
    """What one step takes, in ms and GiB."""

    forward: float
    loss: float
    backward: float
    optimizer: float
    peaks: tuple[float, float, float, float]
    issue: float = 0.0
    """Share of the device time that the host needs to issue a phase's work."""
    spread: float = 0.01


@dataclass(frozen=True)
class RungSpec:
    """One rung of a synthetic ladder."""

    name: str
    change: Mapping[str, Scalar]
    speed: Speed | None
    gradient_error: float
    budget: float
    n: int = 10
    status: Status = "ok"
    reason: str = ""
    worst_parameter: str = "blocks.3.attention.key.weight"
    loss_noise: float = 0.0
    measures_memory: bool = True
    extra: Mapping[str, Scalar] = field(default_factory=dict)


def cpu_analysis(workload: str = "tiny") -> list[Row]:
    """A whole analysis of a small model on a CPU: two rungs kept, two inconclusive, one slower."""
    machine = Machine(CPU, _case(workload, 256), 0.0151, 1024, 0.0404, 0.0269, 9.2, False, random.Random(1))
    eager = Speed(51.8, 14.0, 112.0, 8.1, (0.147, 0.185, 0.223, 0.0673), spread=0.03)
    fused = Speed(45.1, 13.6, 100.0, 8.2, (0.133, 0.171, 0.209, 0.0673), spread=0.02)
    autocast = Speed(28.2, 22.0, 86.1, 7.4, (0.0988, 0.175, 0.194, 0.0673), spread=0.03)
    compiled = Speed(25.0, 22.8, 84.1, 7.4, autocast.peaks, spread=0.12)
    chunked = Speed(24.0, 35.5, 132.0, 7.5, (0.0771, 0.156, 0.194, 0.0673), spread=0.05)
    ladder = [
        RungSpec("baseline", {}, eager, 0.0, 1.42e-6, worst_parameter=""),
        RungSpec("fused attention", {"attention": "sdpa"}, fused, 9.81e-8, 1.42e-6),
        RungSpec("fused optimizer", {"optimizer": "adamw-fused"}, fused, 9.81e-8, 1.42e-6),
        RungSpec("bf16 autocast", {"precision": "bf16"}, autocast, 0.0040, 0.0464, loss_noise=2e-4),
        RungSpec(
            "compiled blocks", {"compile": "blocks"}, compiled, 0.0041, 0.0158, loss_noise=2e-4, measures_memory=False
        ),
        RungSpec("chunked loss", {"loss": "chunked"}, chunked, 0.0040, 0.0158, loss_noise=2e-4),
    ]
    return [
        _facts(machine, 3_609_728, 4),
        *_warmup_study(machine, eager, first_ms=229.8),
        *_ceilings(machine, {"fp32": 0.2001, "bf16": 0.4198}, 59.04),
        *_ladder(machine, ladder),
    ]


def h200_analysis(workload: str = "large") -> list[Row]:
    """A whole analysis of a large model on a GPU, with every outcome that a rung can have."""
    machine = Machine(H200, _case(workload, 512), 10.42, 2048, 11.66, 7.78, 10.4, True, random.Random(2))
    eager = Speed(92.3, 1.9, 187.4, 24.6, (24.1, 24.6, 27.9, 15.6), issue=0.32, spread=0.004)
    tf32 = Speed(44.1, 1.9, 90.2, 24.5, (24.1, 24.6, 27.9, 15.6), issue=0.6, spread=0.004)
    bf16 = Speed(32.5, 2.3, 62.0, 24.5, (20.9, 21.5, 23.2, 15.6), issue=0.95, spread=0.006)
    fused = Speed(24.6, 2.3, 46.1, 24.5, (16.3, 16.9, 18.8, 15.6), issue=0.97, spread=0.008)
    optimizer = Speed(24.6, 2.3, 46.0, 7.2, (16.3, 16.9, 18.8, 15.6), issue=0.97, spread=0.008)
    compiled = Speed(14.0, 1.1, 27.9, 7.2, (15.1, 15.6, 17.4, 15.6), issue=0.5, spread=0.005)
    whole = Speed(14.1, 1.1, 27.8, 7.2, compiled.peaks, issue=0.4, spread=0.02)
    chunked = Speed(14.0, 3.2, 34.8, 7.2, (14.6, 15.0, 16.8, 15.6), issue=0.5, spread=0.005)
    wrong = "off by 0.71 in the gradients, 0.0031 in the loss and 1 in blocks.0.attention.query.weight; "
    wrong += "the budget is 0.015"
    ladder = [
        RungSpec("baseline", {}, eager, 0.0, 4.3e-6, worst_parameter=""),
        RungSpec("TF32 matmuls", {"precision": "tf32"}, tf32, 6.1e-4, 0.0154, loss_noise=1e-4),
        RungSpec("bf16 autocast", {"precision": "bf16"}, bf16, 0.0072, 0.123, loss_noise=8e-4),
        RungSpec("fp16 autocast", {"precision": "fp16"}, None, 0.71, 0.0154, status="wrong", reason=wrong,
                 worst_parameter="blocks.0.attention.query.weight"),
        RungSpec("fused attention", {"attention": "sdpa"}, fused, 0.0074, 0.0222, loss_noise=8e-4),
        RungSpec("fused optimizer", {"optimizer": "adamw-fused"}, optimizer, 0.0074, 0.0222, loss_noise=8e-4),
        RungSpec("compiled blocks", {"compile": "blocks"}, compiled, 0.0081, 0.0222, loss_noise=9e-4),
        RungSpec("compiled model", {"compile": "model"}, whole, 0.0081, 0.0222, n=5, loss_noise=9e-4),
        RungSpec("batch of 64", {"batch": 64}, None, 0.0, 0.0, status="out of memory",
                 reason="tried to allocate 18.6 GiB with 131.2 of 139.8 GiB in use"),
        RungSpec("FP8 matmuls", {"precision": "fp8"}, None, 0.0, 0.0, status="unsupported",
                 reason="this build of torch has no FP8 autocast"),
        RungSpec("chunked loss", {"loss": "chunked"}, chunked, 0.0081, 0.0222, loss_noise=9e-4),
    ]  # fmt: skip
    return [
        _facts(machine, 1_043_000_000, 36),
        *_warmup_study(machine, eager, first_ms=1873.0),
        *_ceilings(machine, {"fp32": 51.4, "tf32": 401.7, "bf16": 742.0}, 4021.0),
        *_ladder(machine, ladder),
    ]


def _case(workload: str, context: int) -> dict[str, Scalar]:
    return {
        "workload": workload,
        "batch": 4,
        "context": context,
        "precision": "fp32",
        "compile": "off",
        "attention": "eager",
        "loss": "dense",
        "optimizer": "adamw-foreach",
        "seed": 0,
    }


def _facts(machine: Machine, parameters: int, blocks: int) -> Row:
    forward = machine.tflop / 3
    shares = {"projections": 0.24, "feed_forward": 0.55, "attention": 0.06, "head": 0.15}
    values: dict[str, Scalar] = {
        "parameters": parameters,
        "trainable_parameters": parameters,
        "parameters_gib": parameters * 4 / 2**30,
        "blocks": blocks,
        "tokens": machine.tokens,
        "forward_tflop": forward,
        **{f"{name}_tflop": share * forward for name, share in shares.items()},
        "flops_counted": "matrix products and the causal half of attention, backward as twice forward",
    }
    return make_row(WorkloadRow, machine.case, values, environment=machine.environment)


def _warmup_study(machine: Machine, speed: Speed, first_ms: float) -> list[Row]:
    run = _measured(machine, speed, 15)
    run["step"][0] = first_ms
    run["forward"][0] += first_ms - run["step"][1]
    losses = _losses(machine, 15, 0.0)
    records = []
    for warmup in (0, 1, 2, 5):
        window = {name: samples[warmup : warmup + 10] for name, samples in run.items()}
        case = {**machine.case, "mode": "step", "warmup": warmup, "steps": 10, "repeat": 0}
        values = _values(machine, window, speed) | {"first_step_ms": first_ms}
        records.append(
            make_row(StepRow, case, values, samples=window | {"training_loss": losses}, environment=machine.environment)
        )
    return records


def _ceilings(machine: Machine, tflops: Mapping[str, float], gb_s: float) -> list[Row]:
    return [
        *(
            CeilingRow(operation="matmul", precision=precision, tflops=rate, environment=machine.environment)
            for precision, rate in tflops.items()
        ),
        CeilingRow(operation="copy", gb_s=gb_s, environment=machine.environment),
    ]


def _ladder(machine: Machine, rungs: Sequence[RungSpec]) -> list[Row]:
    """The changes as a ladder would have judged them."""
    records: list[Row] = []
    controlled: list[tuple[Mapping[str, Scalar], Speed, list[float]]] = []  # the first rung and the top
    first: list[float] = []
    kept: list[float] = []
    settings = dict(machine.case)
    for rung in rungs:
        case = {"change": rung.name, **settings, **rung.change}
        deviation: dict[str, Scalar] = {
            "loss_error": rung.gradient_error / 200,
            "gradient_error": rung.gradient_error,
            "worst_gradient_error": min(1.0, 2.5 * rung.gradient_error),
            "worst_parameter": rung.worst_parameter,
            "worst_allowed": 2.5 * rung.budget,
            "error_budget": rung.budget,
            "float32_error": 2e-7,
            "float32_allowed": 3e-6,
            "update_error": 1e-6,
            "update_allowed": 2e-4,
        }
        if rung.speed is None:
            values = (
                (deviation if rung.status == "wrong" else {})
                | carried(rung.name)
                | {"verdict": rung.status, "accepted": False}
            )
            failed = make_row(
                ChangeRow, case, values, status=rung.status, reason=rung.reason, environment=machine.environment
            )
            records.append(failed)
            continue
        samples = _measured(machine, rung.speed, rung.n)
        first = first or samples["step"]
        if not kept:
            controlled.append((case, rung.speed, samples["step"]))
        total = gain = Ratio(1.0, None)
        if kept:
            total, gain = ratio_of_medians(first, samples["step"]), ratio_of_medians(kept, samples["step"])
        called = verdict(gain) if kept else "baseline"
        keep = called in ("baseline", "faster")
        if keep:
            kept, settings = samples["step"], settings | dict(rung.change)
            controlled[1:] = [(case, rung.speed, samples["step"])]
        values = (
            _values(machine, samples, rung.speed)
            | _ratio("speedup", total)
            | _ratio("gain", gain)
            | deviation
            | carried(rung.name)
            | {"verdict": called, "accepted": keep, "check_s": 1.5, "first_step_ms": 1.3 * samples["step"][0]}
        )
        if not rung.measures_memory:
            values = {name: None if name.endswith("peak_gib") else value for name, value in values.items()}
        losses = _losses(machine, rung.n + 3, rung.loss_noise)
        records.append(
            make_row(
                ChangeRow, case, values, samples=samples | {"training_loss": losses}, environment=machine.environment
            )
        )
    values, again = {"accepted": True}, list[list[float]]()
    for end, (case, speed, before) in zip(("first", "top"), controlled, strict=False):
        again.append(_measured(machine, speed, len(before))["step"])
        values |= {
            end: case["change"],
            f"{end}_ms": summarize(before).median,
            f"{end}_again_ms": summarize(again[-1]).median,
        }
        values |= _ratio(f"{end}_drift", ratio_of_medians(again[-1], before))
        if before is not first:
            total = ratio_of_medians(first, again[-1])
            values |= _ratio("speedup", total) | {"verdict": verdict(total)}
    case = {**controlled[-1][0], "change": FINAL}
    records.append(make_row(ChangeRow, case, values, environment=machine.environment))
    return records


def _ratio(name: str, ratio: Ratio) -> dict[str, Scalar]:
    low, high = (ratio.interval.low, ratio.interval.high) if ratio.interval else (None, None)
    return {name: ratio.value, f"{name}_low": low, f"{name}_high": high}


def _measured(machine: Machine, speed: Speed, n: int) -> dict[str, list[float]]:
    """Samples per column, as `bench.step.phase_samples` gives them."""

    def around(middle: float) -> list[float]:
        return [middle * (1 + abs(machine.random.gauss(0, speed.spread))) for _ in range(n)]

    names = ("forward", "loss", "backward", "optimizer")
    phases = {name: around(getattr(speed, name)) for name in names}
    step = [sum(phases[name][index] for name in names) + 0.2 for index in range(n)]
    if not machine.is_gpu:
        return {"step": step, **phases}
    issue = {f"{name}_issue": around(getattr(speed, name) * speed.issue) for name in names}
    wait = [step[index] - sum(issue[f"{name}_issue"][index] for name in names) for index in range(n)]
    return {"step": step, **phases, **issue, "wait": wait}


def _values(machine: Machine, samples: Mapping[str, Sequence[float]], speed: Speed) -> dict[str, Scalar]:
    values: dict[str, Scalar] = {}
    for name, column in samples.items():
        summary = summarize(column)
        values |= {
            f"{name}_ms": summary.median,
            f"{name}_low_ms": summary.interval.low if summary.interval else None,
            f"{name}_high_ms": summary.interval.high if summary.interval else None,
            f"{name}_mean_ms": summary.mean,
            f"{name}_std_ms": summary.std,
            f"{name}_min_ms": summary.min,
            f"{name}_max_ms": summary.max,
            f"{name}_outliers": summary.outliers,
        }
    step_s = summarize(samples["step"]).median / 1e3
    peaks = dict(zip(("forward", "loss", "backward", "optimizer"), speed.peaks, strict=True))
    return {
        **values,
        "n": len(samples["step"]),
        "first_step_ms": samples["step"][0],
        "tokens_per_s": machine.tokens / step_s,
        "model_tflop": machine.tflop,
        "achieved_tflops": machine.tflop / step_s,
        "utilisation": machine.tflop / step_s / 989.4 if machine.is_gpu else None,
        "at_rest_gib": machine.at_rest_gib,
        "peak_gib": max(speed.peaks),
        **{f"{name}_peak_gib": peak for name, peak in peaks.items()},
        "optimizer_state_gib": machine.optimizer_gib,
        **(GPU_STATE if machine.is_gpu else {}),
    }


def _losses(machine: Machine, count: int, noise: float) -> list[float]:
    return [
        machine.first_loss * (0.93 + 0.07 * 0.9**index) * (1 + machine.random.gauss(0, noise) / 10)
        for index in range(count)
    ]
