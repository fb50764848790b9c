"""A profile as rows: coverage and sums, families, pieces of attention, kernels, and the bars of one step's timeline."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from trainstep.base.config import PHASES
from trainstep.base.precision import PRECISIONS
from trainstep.base.stats import RUN_SPREAD, summarize
from trainstep.measure.allocations.timeline import interned
from trainstep.measure.costs import COUNTED
from trainstep.measure.profile.kernels import DURATION, GRAPH, MATMULS, TRANSFER, Kernel, KernelProfile, short_name
from trainstep.measure.profile.overlap import beside_us, busy_us, gaps, hidden_ms
from trainstep.measure.profile.trace import Stream
from trainstep.rows import FamilyRow, KernelRow, PieceRow, TimelineRow
from trainstep.rows.records import Row, Scalar, make_row
from trainstep.step.blocks import without_numbers

UNKNOWN = "(unknown)"  # the phase or module of a kernel that could not be placed
LONGEST = 12_000  # bars of a timeline on a page of its own
UNDECIDED = 0.05  # share of kernel time of unknown families up to which the share of matrix products is known

Key = TypeVar("Key", bound=Hashable)


def profile_rows(
    profile: KernelProfile, case: Mapping[str, Any], precision: str | None, environment: Mapping[str, Scalar]
) -> list[Row]:
    """All rows of a profile but the summary: families, pieces, kernels (longest first), the timeline."""
    own = {**case, "environment": environment, "has_steps": None if profile.has_steps else False}
    values, series = timeline_values(profile, _middle_step(profile))
    values["has_steps"] = own["has_steps"]
    timeline = make_row(TimelineRow, case, values, series=series, environment=environment)
    return [*_families(profile, precision, own), *_pieces(profile, own), *_kernels(profile, own), timeline]


def _middle_step(profile: KernelProfile) -> str | None:
    names = list(profile.by_step)
    return names[len(names) // 2] if names else None


def summary_values(profile: KernelProfile) -> dict[str, Scalar]:
    """Values of a profile as a whole."""
    forward, step = _of_phase(profile, "forward"), list(profile.kernels)
    values: dict[str, Scalar] = {
        "profiled_n": profile.steps,
        "on_cpu": profile.is_cpu,
        "has_steps": profile.has_steps,
        "kernels": sum(each.is_call for each in step if each.kind != "copy") / profile.steps,
        "kernels_ms": profile.per_step_ms(),
        **_copies(profile),
        "notes": profile.notes or None,
        "busy_ms": busy_ms(profile),
        "phase_coverage": profile.share(lambda each: each.phase is not None),
        "module_coverage": profile.share(lambda each: each.phase is not None and each.module is not None),
        "cost_coverage": profile.share(lambda each: each.call is not None),
        "counted": COUNTED,
        "outside_steps_ms": profile.outside_us / profile.steps / 1e3,
        "undecided_share": profile.share(lambda each: each.is_undecided),
        "matmul_share_step": _matmul_share(step),
    }
    for phase in PHASES:
        if own := _of_phase(profile, phase):
            values[f"{phase}_kernels_ms"] = profile.per_step_ms(own)
            values[f"{phase}_busy_ms"] = busy_ms(profile, phase)
    values |= _top("step", step, profile)
    if forward:
        values |= {"matmul_share_forward": _matmul_share(forward)} | _top("forward", forward, profile)
    if found := gaps(profile.by_step.get(_middle_step(profile), [])):
        values |= {
            "gaps": len(found),
            "gaps_ms": sum(gap.duration_us for gap in found) / 1e3,
            "largest_gap_ms": found[0].duration_us / 1e3,
            "largest_gap_phase": found[0].before.phase,
            "largest_gap_before": short_name(found[0].before.name),
        }
    if communication := [each for each in step if each.lane == "communication"]:
        values["communication_ms"] = profile.per_step_ms(communication)
        values["communication_overlapped_ms"] = hidden_ms(profile)
    return values


def _copies(profile: KernelProfile) -> dict[str, Scalar]:
    """Copies and fills, and of those the transfers between host and device; CUDA graphs recorded as one."""
    moved = profile.transfers
    copies = [*(each for each in profile.kernels if each.kind == "copy"), *moved]
    graphs = [each for each in profile.kernels if each.family == GRAPH]
    values: dict[str, Scalar] = {"copies": len(copies) / profile.steps} if copies else {}
    if graphs:
        values["graphs_ms"] = profile.per_step_ms(graphs)
    if not moved:
        return values
    beside = sum(
        beside_us(
            (each for each in own if each.family == TRANSFER),
            (each for each in own if each.family not in (TRANSFER, "communication")),
        )
        for own in profile.by_step.values()
    )
    told = [each for each in moved if re.search(r"(?i)pinned|pageable", each.name)]
    to_host = [each for each in moved if re.search(r"DtoH|D2M|Device-to-Host|DeviceToHost", each.name)]
    return values | {
        "transfers_ms": profile.per_step_ms(moved),
        "transfers_overlapped_ms": beside / profile.steps / 1e3,
        "transfers_gb": sum(each.bytes or 0 for each in moved) / profile.steps / 1e9 or None,
        "transfers_pinned_share": _share((each for each in told if "inned" in each.name), told),
        "transfers_to_host_share": _share(to_host, moved),
    }


def busy_ms(profile: KernelProfile, phase: str | None = None) -> float:
    """Milliseconds per step in which at least one kernel or transfer ran: of any phase, or of the one named."""
    if phase not in profile.busy_ms:
        steps = profile.by_step.values()
        own = ([each for each in step if phase in (None, each.phase)] for step in steps)
        profile.busy_ms[phase] = sum(map(busy_us, own)) / profile.steps / 1e3
    return profile.busy_ms[phase]


def _of_phase(profile: KernelProfile, phase: str) -> list[Kernel]:
    return [each for each in profile.kernels if each.phase == phase]


def _grouped(kernels: Iterable[Kernel], key: Callable[[Kernel], Key]) -> dict[Key, list[Kernel]]:
    groups: dict[Key, list[Kernel]] = {}
    for each in kernels:
        groups.setdefault(key(each), []).append(each)
    return groups


def _us(kernels: Iterable[Kernel]) -> float:
    return sum(map(DURATION, kernels))


def _share(part: Iterable[Kernel], of: Iterable[Kernel]) -> float | None:
    total = _us(of)
    return _us(part) / total if total else None


def _matmul_share(kernels: Sequence[Kernel]) -> float | None:
    """Share of the time; None where more than `UNDECIDED` of it may be matrix products or not."""
    is_known = (_share((each for each in kernels if each.is_undecided), kernels) or 0.0) <= UNDECIDED
    return (_share((each for each in kernels if each.family in MATMULS), kernels) or 0.0) if is_known else None


def _top(where: str, kernels: Sequence[Kernel], profile: KernelProfile) -> dict[str, Scalar]:
    """The kernel that takes most time, by all of its calls; and the one that is called most, which is another thing."""
    if not kernels:
        return {}
    by_name = _grouped(kernels, lambda each: each.name)
    calls = {name: sum(each.is_call for each in group) for name, group in by_name.items()}
    first = max(by_name, key=lambda name: _us(by_name[name]))
    operators = [name for name, group in by_name.items() if group[0].kind != "engine"]  # whose time has a name
    most_called = max(operators or calls, key=calls.__getitem__)
    return {
        f"top_{where}_kernel": short_name(first),
        f"top_{where}_kernel_family": by_name[first][0].family,
        f"top_{where}_kernel_calls": calls[first] / profile.steps,
        f"top_{where}_kernel_ms": profile.per_step_ms(by_name[first]),
        f"top_{where}_kernel_share": _share(by_name[first], kernels),
        f"most_called_{where}_kernel": short_name(most_called),
        f"most_called_{where}_kernel_calls": calls[most_called] / profile.steps,
    }


def rates(kernels: Sequence[Kernel], steps: int) -> dict[str, Any]:
    """FLOPs and bytes per step, and their rates over all kernels of the calls for which they are counted."""
    flops = {each.call: each.flops for each in kernels if each.flops}
    moved = {each.call: each.bytes for each in kernels if each.bytes}
    both = flops.keys() & moved.keys()
    bytes_of_both = sum(moved[call] for call in both)
    computing, moving = (_us(each for each in kernels if each.call in calls) for calls in (flops, moved))
    return {
        "tflop": sum(flops.values()) / steps / 1e12 if flops else None,
        "gb": sum(moved.values()) / steps / 1e9 if moved else None,
        "tflops": sum(flops.values()) / computing / 1e6 if computing else None,
        "gb_s": sum(moved.values()) / moving / 1e3 if moving else None,
        "flop_per_byte": sum(flops[call] for call in both) / bytes_of_both if bytes_of_both else None,
    }


def _measured(kernels: Sequence[Kernel], profile: KernelProfile) -> dict[str, Any]:
    """Values that every row of kernels has, per step."""
    calls = sum(each.is_call for each in kernels) / profile.steps
    return {"calls": calls, "ms": profile.per_step_ms(kernels), **rates(kernels, profile.steps)}


def _families(profile: KernelProfile, precision: str | None, own: Mapping[str, Any]) -> Iterator[FamilyRow]:
    """Rows of each family, of the whole step and of each phase, the most time first."""
    for phase in ("step", *PHASES):
        kernels = list(profile.kernels) if phase == "step" else _of_phase(profile, phase)
        transfers = [each for each in profile.transfers if phase in ("step", each.phase)]
        groups = _grouped([*kernels, *transfers], lambda each: each.family)
        for family, group in sorted(groups.items(), key=lambda item: -_us(item[1])):
            yield FamilyRow(
                **own,
                phase=phase,
                family=family,
                share=None if family == TRANSFER else _share(group, kernels),
                ceiling_precision=_ceiling_precision(family, precision),
                **_measured(group, profile),
            )


def _ceiling_precision(family: str, precision: str | None) -> str | None:
    """The precision of the measured product whose rate bounds a family's arithmetic."""
    if family == "FP32 SIMT matmul":
        return "fp32"
    if family in ("tensor-core matmul", "matmul", "fused attention") and precision is not None:
        return PRECISIONS[precision].rate
    return None


