"""What is trained, and where."""

from __future__ import annotations

from collections.abc import Sequence

from trainstep.kinds import CeilingRow, WorkloadRow
from trainstep.records import Row, Scalar, of_kind
from trainstep.report import plots
from trainstep.report.analysed import analysed_step
from trainstep.report.blocks import Block, Cell, Chart, Charts, Facts, Section, Table, TableRow
from trainstep.report.cells import cell_of, fact, get, number
from trainstep.report.findings import kept_rungs
from trainstep.report.plots import Bar

_FLOP_PARTS = ("projections", "feed_forward", "attention", "head")


def workload(records: Sequence[Row]) -> Section | None:
    """What is trained, and what the device could do at best."""
    rows, ceilings = of_kind(records, WorkloadRow), of_kind(records, CeilingRow)
    if not rows and not ceilings:
        return None
    blocks: list[Block] = []
    charts = []
    lead = ""
    if rows:
        values = rows[0].values
        parts = [name for name in _FLOP_PARTS if get(rows[0], f"{name}_tflop")]
        hidden = {*(f"{name}_tflop" for name in parts), "flops_counted"}
        facts = [fact(name, value) for name, value in values.items() if name not in hidden and value is not None]
        blocks.append(Facts(facts, name="workload"))
        total = sum(get(rows[0], f"{name}_tflop") or 0 for name in parts)
        if parts:
            bars = []
            for name in parts:
                flop = get(rows[0], f"{name}_tflop") or 0
                bars.append(
                    Bar(
                        name.replace("_", "-"),
                        100 * flop / total,
                        f"{flop / total:.0%}",
                        f"{number(flop * 1e3)} GFLOP of {number(total * 1e3)} GFLOP forward",
                    )
                )
            charts.append(
                Chart(
                    "flops",
                    "Arithmetic of one forward pass",
                    "Backward does twice as much.",
                    plots.bars(bars, "% of the FLOPs"),
                )
            )
        if values.get("flops_counted"):
            lead = f"FLOPs counted: {values['flops_counted']}."
    rates = [row for row in ceilings if get(row, "tflops") is not None]
    if rates:
        charts.append(_ceiling_chart(records, rates))
    if charts:
        blocks.append(Charts(charts))
    if ceilings:
        blocks.append(_ceiling_table(ceilings))
    return Section("workload", "Workload", "The workload and the device’s limits", lead, blocks)


def _ceiling_table(ceilings: Sequence[Row]) -> Table:
    columns, has_failure = ["Operation", "TFLOP/s", "GB/s, read + written"], any(row.status != "ok" for row in ceilings)
    rows = []
    for row in ceilings:
        cells = [Cell(str(row.case["what"]), is_text=True), cell_of(row, "tflops"), cell_of(row, "gb_s")]
        if has_failure:
            cells.append(Cell("" if row.status == "ok" else row.status, note=row.reason, tone="bad", is_text=True))
        rows.append(TableRow(cells, str(row.case["what"])))
    columns += ["Outcome"] if has_failure else []
    return Table("What this device reaches, measured here", columns, rows, name="ceilings")


def _ceiling_chart(records: Sequence[Row], ceilings: Sequence[Row]) -> Chart:
    step = analysed_step(records)
    ran = [row for row in [*kept_rungs(records), *([step] if step else [])] if get(row, "achieved_tflops") is not None]
    rows = []
    for row in ceilings:
        what = str(row.case["what"])
        rate = get(row, "tflops") or 0
        best = max(
            (get(one, "achieved_tflops") or 0 for one in ran if f"matmul {one.case['precision']}" == what),
            default=None,
        )
        tip = f"a large product reaches {number(rate)} TFLOP/s"
        tip += f"\nthe fastest kept step reaches {number(best)}, {best / rate:.0%} of it" if best and rate else ""
        share = f" · {best / rate:.0%}" if best and rate else ""
        rows.append(Bar(what, rate, f"{number(rate)}{share}", tip, second=best, role="neutral"))
    return Chart(
        "ceilings",
        "How close the step comes to the device’s matrix products",
        "The percentage is what the fastest kept step in that precision reaches of it.",
        plots.bars(rows, "TFLOP/s"),
        [("neutral", "a large matrix product alone"), ("accent", "the whole step")],
    )


def environment(records: Sequence[Row]) -> Section | None:
    """Where the numbers were measured."""
    found: dict[str, dict[Scalar, None]] = {}
    for row in records:
        for name, value in row.environment.items():
            found.setdefault(name, {})[value] = None
    if not found:
        return None
    facts = []
    for name, values in found.items():
        words, cell = fact(name, next(iter(values)))
        if len(values) > 1:
            cell = Cell(", ".join(fact(name, value)[1].text for value in values), None, name)
        facts.append((words, cell))
    blocks: list[Block] = [Facts(facts, name="environment")]
    step = analysed_step(records)
    live = ("sm_clock_mhz", "power_w", "temperature_c", "throttled_by")
    state = [fact(name, step.values[name]) for name in live if step and step.values.get(name) is not None]
    lead = "Times hold for this machine in this state."
    if state:
        lead += " The last four describe the GPU right after the analysed step."
        blocks = [Facts([*facts, *state], name="environment")]
    return Section("environment", "Environment", "Where it was measured", lead, blocks)
