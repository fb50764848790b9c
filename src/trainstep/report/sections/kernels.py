"""Kernels: where the step's kernel time goes, by family, phase, module and kernel, and one step's timeline."""

from __future__ import annotations

from collections.abc import Sequence

from trainstep.kinds import CeilingRow, FamilyRow, KernelRow, PieceRow, ProfileRow, TimelineRow
from trainstep.records import Row, belonging, of_kind
from trainstep.report import plots
from trainstep.report.analysed import PHASE_NAMES
from trainstep.report.blocks import Block, Cell, Chart, Charts, Facts, Section, Table, TableRow
from trainstep.report.cells import cell_of, count, get, median_of, number, told_apart
from trainstep.report.numbers import NONE
from trainstep.report.plots import Bar
from trainstep.report.profile_charts import FAMILY_ROLES, Point, roofline, timeline
from trainstep.report.sections.kernel_tables import family_table, kernel_table, module_table, piece_table
from trainstep.stats import RUN_SPREAD


def kernels(records: Sequence[Row]) -> Section | None:
    """Every profile, one after the other."""
    profiles = of_kind(records, ProfileRow)
    if not profiles:
        return None
    blocks: list[Block] = []
    for place, profile in enumerate(profiles):
        if profile.status != "ok":
            cells = [
                Cell(told_apart(profile, profiles), is_text=True),
                Cell(profile.status, note=profile.reason, tone="bad", is_text=True),
            ]
            blocks.append(Table("Not profiled", ["Step", "Outcome"], [TableRow(cells)]))
            continue
        blocks += _blocks(records, profile, told_apart(profile, profiles), f"-{place}" if place else "")
    lead = (
        "Every kernel is put where its launch stood: backward kernels by autograd’s sequence numbers in the module "
        "whose forward made them. Times are those of the profiled steps; what the profiler itself cost stands beside "
        "them."
    )
    return Section("kernels", "Kernels", "Which kernels run, and where", lead, blocks)


def _blocks(records: Sequence[Row], profile: Row, title: str, suffix: str) -> list[Block]:
    families = belonging(records, FamilyRow, profile)
    lines = belonging(records, TimelineRow, profile)
    found: list[Block] = [Facts(_facts(profile), name=f"profile{suffix}")]
    charts = [_family_chart([row for row in families if row.case["phase"] == "step"], title, suffix)]
    if roof := _roofline_chart(records, families, title, suffix):
        charts.append(roof)
    found.append(Charts(charts))
    if lines:
        found.append(Charts([_timeline_chart(lines[0], title, suffix)]))
    if sums := _phase_table(profile, title, suffix):
        found.append(sums)
    found.append(family_table(families, of_kind(records, CeilingRow), title, suffix))
    if pieces := belonging(records, PieceRow, profile):
        found.append(piece_table(pieces, title, suffix))
    rows = belonging(records, KernelRow, profile)
    return [*found, module_table(rows, title, suffix), kernel_table(rows, title, suffix)]


def _facts(profile: Row) -> list[tuple[str, Cell]]:
    def percent(name: str, digits: int = 3) -> Cell:
        value = get(profile, name)
        return Cell(NONE if value is None else f"{number(100 * value, digits)}%", value, name)

    facts = [
        ("In a known phase", percent("phase_coverage", 4)),
        ("In a known phase and module", percent("module_coverage", 4)),
        ("FLOPs or bytes counted for", percent("cost_coverage")),
        ("Kernels per step", cell_of(profile, "kernels", count)),
        ("Device busy", cell_of(profile, "busy_ms", lambda value: f"{number(value)} ms")),
    ]
    if not profile.values.get("has_steps", True):
        facts.insert(0, ("Steps", Cell("none announced: every figure is of the whole trace", is_text=True)))
    if get(profile, "step_ms") is not None:
        cost = get(profile, "profiler_cost") or 0
        change = f"{number(profile.values['step_ms'])} → {number(profile.values['profiled_step_ms'])} ms"
        facts += [
            ("Device idle, without the profiler", percent("idle_share")),
            (
                f"What profiling cost (medians of {number(profile.values['n'])} and "
                f"{number(profile.values['profiled_n'])} steps)",
                Cell(f"{change}, {number(100 * cost)}%", cost, "profiler_cost"),
            ),
        ]
    if get(profile, "communication_ms") is not None:
        part = (get(profile, "communication_overlapped_ms") or 0) / (get(profile, "communication_ms") or 1)
        facts.append(("Communication beside compute", Cell(f"{part:.0%}", part, "communication_overlapped")))
    return facts