def _pieces(profile: KernelProfile, own: Mapping[str, Any]) -> Iterator[PieceRow]:
    """Scores, softmax and weighted sum, in forward and in backward: all of each piece, and its main kernels alone."""
    announced = [each for each in profile.kernels if each.piece is not None]
    for (phase, piece), group in _grouped(announced, lambda each: (each.phase, each.piece)).items():
        main = [each for each in group if (each.family == "softmax" if piece == "softmax" else each.family in MATMULS)]
        of_main = {f"main_{name}": value for name, value in rates(main, profile.steps).items()}
        values = _measured(group, profile) | of_main | {"main_ms": profile.per_step_ms(main)}
        yield PieceRow(**own, **values, phase=phase, piece=piece)  # type: ignore[arg-type]  # announced in a phase


def _kernels(profile: KernelProfile, own: Mapping[str, Any]) -> Iterator[KernelRow]:
    """Rows of each phase, module and kernel, the longest first; modules that differ in a number only are one."""
    groups = _grouped(
        (*profile.kernels, *profile.transfers),
        lambda each: (each.phase or UNKNOWN, without_numbers(each.module or UNKNOWN), each.name, each.family),
    )
    for (phase, module, name, family), group in sorted(groups.items(), key=lambda item: -_us(item[1])):
        measured, operators = _measured(group, profile), _grouped(group, lambda each: each.operator)
        yield KernelRow(
            **own,
            phase=phase,
            module=module,
            kernel=short_name(name),
            family=family,
            operator=max(operators, key=lambda each: _us(operators[each])),
            mean_us=measured["ms"] * 1e3 / measured["calls"] if measured["calls"] else None,
            share=None if family == TRANSFER or not profile.total_us else _us(group) / profile.total_us,
            **measured,
            full_name=name if short_name(name) != name else None,
        )


