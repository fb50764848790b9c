"""The workload, what the device reaches at best, and where the numbers were measured."""

from __future__ import annotations

from collections.abc import Sequence

from trainstep.report import columns
from trainstep.report.blocks import Facts, Section, fact, facts_of, label, section
from trainstep.report.columns import Cell, Column
from trainstep.report.subjects.steps import analysed_step
from trainstep.report.tables import define, page_table
from trainstep.rows import CeilingRow, WorkloadRow
from trainstep.rows.records import Row, of_kind


def operation(row: Row) -> str:
    """`matmul bf16`, `copy`."""
    return " ".join(str(row.case[name]) for name in ("operation", "precision") if name in row.case)


WORKLOAD = define(
    WorkloadRow,
    "The workload",
    columns.case("workload", "workload"),
    *columns.values({"parameters": "parameters", "weights (GiB)": "parameters_gib", "blocks": "blocks"}),
    *columns.values({"tokens per step": "tokens", "forward (TFLOP)": "forward_tflop"}),
)
CEILINGS = define(
    CeilingRow,
    "What this device reaches",
    Column("operation", operation),
    *columns.values({"TFLOP/s": "tflops", "GB/s, read + written": "gb_s"}),
    columns.OUTCOME,
    key=operation,
)
TABLES = (WORKLOAD, CEILINGS)


def workload(rows: Sequence[Row]) -> Section | None:
    """Section on what is trained, and what the device could do at best."""
    facts, lead, shape = of_kind(rows, WorkloadRow), "", None
    if facts:
        shape = Facts(facts_of(facts[0], [name for name in facts[0].values if name != "flops_counted"]), "workload")
        lead = f"FLOPs counted: {facts[0].flops_counted}." if facts[0].flops_counted else ""
    table = page_table(CEILINGS, rows, "ceilings")
    return section("workload", "Workload", "The workload and the device’s limits", lead, shape, table)


_PLACES = {"device": "{}", "torch": "torch {}", "triton": "triton {}", "date": "{}", "cpu": "{}",
           "threads": "{} host threads", "cores": "{} host cores a process",
           "gpu_uuid": "{}", "commit": "commit {}"}  # fmt: skip
"""Columns of the environment that say where a row was measured, and how they are written."""


def where(rows: Sequence[Row]) -> str:
    """Device, versions, date, host and commit of all rows: first what they share, then each combination of the rest."""
    known = [row.environment for row in rows if row.environment]
    found = [{name: form.format(each[name]) for name, form in _PLACES.items() if name in each} for each in known]
    if found and all(each.get("cpu") == each.get("device") for each in found):
        found = [{name: text for name, text in each.items() if name != "cpu"} for each in found]
    shared = {name for name in _PLACES if len({each.get(name) for each in found}) == 1}
    common = ", ".join(text for name, text in (found or [{}])[0].items() if name in shared)
    apart = dict.fromkeys(", ".join(text for name, text in each.items() if name not in shared) for each in found)
    return common if len(apart) < 2 else f"{common}; {len(apart)} runs: {'; '.join(apart)}"


def environment(rows: Sequence[Row]) -> Section | None:
    """Section on where the numbers were measured."""
    found = {
        name: dict.fromkeys(row.environment[name] for row in rows if name in row.environment)
        for name in dict.fromkeys(name for row in rows for name in row.environment)
    }
    facts = []
    for name, values in found.items():
        words, cells = label(name)[0], [fact(name, value)[1] for value in values]
        several = Cell(", ".join(cell.text for cell in cells), None, name)
        facts.append((words, several if len(values) > 1 else cells[0]))
    lead, step = "Times hold for this machine in this state.", analysed_step(rows)
    if len({str(sorted(row.environment.items())) for row in rows if row.environment}) > 1:
        lead = f"Times hold for these machines in their states: {where(rows)}."
    state = facts_of(step, ("sm_clock_mhz", "power_w", "temperature_c", "throttled_by")) if step else []
    if state:
        lead += " The last four describe the GPU right after the analysed step."
    block = Facts([*facts, *state], name="environment") if facts else None
    return section("environment", "Environment", "Where it was measured", lead, block)


SECTIONS = (workload, environment)
