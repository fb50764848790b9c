"""The tables of a profile: families, pieces of attention, modules, kernels."""

from __future__ import annotations

from collections.abc import Sequence

from trainstep.records import Row
from trainstep.report.analysed import PHASE_NAMES
from trainstep.report.blocks import Cell, Table, TableRow
from trainstep.report.cells import cell_of, count, get, number
from trainstep.report.noise_findings import BEYOND, SEEN
from trainstep.report.numbers import NONE

TOP_KERNELS = 25
TOP_MODULES = 20


def _origin(row: Row) -> list[str]:
    """Family, operator and module of a kernel."""
    operator = row.values.get("operator")
    told = [str(operator)] if operator is not None and operator != row.case["kernel"] else []
    return [str(row.values["family"]), *told, str(row.case["module"])]


def _percent(value: float | None) -> str:
    return NONE if value is None else f"{100 * value:.1f}%"


def family_table(rows: Sequence[Row], ceilings: Sequence[Row], title: str, suffix: str) -> Table:
    """Families of the step and of each phase, with their rates and the part of the device's limit they reach."""
    table_rows = []
    for row in rows:
        if row.case["phase"] != "step" and (get(row, "share") or 0) < SEEN:
            continue
        limit, part, is_possible = _of_limit(row, ceilings)
        cells = [
            Cell(f"{row.case['phase']}: {row.case['family']}", is_text=True),
            cell_of(row, "calls", count),
            cell_of(row, "ms"),
            Cell(_percent(get(row, "share")), get(row, "share"), "share"),
            cell_of(row, "tflops"),
            cell_of(row, "gb_s"),
            Cell(limit, part, "of_limit", tone="" if is_possible else "bad"),
        ]
        table_rows.append(TableRow(cells, f"{row.case['phase']}: {row.case['family']}", row.case["phase"] == "step"))
    columns = ["Phase and family", "Calls", "ms", "Of the phase", "TFLOP/s", "GB/s", "Of the device’s limit"]
    caption = (
        f"Kernel time by family, per step: {title}. Within a phase, families below 1% are only in tables/family.csv; "
        "what comes from caches can exceed the limit of memory, and nothing that of arithmetic: clearly more than "
        "100% of it means that the machine was disturbed"
    )
    return Table(caption, columns, table_rows, name=f"families{suffix}")


def _of_limit(row: Row, ceilings: Sequence[Row]) -> tuple[str, float | None, bool]:
    """The larger of the parts reached of the arithmetic and of the memory ceiling, which one it is, and if it can be.

    No kernel computes faster than the device; a ceiling below one was measured on a busier or slower machine.
    """
    peaks = {str(each.case["what"]): each for each in ceilings}
    parts = []
    arithmetic = peaks.get(str(row.values.get("ceiling")))
    for name, ceiling, unit in (("tflops", arithmetic, "arithmetic"), ("gb_s", peaks.get("copy"), "memory")):
        rate, limit = get(row, name), get(ceiling, name) if ceiling is not None else None
        if rate is not None and limit:
            parts.append((rate / limit, unit))
    if not parts:
        return NONE, None, True
    part, unit = max(parts)
    return f"{part:.0%} of {unit}", part, unit == "memory" or part < BEYOND


def piece_table(rows: Sequence[Row], title: str, suffix: str) -> Table:
    """Scores, softmax and weighted sum: time, FLOPs and bytes of the product or softmax itself."""
    table_rows = []
    for row in rows:
        flop = get(row, "main_tflop")
        cells = [
            Cell(f"{row.case['phase']}: {row.case['piece']}", is_text=True),
            cell_of(row, "ms"),
            cell_of(row, "main_ms"),
            Cell(number(None if flop is None else 1e3 * flop), flop, "main_tflop"),
            cell_of(row, "main_gb"),
            cell_of(row, "main_tflops"),
            cell_of(row, "main_gb_s"),
        ]
        table_rows.append(TableRow(cells, f"{row.case['phase']}: {row.case['piece']}"))
    columns = ["Piece", "All kernels, ms", "Product or softmax, ms", "GFLOP", "GB", "TFLOP/s", "GB/s"]
    return Table(f"The pieces of attention, per step: {title}", columns, table_rows, name=f"pieces{suffix}")


def module_table(rows: Sequence[Row], title: str, suffix: str) -> Table:
    """Kernel time of each module by phase; alike modules are one row."""
    times: dict[str, dict[str, float]] = {}
    for row in rows:
        own = times.setdefault(str(row.case["module"]), {})
        phase = str(row.case["phase"])
        own[phase] = own.get(phase, 0) + (get(row, "ms") or 0)
    total = sum(sum(own.values()) for own in times.values())
    ordered = sorted(times, key=lambda module: -sum(times[module].values()))
    names = [(module, times[module]) for module in ordered[:TOP_MODULES]]
    if rest := ordered[TOP_MODULES:]:
        sums = {phase: sum(times[module].get(phase, 0) for module in rest) for phase in PHASE_NAMES}
        names.append((f"{len(rest)} others", sums))
    table_rows = []
    for module, own in names:
        whole = sum(own.values())
        cells = [Cell(module, is_text=True)]
        cells += [Cell(number(own.get(phase)), own.get(phase), f"{phase}_ms") for phase in PHASE_NAMES]
        cells += [Cell(number(whole), whole, "ms"), Cell(_percent(whole / total if total else None))]
        table_rows.append(TableRow(cells, module))
    columns = ["Module", *(f"{phase.capitalize()}, ms" for phase in PHASE_NAMES), "All, ms", "Of the step"]
    return Table(f"Kernel time by module, per step: {title}", columns, table_rows, name=f"modules{suffix}")


def kernel_table(rows: Sequence[Row], title: str, suffix: str) -> Table:
    """The kernels that take most time, and all others as one row."""
    table_rows = []
    for row in rows[:TOP_KERNELS]:
        cells = [
            Cell(str(row.case["kernel"]), is_text=True, note=" · ".join(_origin(row))),
            Cell(str(row.case["phase"]), is_text=True),
            cell_of(row, "calls", count),
            cell_of(row, "ms"),
            cell_of(row, "mean_us"),
            Cell(_percent(get(row, "share")), get(row, "share"), "share"),
        ]
        table_rows.append(TableRow(cells, f"{row.case['phase']} {row.case['module']} {row.case['kernel']}"))
    if rest := rows[TOP_KERNELS:]:
        sums = {name: sum(get(row, name) or 0 for row in rest) for name in ("calls", "ms", "share")}
        cells = [
            Cell(f"{len(rest)} other rows", is_text=True, note="all of them in tables/kernel.csv"),
            Cell(""),
            Cell(count(sums["calls"]), sums["calls"], "calls"),
            Cell(number(sums["ms"]), sums["ms"], "ms"),
            Cell(""),
            Cell(_percent(sums["share"]), sums["share"], "share"),
        ]
        table_rows.append(TableRow(cells, "others"))
    columns = ["Kernel", "Phase", "Calls", "ms", "Mean, µs", "Of the step"]
    return Table(f"The kernels that take most time, per step: {title}", columns, table_rows, name=f"kernels{suffix}")