def timeline_values(
    profile: KernelProfile, step: str | None, longest: int = LONGEST
) -> tuple[dict[str, Scalar], dict[str, Sequence[Scalar]]]:
    """A step, bar by bar: nanoseconds from its first kernel, and indices into the series of names.

    Where there are more than `longest` bars, short neighbours are drawn as one, and the values say so.
    """
    kernels = profile.by_step.get(step, [])
    bars, shortest_us = _fitted([_Bar(each) for each in kernels], longest)
    start = min((bar.start for bar in bars), default=0.0)
    series: dict[str, Sequence[Scalar]] = {
        "start_ns": [round((bar.start - start) * 1e3) for bar in bars],
        "duration_ns": [round((bar.end - bar.start) * 1e3) for bar in bars],
        "count": [bar.count for bar in bars],
    }
    texts: dict[str, list[str]] = {
        "kernel": [short_name(bar.kernel.name) for bar in bars],
        "family": [bar.kernel.family for bar in bars],
        "phase": [bar.kernel.phase or UNKNOWN for bar in bars],
        "module": [bar.kernel.module or UNKNOWN for bar in bars],
        "lane": [_lane(bar.kernel, profile) for bar in bars],
    }
    for name, column in texts.items():
        series[f"{name}_names"], series[name] = interned(column)
    return {"kernels": len(kernels), "bars": len(bars), "joined_below_us": shortest_us}, series


