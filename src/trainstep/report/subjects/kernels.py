"""Kernels: where the step's kernel time goes, by family, phase, module and kernel, and one step's timeline."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from trainstep.base.config import PHASES
from trainstep.report import columns
from trainstep.report.blocks import Block, Chart, Charts, Facts, Section, section, told_apart
from trainstep.report.charts.traces import FAMILY_ROLES, roofline, timeline
from trainstep.report.columns import Cell, Column, median_cell, value_cell
from trainstep.report.numbers import NONE, as_float, count, number
from trainstep.report.subjects import kernel_findings
from trainstep.report.subjects.noise import BEYOND, SEEN
from trainstep.report.tables import Definition, Table, TableRow, define, make_table, outcome_table, page_table
from trainstep.rows import CeilingRow, FamilyRow, KernelRow, PieceRow, ProfileRow, TimelineRow
from trainstep.rows.records import Row, belonging, of_kind

TOP_KERNELS = 25
TOP_MODULES = 20
PER_STEP, IN_TRACE = "per step", "in the trace"
_SETTINGS = tuple(map(columns.files_only, (*columns.SETTINGS, columns.case("device", "device"))))
_RATES = (
    *columns.values({"TFLOP": "tflop", "GB": "gb"}, brief=False, page=False),
    *columns.values({"TFLOP/s": "tflops", "GB/s": "gb_s"}),
)


def _of_steps(rows: Sequence[Row]) -> str:
    """Say of which steps the figures of some rows are."""
    alike = {row.values.get("has_steps") is not False for row in rows}
    return PER_STEP if alike == {True} else IN_TRACE if alike == {False} else f"{PER_STEP}, or {IN_TRACE} without steps"


def _said(caption: str) -> Callable[[Sequence[Row]], str]:
    return lambda rows: caption.format(per=_of_steps(rows))


def _key(*names: str) -> Callable[[Row], str]:
    return lambda row: ": ".join(str(row.case[name]) for name in names)


_PROFILE_COLUMNS = (
    *(replace(each, brief=each.title in ("workload", "context", "precision")) for each in columns.SETTINGS),
    columns.median("step (ms) [95 %]", "step"),
    *columns.values({"with the profiler (ms)": "profiled_step_ms", "its cost (%)": "profiler_cost"}),
    columns.case("device", "device"),
    columns.count("kernels per step", "kernels"),
    *columns.values({"transfers (ms)": "transfers_ms", "busy (ms)": "busy_ms", "idle (%)": "idle_share"}),
    *columns.values({"in a known phase (%)": "phase_coverage", "in a known module (%)": "module_coverage"}, digits=4),
    columns.value("matmul, of forward (%)", "matmul_share_forward"),
    *columns.values({"matmul, of the step (%)": "matmul_share_step", "sums beyond the step": "sums_disagree"}),
    columns.value("top kernel of forward", "top_forward_kernel", brief=False),
    columns.count("its calls per forward", "top_forward_kernel_calls", brief=False),
    columns.value("its time (ms)", "top_forward_kernel_ms", brief=False),
    columns.value("its share of forward (%)", "top_forward_kernel_share", brief=False),
    columns.value("top kernel of the step", "top_step_kernel", brief=False),
    columns.count("its calls per step", "top_step_kernel_calls", brief=False),
    columns.value("its time (ms) ", "top_step_kernel_ms", brief=False),
    columns.value("its share of the step (%)", "top_step_kernel_share", brief=False),
    columns.OUTCOME,
)


def _profile_columns(rows: Sequence[Row]) -> list[Column]:
    """Under titles that say what the figures are of."""
    per = _of_steps(rows)
    whole = {PER_STEP: "step", IN_TRACE: "trace"}.get(per, "step or trace")
    return [
        replace(each, title=each.title.replace(PER_STEP, per).replace("of the step", f"of the {whole}"))
        for each in _PROFILE_COLUMNS
    ]


PROFILES = Definition(
    ProfileRow,
    lambda rows: (
        "What the profiler found in the trace"
        if _of_steps(rows) == IN_TRACE
        else "The step without and with the profiler, and what it found"
    ),
    _profile_columns,
)


def families(ceilings: Sequence[CeilingRow]) -> Definition:
    """The table of families; on the page with the part of the measured ceilings that each reaches."""
    return define(
        FamilyRow,
        _said("Kernel time by family, {per}; rates over what is counted"),
        *_SETTINGS,
        *columns.words({"phase": "phase", "family": "family"}),
        columns.count("calls", "calls"),
        *columns.values({"ms": "ms", "share of the phase (%)": "share"}),
        *_RATES,
        columns.value("FLOP per byte", "flop_per_byte", page=False),
        Column("of the device’s limit", partial(_of_limit, ceilings), files=False),
        key=_key("phase", "family"),
        is_strong=lambda row: row.case["phase"] == "step",
        longest=24,
    )


def _of_limit(ceilings: Sequence[CeilingRow], row: Row) -> Cell:
    """The larger of the parts reached of the arithmetic and of the memory ceiling, and which one it is.

    No kernel computes faster than the device; a ceiling below one was measured on a busier or slower machine.
    """
    assert isinstance(row, FamilyRow)
    parts = []
    for each in ceilings if row.family != "transfer" else ():  # of a bus, and not of the device's memory
        if each.operation == "copy" and each.gb_s and row.gb_s is not None:
            parts.append((row.gb_s / each.gb_s, "memory"))
        if each.precision and each.precision == row.ceiling_precision and each.tflops and row.tflops is not None:
            parts.append((row.tflops / each.tflops, "arithmetic"))
    if not parts:
        return Cell(NONE, name="of_limit", is_text=False)
    part, unit = max(parts)
    is_possible = unit == "memory" or part < BEYOND
    return Cell(f"{part:.0%} of {unit}", part, "of_limit", tone="" if is_possible else "bad", is_text=False)


PIECES = define(
    PieceRow,
    _said("The pieces of eager attention, {per}: all kernels of a piece, and its matrix product or softmax alone"),
    *_SETTINGS,
    *columns.words({"phase": "phase", "piece": "piece"}),
    *columns.values({"ms": "ms", "product or softmax (ms)": "main_ms"}),
    columns.value("its GFLOP", "main_tflop", scale=1e3),
    *columns.values({"its GB": "main_gb", "its TFLOP/s": "main_tflops", "its GB/s": "main_gb_s"}),
    key=_key("phase", "piece"),
)


def _kernel_cell(row: Row) -> Cell:
    assert isinstance(row, KernelRow)
    origin = [row.family, row.operator if row.operator != row.kernel else None, row.module]
    note = " · ".join(filter(None, origin)) or "all of them in tables/kernel.csv"
    return Cell(row.kernel, row.kernel, "kernel", note=note, is_text=True)


KERNELS = define(
    KernelRow,
    _said("Kernels by phase and module, {per}, the longest first"),
    *_SETTINGS,
    columns.word("phase", "phase"),
    columns.files_only(columns.case("module", "module")),
    Column("kernel", _kernel_cell),
    columns.word("family", "family", page=False),
    columns.value("operator", "operator", brief=False, page=False),
    columns.count("calls", "calls"),
    *columns.values({"ms": "ms", "mean (µs)": "mean_us", "share (%)": "share"}),
    *map(columns.files_only, _RATES),
    key=lambda row: (
        " ".join(str(row.case[name]) for name in ("phase", "module", "kernel")) if row.case["phase"] else "others"
    ),
    longest=20,
)
TABLES = (PROFILES, families(()), PIECES, KERNELS)
RULES = kernel_findings.RULES


def kernels(records: Sequence[Row]) -> Section | None:
    """Every profile, one after the other."""
    profiles, blocks = of_kind(records, ProfileRow), list[Block | None]()
    for place, profile in enumerate(profiles):
        title = told_apart(profile, profiles)
        if profile.status == "ok":
            blocks += _blocks(records, profile, title, f"-{place}" if place else "")
        else:
            blocks.append(outcome_table("Not profiled", title, profile))
    lead = (
        "Every kernel is put where its launch stood: backward kernels by autograd’s sequence numbers in the module "
        "whose forward made them. Times are those of the profiled steps; what the profiler itself cost stands beside "
        "them."
    )
    return section("kernels", "Kernels", "Which kernels run, and where", lead, *blocks)


SECTIONS = (kernels,)


def _blocks(records: Sequence[Row], profile: ProfileRow, title: str, suffix: str) -> list[Block | None]:
    rows, own = belonging(records, FamilyRow, profile), belonging(records, KernelRow, profile)
    ceilings = of_kind(records, CeilingRow)
    per = _of_steps([profile])
    roof = _roofline_chart(profile, ceilings, rows, title, suffix)
    lines = [row for row in belonging(records, TimelineRow, profile) if row.series][:1]
    caption = (
        f"Kernel time by family, {per}: {title}. Within a phase, families below 1% are only in tables/family.csv; "
        "what comes from caches can exceed the limit of memory, and nothing that of arithmetic: clearly more than "
        "100% of it means that the machine was disturbed"
    )
    seen = [row for row in rows if row.phase == "step" or (row.share or 0) >= SEEN]
    of_pieces = replace(PIECES, caption=f"The pieces of attention, {per}: {title}")
    return [
        Facts(_facts(profile), name=f"profile{suffix}"),
        Charts([roof] if roof is not None else []),
        Charts([_timeline_chart(row, title, suffix) for row in lines]),
        _phase_table(profile, title, suffix),
        make_table(replace(families(ceilings), caption=caption), seen, "page", name=f"families{suffix}"),
        page_table(of_pieces, belonging(records, PieceRow, profile), f"pieces{suffix}"),
        _module_table(own, title, suffix, per),
        _kernel_table(own, title, suffix, per),
    ]


def _percent(row: Row, name: str, digits: int = 3) -> Cell:
    value = as_float(row.values.get(name))
    return Cell(NONE if value is None else f"{number(100 * value, digits)}%", value, name)


def _number(row: Row, name: str) -> float:
    return as_float(row.values.get(name)) or 0.0


def _facts(profile: ProfileRow) -> list[tuple[str, Cell]]:
    facts = [
        ("In a known phase", _percent(profile, "phase_coverage", 4)),
        ("In a known phase and module", _percent(profile, "module_coverage", 4)),
        ("FLOPs or bytes counted for", _percent(profile, "cost_coverage")),
        (f"Kernels {_of_steps([profile])}", value_cell(profile, "kernels", count)),
        ("Device busy", value_cell(profile, "busy_ms", lambda value: f"{number(value)} ms")),
    ]
    if profile.has_steps is False:
        facts.insert(0, ("Steps", Cell("none announced: every figure is of the whole trace", is_text=True)))
    if profile.devices is not None:
        facts.insert(0, ("Devices", Cell(f"{profile.devices}; this is {profile.device}", is_text=True)))
    if profile.transfers_ms is not None:
        part = (profile.transfers_overlapped_ms or 0) / (profile.transfers_ms or 1)
        text = f"{number(profile.transfers_ms)} ms, {part:.0%} of it beside kernels"
        facts.append(("Transfers between host and device", Cell(text, profile.transfers_ms, "transfers_ms")))
    if profile.step_ms is not None:
        cost = profile.profiler_cost or 0
        change = f"{number(profile.step_ms)} → {number(profile.profiled_step_ms)} ms"
        runs = f"medians of {number(profile.n)} and {number(profile.profiled_n)} steps"
        facts += [
            ("Device idle, without the profiler", _percent(profile, "idle_share")),
            (f"What profiling cost ({runs})", Cell(f"{change}, {number(100 * cost)}%", cost, "profiler_cost")),
        ]
    if profile.communication_ms is not None:
        part = (profile.communication_overlapped_ms or 0) / (profile.communication_ms or 1)
        facts.append(("Communication beside compute", Cell(f"{part:.0%}", part, "communication_overlapped")))
    return facts


def _rates(row: FamilyRow) -> str:
    rates = ((row.tflops, "TFLOP/s"), (row.gb_s, "GB/s"))
    return ", ".join(f"{number(rate)} {unit}" for rate, unit in rates if rate is not None)


def _roofline_chart(
    profile: ProfileRow, ceilings: Sequence[CeilingRow], rows: Sequence[FamilyRow], title: str, suffix: str
) -> Chart | None:
    peaks = {f"{row.operation} {row.precision}": row.tflops for row in ceilings if row.tflops is not None}
    copy = next((row.gb_s for row in ceilings if row.gb_s is not None), None)
    points = {
        row.family: (flop, row.tflops, f"{_rates(row)}\n{number(flop)} FLOP per byte")
        for row in rows
        if row.phase == "step" and (flop := row.flop_per_byte) and row.tflops
    }
    if not points or not peaks or copy is None:
        return None
    caption = (
        f"{title}. Under the slope ({number(copy)} GB/s, measured) memory sets the pace, under the flat lines "
        f"arithmetic. Counted: {profile.counted or NONE}."
    )
    heading = "Roofline: how near each family comes to this device’s limits"
    legend = [(FAMILY_ROLES.get(name, "series-1"), name) for name in points]
    return Chart(f"roofline{suffix}", heading, caption, partial(roofline, points, peaks, copy), legend)


def _timeline_chart(row: TimelineRow, title: str, suffix: str) -> Chart:
    caption = f"{title}. Drag over a part, or scroll with Shift, to see it closer; hover for a kernel and its module."
    if row.joined_below_us is not None:
        caption += (
            f" {number(row.kernels)} kernels as {number(row.bars)} bars: neighbours that together are shorter than "
            f"{number(row.joined_below_us)} µs are drawn as one, under the name of the longest."
        )
    shown: dict[str, str] = {}
    for name in map(str, row.series["family_names"]):
        shown.setdefault(FAMILY_ROLES.get(name, "series-1"), name)
    heading = "The whole trace, kernel by kernel" if row.has_steps is False else "One step, kernel by kernel"
    return Chart(f"timeline{suffix}", heading, caption, partial(timeline, row), list(shown.items()))


def _phase_table(profile: ProfileRow, title: str, suffix: str) -> Table | None:
    names = [name for name in PHASES if f"{name}_ms" in profile.values]
    if not names:
        return None
    rows = []
    for name in [*names, "step"]:
        is_step = name == "step"
        busy_name, profiled = ("busy_ms", "profiled_step_ms") if is_step else (f"{name}_busy_ms", f"{name}_profiled_ms")
        idle = max(0.0, _number(profile, f"{name}_ms") - _number(profile, busy_name))
        agrees = name not in (profile.sums_disagree or ())
        outcome = Cell("agrees") if agrees else Cell("kernels take longer than the phase", tone="bad")
        plain = median_cell(profile, "step") if is_step else value_cell(profile, f"{name}_ms")
        cells = [Cell("whole step" if is_step else name, is_text=True), plain, value_cell(profile, busy_name)]
        cells += [Cell(number(idle), idle), value_cell(profile, profiled), replace(outcome, is_text=True)]
        rows.append(TableRow(cells, name, is_strong=is_step))
    titles = ["Phase", "Without profiler, ms", "Kernels, ms", "Idle, ms", "With profiler, ms", "Sums"]
    caption = (
        f"Kernel sums against the step without the profiler: {title}. They agree where kernels take no longer than the "
        f"phase did, give or take {number(profile.sums_allowed_ms or 0)} ms (the 2% that runs differ by; on a CPU, "
        "what profiling cost)"
    )
    return Table(caption, titles, rows, name=f"phase-sums{suffix}")


def _module_table(rows: Sequence[KernelRow], title: str, suffix: str, per: str) -> Table:
    """Kernel time of each module by phase, transfers left out; alike modules are one row."""
    rows = [row for row in rows if row.family != "transfer"]
    times = defaultdict[str, Counter[str]](Counter)
    for row in rows:
        times[row.module][row.phase] += row.ms or 0  # type: ignore[assignment]  # a Counter adds any number
    ordered = sorted(times, key=lambda module: -times[module].total())
    names = [(module, times[module]) for module in ordered[:TOP_MODULES]]
    if rest := ordered[TOP_MODULES:]:
        names.append((f"{len(rest)} others", sum((times[module] for module in rest), Counter())))
    total = sum(row.ms or 0 for row in rows)
    table_rows = []
    for module, own in names:
        whole = own.total()
        cells = [Cell(module, is_text=True)]
        cells += [Cell(number(own.get(phase)), own.get(phase), f"{phase}_ms") for phase in PHASES]
        cells += [Cell(number(whole), whole, "ms"), Cell(f"{100 * whole / total:.1f}%" if total else NONE)]
        table_rows.append(TableRow(cells, module))
    titles = ["Module", *(f"{phase.capitalize()}, ms" for phase in PHASES), "All, ms", "Of the step"]
    return Table(f"Kernel time by module, {per}: {title}", titles, table_rows, name=f"modules{suffix}")


def _kernel_table(rows: Sequence[KernelRow], title: str, suffix: str, per: str) -> Table:
    shown = list(rows[:TOP_KERNELS])
    if rest := rows[TOP_KERNELS:]:
        calls, ms, share = (sum(_number(row, name) for row in rest) for name in ("calls", "ms", "share"))
        name = f"{len(rest)} other rows"
        shown.append(KernelRow(phase="", module="", kernel=name, calls=calls, ms=ms, share=share))
    definition = replace(KERNELS, caption=f"The kernels that take most time, {per}: {title}")
    return make_table(definition, shown, "page", name=f"kernels{suffix}")
