"""`trainstep memory --fit`: choose for every block what to do with its activations, apply it, and measure what came."""

from __future__ import annotations

import dataclasses
import itertools
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from trainstep.base.config import EVERY_BLOCK, POLICIES, StepConfig
from trainstep.base.errors import UnsupportedError, UsageError, one_line
from trainstep.base.hardware import free_host_bytes
from trainstep.base.stats import summarize
from trainstep.bench.fit.costs import block_costs
from trainstep.bench.memory import UNFOLLOWED
from trainstep.check.step import StepCheck
from trainstep.check.verdict import Verdict
from trainstep.checkpointing.policies import BlockPolicy, Policy
from trainstep.measure.environment import describe
from trainstep.measure.memory import GIB, LiveStorages
from trainstep.measure.outcome import Failure, attempt, failed_row
from trainstep.measure.step import WARMUP, StepMeasurement, case_columns, measure_step, measure_training_step
from trainstep.plan.fit import Choice, Chosen, Copies, StepCost, choose, peak_of, seconds_of, with_budget_error
from trainstep.rows import FitRow
from trainstep.rows.records import Scalar
from trainstep.rows.row import Times
from trainstep.step.batches import tensors_of
from trainstep.step.blocks import find_blocks
from trainstep.step.training_step import TrainingStep, build_step, uncompiled
from trainstep.step.weights import optimizer_state_tensors
from trainstep.step.workload import WorkloadSource, resolve_device

AGAIN = "all again"
"""Name of the row of `EVERY_BLOCK`, from which choices are counted."""
ROUNDS = 3
"""A choice that took more than its budget is made anew, its prediction corrected by what was measured, so often."""
RESERVE = 0.06
"""Share of the device's memory that its libraries and the gaps between blocks of the allocator are left."""


@dataclass(frozen=True)
class Budget:
    """Memory that a step may take: a number of bytes, a share of the plain step's peak, or what the device has."""

    bytes: int | None = None
    share: float | None = None

    @staticmethod
    def parse(text: str) -> Budget:
        """`130GiB`, `500MiB`, `65%`, or nothing for what the device has.

        Raises:
            UsageError: another text, or a size that is not positive.
        """
        units = {"GiB": 2**30, "MiB": 2**20, "%": 0.01}
        unit = next((unit for unit in units if text.endswith(unit)), "")
        try:
            value = float(text.removesuffix(unit)) if text else 1.0
        except ValueError:
            value = -1.0
        if text and (not unit or not 0 < value < 1e6):
            raise UsageError(f"--fit is {text!r}; expected 130GiB, 500MiB, or a share of the plain step's peak, 65%")
        if unit == "%":
            return Budget(share=value / 100)
        return Budget(bytes=int(value * units[unit])) if text else Budget()

    @staticmethod
    def parse_all(text: str) -> list[Budget]:
        """Several, divided by commas; each once."""
        return list(dict.fromkeys(map(Budget.parse, text.split(","))))

    def of(self, plain_bytes: int, device: torch.device) -> int:
        """In bytes.

        Raises:
            UsageError: what the device has is asked for, and it is a CPU.
        """
        if self.share is not None:
            return int(self.share * plain_bytes)
        if self.bytes is not None:
            return self.bytes
        if device.type != "cuda":
            raise UsageError("--fit without a size is for what a GPU has; on a CPU say how much, such as --fit 4GiB")
        return int(torch.cuda.get_device_properties(device).total_memory * (1 - RESERVE))