class _Bar:
    """A kernel, or several neighbours, of which the longest gives its name."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel, self.start, self.end, self.count = kernel, kernel.start_us, kernel.end_us, 1

    def join(self, other: _Bar) -> None:
        if other.kernel.duration_us > self.kernel.duration_us:
            self.kernel = other.kernel
        self.end, self.count = max(self.end, other.end), self.count + other.count


_ALIKE: tuple[Callable[[Kernel], Hashable], ...] = (
    lambda each: (each.lane, each.family, each.phase),
    lambda each: (each.lane, each.phase),
    lambda each: each.lane,
)
"""Properties that neighbours must have in common to be drawn as one, the strictest first."""
_VISIBLE = 1 / 100
"""Share of the timeline from which bars of different phases are rather joined than alike ones that far apart."""


def _fitted(bars: list[_Bar], most: int) -> tuple[list[_Bar], float | None]:
    """No more bars than may be drawn, and up to which length neighbours were joined for that; None where none were."""
    longest = max((bar.end for bar in bars), default=0.0) - min((bar.start for bar in bars), default=0.0)
    used: list[float] = []
    for levels, limit in ((_ALIKE[:2], _VISIBLE * longest), (_ALIKE, 2 * longest)):
        length = 2.0 ** max(0, math.ceil(math.log2(max(longest, 1) / most)) - 1)  # no page shows shorter ones
        while len(bars) > most and length < limit:
            for alike in levels:
                if len(bars) > most:
                    bars = _joined(bars, alike, length)
            used.append(length)
            length *= 2
    return bars, max(used, default=None)


def _joined(bars: Sequence[_Bar], alike: Callable[[Kernel], Hashable], below_us: float) -> list[_Bar]:
    """The bars, neighbours of one stream that are alike and together shorter than `below_us` joined."""
    kept: list[_Bar] = []
    latest: dict[Stream, _Bar] = {}
    for bar in bars:
        last = latest.get(bar.kernel.stream)
        if last is not None and bar.end - last.start < below_us and alike(last.kernel) == alike(bar.kernel):
            last.join(bar)
            continue
        kept.append(bar)
        latest[bar.kernel.stream] = bar
    return kept


def _lane(kernel: Kernel, profile: KernelProfile) -> str:
    """Name of a lane of the timeline: a stream or a thread, or what copies and communication are."""
    if profile.is_cpu and kernel.kind != "collective":
        return f"thread {kernel.stream.number}"
    if kernel.lane != "compute":
        return kernel.lane
    return f"compute, stream {kernel.stream.number}"


def timing_values(
    plain: dict[str, list[float]], profiled: dict[str, list[float]], profile: KernelProfile
) -> dict[str, Scalar]:
    """The summary of the profile beside the times without it: its cost, idle time, and whether the sums agree.

    Args:
        plain, profiled: milliseconds of the steps and of every phase, without the profiler and with it.
        profile: what it recorded.
    """
    step, profiled_ms = summarize(plain["step"]), statistics.median(profiled["step"])
    cost_ms = profiled_ms - step.median
    busy = {phase: busy_ms(profile, phase) for phase in PHASES} | {"step": busy_ms(profile)}
    values = summary_values(profile) | {
        "n": step.n,
        **step.columns("step"),
        "profiled_step_ms": profiled_ms,
        "profiler_cost_ms": cost_ms,
        "profiler_cost": profiled_ms / step.median - 1,
        "idle_ms": max(0.0, step.median - busy["step"]),
        "idle_share": max(0.0, 1 - busy["step"] / step.median),
    }
    for phase in PHASES:
        values[f"{phase}_ms"] = statistics.median(plain[phase])
        values[f"{phase}_profiled_ms"] = statistics.median(profiled[phase])
    # Profiling lengthens operators on a CPU, but not kernels on a GPU, which record their own times.
    allowed = max(cost_ms if profile.is_cpu else 0.0, RUN_SPREAD * step.median)
    over = [name for name, ms in busy.items() if ms > statistics.median(plain[name]) + allowed]
    return values | {"sums_allowed_ms": allowed, "sums_disagree": tuple(over) or None}