def _family_chart(rows: Sequence[Row], title: str, suffix: str) -> Chart:
    bars = [
        Bar(
            str(row.case["family"]),
            get(row, "ms"),
            f"{number(row.values['ms'])} ms · {get(row, 'share') or 0:.0%}",
            f"{count(row.values['calls'])} calls per step\n{_rates(row)}",
            role=FAMILY_ROLES.get(str(row.case["family"]), "accent"),
        )
        for row in rows
    ]
    return Chart(f"families{suffix}", "Kernel time of one step by family", title, plots.bars(bars, "ms per step"))


def _rates(row: Row) -> str:
    parts = [f"{number(row.values['tflops'])} TFLOP/s"] if get(row, "tflops") is not None else []
    parts += [f"{number(row.values['gb_s'])} GB/s"] if get(row, "gb_s") is not None else []
    return ", ".join(parts)


def _roofline_chart(records: Sequence[Row], families: Sequence[Row], title: str, suffix: str) -> Chart | None:
    ceilings = of_kind(records, CeilingRow)
    peaks = {str(row.case["what"]): rate for row in ceilings if (rate := get(row, "tflops")) is not None}
    copy = next((rate for row in ceilings if (rate := get(row, "gb_s")) is not None), None)
    points = [
        Point(str(row.case["family"]), intensity, rate, f"{_rates(row)}\n{number(intensity)} FLOP per byte")
        for row in families
        if row.case["phase"] == "step" and (intensity := get(row, "flop_per_byte")) and (rate := get(row, "tflops"))
    ]
    if not points or not peaks or copy is None:
        return None
    return Chart(
        f"roofline{suffix}",
        "Roofline: how near each family comes to this device’s limits",
        f"{title}. Under the slope ({number(copy)} GB/s, measured) memory sets the pace, under the flat lines "
        f"arithmetic. Counted: {_counted(records)}.",
        roofline(points, peaks, copy),
        [(FAMILY_ROLES.get(point.name, "series-1"), point.name) for point in points],
    )


def _counted(records: Sequence[Row]) -> str:
    """What FLOPs and bytes count, in words."""
    return next((str(row.values["counted"]) for row in of_kind(records, ProfileRow) if row.values.get("counted")), NONE)


def _timeline_chart(row: Row, title: str, suffix: str) -> Chart:
    caption = f"{title}. Drag over a part, or scroll with Shift, to see it closer; hover for a kernel and its module."
    if (below := get(row, "joined_below_us")) is not None:
        caption += (
            f" {number(row.values['kernels'])} kernels as {number(row.values['bars'])} bars: neighbours that together "
            f"are shorter than {number(below)} µs are drawn as one, under the name of the longest."
        )
    names = [str(name) for name in row.series["family_names"]]
    shown: dict[str, str] = {}
    for name in names:
        shown.setdefault(FAMILY_ROLES.get(name, "series-1"), name)
    return Chart(f"timeline{suffix}", "One step, kernel by kernel", caption, timeline(row), list(shown.items()))


def _phase_table(profile: Row, title: str, suffix: str) -> Table | None:
    """Sums of kernels beside the times without the profiler."""
    names = [name for name in PHASE_NAMES if get(profile, f"{name}_ms") is not None]
    if not names:
        return None
    allowed = get(profile, "sums_allowed_ms") or 0
    beyond = str(profile.values.get("sums_disagree") or "").split(", ")
    rows = []
    for name in [*names, "step"]:
        busy_name = "busy_ms" if name == "step" else f"{name}_busy_ms"
        profiled = "profiled_step_ms" if name == "step" else f"{name}_profiled_ms"
        busy, plain = get(profile, busy_name) or 0, get(profile, f"{name}_ms") or 0
        agrees = name not in beyond
        cells = [
            Cell("whole step" if name == "step" else name, is_text=True),
            median_of(profile, "step") if name == "step" else cell_of(profile, f"{name}_ms"),
            cell_of(profile, busy_name),
            Cell(number(max(0.0, plain - busy)), max(0.0, plain - busy)),
            cell_of(profile, profiled),
            Cell("agrees" if agrees else "kernels take longer than the phase", tone="" if agrees else "bad",
                 is_text=True),
        ]  # fmt: skip
        rows.append(TableRow(cells, name, is_strong=name == "step"))
    columns = ["Phase", "Without profiler, ms", "Kernels, ms", "Idle, ms", "With profiler, ms", "Sums"]
    caption = (
        f"Kernel sums against the step without the profiler: {title}. They agree where kernels take no longer than the "
        f"phase did, give or take {number(allowed)} ms (the {RUN_SPREAD:.0%} that runs differ by; on a CPU, what "
        "profiling cost)"
    )
    return Table(caption, columns, rows, name=f"phase-sums{suffix}")