def fit_records(
    source: WorkloadSource,
    config: StepConfig,
    wanted: Mapping[Budget, Path],
    *,
    host_gib: float | None = None,
    update_after_backward: bool = False,
    compare: bool = False,
    warmup: int = 2,
    steps: int = 10,
) -> Iterator[FitRow]:
    """A row for the step with everything computed again, one for the same with updates in backward, one for the plain
    step, one for each choice that was tried for a budget, and with `compare` one for each policy that all blocks share.

    Args:
        wanted: budgets, and where the policy that was chosen for each is written. What they share is measured once.
        host_gib: page-locked memory that activations may take; None: a quarter of what is free, as torch rounds
            buffers up to powers of two. On a CPU none is taken.
        update_after_backward: choose no updates in backward, as for a training that clips or accumulates gradients.

    Raises:
        UsageError: no budget on a CPU, or the only one is below what the step needs; the message says how much that
            is. Of several, such a one is a row.
    """
    device = resolve_device(config.device)
    for budget in wanted:
        budget.of(0, device)  # so that a wrong one costs no run
    run = _Run(source, dataclasses.replace(config, checkpointing="none"), warmup, steps)
    costs = attempt(partial(_block_costs, source, run.config, host_gib))
    if isinstance(costs, Failure):
        yield run.failed(AGAIN, run.under(EVERY_BLOCK), costs)
        return
    again, plain = [Choice()] * len(costs.blocks), [Choice(is_plain=True)] * len(costs.blocks)
    forms: dict[bool, StepCost] = {}
    for in_backward in (False,) if update_after_backward else (False, True):
        under = run.under(EVERY_BLOCK)
        more: dict[str, Any] = {}
        if in_backward:
            file = next(iter(wanted.values())).with_name("again-in-backward.json")
            policy_of(costs, again, update_in_backward=True).save(file)
            under, more = run.under(f"@{file}"), {"update_in_backward": True}
        base = attempt(partial(_measure_base, source, under, warmup, steps))
        if isinstance(base, Failure):
            yield run.failed(AGAIN, under, base, **more)
            continue
        costs = _with_base(costs, base)
        yield run.row(AGAIN, under, base.measurement, costs, again, **more)
        # The same kernels run, so that another time of this form is chance, and would choose.
        first = next(iter(forms.values()), costs)
        forms[in_backward] = dataclasses.replace(costs, seconds=first.seconds)
    if not forms:
        return
    costs = next(iter(forms.values()))
    found = attempt(partial(measure_step, source, run.config, "step", warmup, steps))
    yield run.row("plain", run.config, found, costs, plain)
    measured = found.memory.peak if isinstance(found, StepMeasurement) and found.memory else peak_of(costs, plain)
    check = StepCheck(source, run.under(EVERY_BLOCK))  # whose reference serves every budget
    for budget, file in wanted.items():
        limit = budget.of(measured, device)
        try:
            yield from _fitted(run, forms, limit, file, check)
        except UsageError as error:
            if len(wanted) == 1:
                raise
            too_small = Failure("unsupported", one_line(error))
            yield run.failed("fit", run.under(f"@{file}"), too_small, budget_gib=limit / GIB)
    for name in POLICIES[1:] if compare else ():  # the first is none
        found = attempt(partial(measure_step, source, run.under(name), "step", warmup, steps))
        yield run.row(name, run.under(name), found, costs, None)


def _choose(forms: Mapping[bool, StepCost], limit: int) -> tuple[bool, Chosen]:
    """Choose whether to update in backward, and what to keep then, at the least predicted time; after it if both are
    alike.

    Raises:
        UsageError: nothing fits; the message says how much it takes at least.
        UnsupportedError: nothing was found to fit, and of some form the solver does not know.
    """
    fitting: list[tuple[bool, Chosen]] = []
    errors: list[UsageError] = []
    for in_backward, costs in forms.items():
        try:
            fitting.append((in_backward, choose(costs, limit)))
        except UsageError as error:
            errors.append(error)
    if not fitting:
        unknown = [error for error in errors if isinstance(error, UnsupportedError)]
        raise (unknown or errors)[-1]  # of those that need too much, the one in backward needs the least
    return min(fitting, key=lambda each: each[1].seconds)


def _fitted(run: _Run, forms: Mapping[bool, StepCost], limit: int, file: Path, check: StepCheck) -> Iterator[FitRow]:
    """Rows of the choices for one budget, until one fits.

    Raises:
        UsageError: nothing fits; the message says how much it takes at least.
    """
    forms = dict(forms)
    for number in range(1, ROUNDS + 1):
        in_backward, chosen = _choose(forms, limit)
        costs = forms[in_backward]
        policy_of(costs, chosen.choices, update_in_backward=in_backward).save(file)
        fitted = run.under(f"@{file}")
        found = attempt(partial(measure_step, run.source, fitted, "step", run.warmup, run.steps))
        peak = found.memory.peak if isinstance(found, StepMeasurement) and found.memory else None
        fits = peak is not None and peak <= limit
        verdict = attempt(partial(check.judge, fitted)) if fits else None
        more: dict[str, Any] = {"round": number, "budget_gib": limit / GIB, "gap": chosen.gap, "policy": str(file)}
        more["update_in_backward"] = in_backward
        yield run.row("fit", fitted, found, costs, chosen.choices, verdict, **more, **_told(costs, chosen))
        if in_backward and False in forms and isinstance(verdict, Verdict) and not verdict.is_right:
            del forms[True]  # this optimizer's updates are others there
            continue
        if peak is None or fits:
            break
        off = partial(with_budget_error, measured=peak, predicted=chosen.peak_bytes)
        forms = {form: off(each) for form, each in forms.items()}  # of the same activations, so by as much


@dataclass(frozen=True)
class _Base:
    moments: Mapping[str | int, int]
    measurement: StepMeasurement


def _measure_base(source: WorkloadSource, config: StepConfig, warmup: int, steps: int) -> _Base:
    if resolve_device(config.device).type == "cpu" and config.compile != "off":
        raise UnsupportedError(UNFOLLOWED)
    step = build_step(source, config)
    moments = measure_moments(step)
    return _Base(moments, measure_training_step(step, source, "step", warmup, steps))


def _block_costs(source: WorkloadSource, config: StepConfig, host_gib: float | None) -> StepCost:
    """Costs of blocks and copies, of a step that is not known yet."""
    blocks = block_costs(source, config)
    device = resolve_device(config.device)
    copies = None
    if device.type == "cuda" and host_gib != 0:
        out, back = copy_rates(device)
        copies = Copies(out, back, free_host_bytes() // 4 if host_gib is None else int(GIB * host_gib))
    return StepCost(blocks, 0, 0, (), 0, 0.0, copies)


def _with_base(costs: StepCost, base: _Base) -> StepCost:
    """The same blocks in another step in which each is computed again."""
    moments = base.moments
    return dataclasses.replace(
        costs,
        loss_bytes=moments[LOSS],
        head_bytes=moments[HEAD],
        backward_bytes=tuple(moments.get(index, 0) for index in range(len(costs.blocks))),  # a frozen one has none
        other_bytes=moments[OTHER],
        seconds=summarize(_milliseconds(base.measurement)).median / 1e3,
    )


def policy_of(costs: StepCost, choices: Sequence[Choice], *, update_in_backward: bool = False) -> Policy:
    """Policy in the form that `--checkpointing @FILE` takes."""
    blocks = {
        block.name: BlockPolicy(not choice.is_plain, choice.kept, choice.host)
        for block, choice in zip(costs.blocks, choices, strict=True)
    }
    return Policy(blocks, update_in_backward)


def _told(costs: StepCost, chosen: Chosen) -> dict[str, Any]:
    """The choices as columns."""
    told = []
    named = [(block.name, choice) for block, choice in zip(costs.blocks, chosen.choices, strict=True)]
    for choice, own in itertools.groupby(named, key=lambda each: each[1]):
        names = [name for name, _ in own]
        what = "keep everything" if choice.is_plain else "computed again"
        what += f", keep {' '.join(choice.kept)}" if choice.kept else ""
        if choice.host:
            what += f", {len(choice.host)} storages" if choice.is_plain else ", input"
            what += " in host memory"
        told.append(f"{names[0]}{f' to {names[-1]}' if len(names) > 1 else ''}: {what}")
    plain = sum(choice.is_plain for choice in chosen.choices)
    sent = 0
    for block, choice in zip(costs.blocks, chosen.choices, strict=True):
        stored = sum(each.bytes for each in block.stored if each.number in choice.host)
        sent += stored if choice.is_plain else block.input_bytes * len(choice.host)
    return {
        "choices": tuple(told),
        "blocks_kept": plain,
        "blocks_again": len(chosen.choices) - plain,
        "blocks_sending": sum(bool(choice.host) for choice in chosen.choices),
        "host_gib": sent / GIB,
    }


def _milliseconds(measurement: StepMeasurement) -> list[float]:
    return [sample.wall_ms for sample in measurement.timing.samples]


@dataclass(frozen=True)
class _Run:
    """State that all rows of a fit share."""

    source: WorkloadSource
    config: StepConfig
    warmup: int
    steps: int

    def under(self, policy: str) -> StepConfig:
        return dataclasses.replace(self.config, checkpointing=policy)

    def failed(self, form: str, config: StepConfig, failure: Failure, **more: Any) -> FitRow:
        case = case_columns(self.source, config) | {"form": form}
        return failed_row(FitRow, case, failure, describe(resolve_device(config.device)), more)

    def row(
        self,
        form: str,
        config: StepConfig,
        found: StepMeasurement | Failure,
        costs: StepCost,
        made: Sequence[Choice] | None,
        verdict: Verdict | Failure | None = None,
        *,
        round: int | None = None,
        **more: Scalar,
    ) -> FitRow:
        values: dict[str, Any] = dict(more)
        case: dict[str, Any] = case_columns(self.source, config) | {"form": form, "round": round}
        if made is not None:
            values |= {"predicted_gib": peak_of(costs, made) / GIB, "predicted_ms": 1e3 * seconds_of(costs, made)}
        if isinstance(verdict, Verdict):
            values |= verdict.columns()
            if not verdict.is_right:
                found = Failure("wrong", str(verdict))
        elif verdict is not None:
            values["not_checked"] = f"{verdict.status}: {verdict.reason}"
        environment = describe(resolve_device(config.device))
        if isinstance(found, Failure):
            return failed_row(FitRow, case, found, environment, values)
        samples = _milliseconds(found)
        summary = summarize(samples)
        if made is not None:
            values["time_error"] = values["predicted_ms"] / summary.median - 1
        if found.memory is not None:
            values["peak_gib"] = found.memory.peak / GIB
            if made is not None:
                values["prediction_error"] = values["predicted_gib"] * GIB / found.memory.peak - 1
        return FitRow(
            **case, **values, times={"step": Times.of(summary)}, samples={"step": samples}, environment=environment
        )


# Rates at which a GPU's memory is copied to page-locked host memory and back.
COPY_BYTES, COPIES = 256 * 2**20, 5
"""Bytes of a copy, and how often it is made."""


def copy_rates(device: torch.device) -> tuple[float, float]:
    """Bytes per second to page-locked host memory and back, of a GPU."""
    here = torch.empty(COPY_BYTES, dtype=torch.uint8, device=device)
    there = torch.empty(COPY_BYTES, dtype=torch.uint8, pin_memory=True)
    rates = []
    for target, origin in ((there, here), (here, there)):
        samples = []
        for _ in range(COPIES):
            torch.cuda.synchronize(device)
            start = time.perf_counter()
            target.copy_(origin, non_blocking=True)
            torch.cuda.synchronize(device)
            samples.append(time.perf_counter() - start)
        rates.append(COPY_BYTES / statistics.median(samples))
    return rates[0], rates[1]


# The peaks of a step in which every block is computed again, moment by moment.
#
# Moments are told apart by what the choices of a block change: what follows the last block's forward, which is the
# loss, wherever a model computes it; backward before it comes to the last block; the backward of each block, from when
# its output's gradient is there to when its input's is; and all else (forward, the optimizer), whose peaks no choice
# raises above those.
LOSS, HEAD, OTHER = "loss", "head", "other"


def measure_moments(step: TrainingStep) -> dict[str | int, int]:
    """Peaks in bytes, after `WARMUP` steps: of `LOSS`, `HEAD`, `OTHER` and of each block's backward by its index."""
    for _ in range(WARMUP):
        step(step.next_batch())
    batch = step.next_batch()
    kept = [*step.module.parameters(), *step.module.buffers(), *optimizer_state_tensors(step.optimizer)]
    live = None if step.device.type == "cuda" else LiveStorages([*kept, *tensors_of(batch)])
    meter = _Meter(step.device, live)
    with _watched(find_blocks(step.module), meter), live or nullcontext(), uncompiled() if live else nullcontext():
        meter.begin(OTHER)
        step(batch, phase=meter.phase)
        meter.begin(OTHER)
    found = 0 if live is None else live.found_bytes
    return {moment: peak + found for moment, peak in meter.peaks.items()}


class _Meter:
    """Notes the most bytes between one moment's beginning and the next's."""

    def __init__(self, device: torch.device, live: LiveStorages | None) -> None:
        self.peaks: dict[str | int, int] = defaultdict(int)
        self._device, self._live = device, live
        self._moment: str | int | None = None

    def begin(self, moment: str | int) -> None:
        peak = torch.cuda.max_memory_allocated(self._device) if self._live is None else self._live.peak
        if self._moment is not None:
            self.peaks[self._moment] = max(self.peaks[self._moment], peak)
        if self._live is None:
            torch.cuda.reset_peak_memory_stats(self._device)
        else:
            self._live.peak = self._live.bytes
        self._moment = moment

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self.begin({"loss": LOSS, "backward": HEAD}.get(name, OTHER))
        yield


@contextmanager
def _watched(blocks: list[nn.Module], meter: _Meter) -> Iterator[None]:
    """Inside, the end of the last block's forward is told, and when backward comes to each of them; outside of what is
    compiled."""
    undo = []
    for index, block in enumerate(blocks):
        place = "forward" if block._compiled_call_impl is None else "_compiled_call_impl"
        undo.append((block, place, block.__dict__.get(place)))
        is_last = index == len(blocks) - 1
        block.__dict__[place] = partial(_call, index, is_last, meter, getattr(block, place))
    try:
        yield
    finally:
        for block, place, before in undo:
            if before is None:
                del block.__dict__[place]
            else:
                block.__dict__[place] = before


def _call(index: int, is_last: bool, meter: _Meter, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    result = function(*args, **kwargs)
    if is_last:
        meter.begin(LOSS)
    for tensor in tree_leaves(result):
        if isinstance(tensor, Tensor) and tensor.requires_grad:
            tensor.register_hook(lambda gradient: meter.begin(index))
    return result
