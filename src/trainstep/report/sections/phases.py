"""Times of the step: phases, warm-up, and the grid where there is one."""

from __future__ import annotations

from collections.abc import Sequence

from trainstep.kinds import StepRow
from trainstep.records import Row, of_kind
from trainstep.report import plots
from trainstep.report.analysed import PHASE_NAMES, analysed_step
from trainstep.report.blocks import Cell, Chart, Charts, Facts, Section, Table, TableRow
from trainstep.report.cells import cell_of, fact, get, median_of, number, span
from trainstep.report.numbers import NONE, as_float
from trainstep.report.plots import Bar, Series


def phases(records: Sequence[Row]) -> Section | None:
    """The analysed step, phase by phase."""
    step = analysed_step(records)
    if step is None:
        return None
    names = [name for name in PHASE_NAMES if get(step, f"{name}_ms") is not None]
    total = sum(get(step, f"{name}_ms") or 0 for name in names)
    has_issue = any(get(step, f"{name}_issue_ms") is not None for name in names)
    rows = []
    for name in names:
        median = get(step, f"{name}_ms") or 0
        issue = get(step, f"{name}_issue_ms")
        tip = [f"{span(step, name)}", f"{median / total:.0%} of the phases"]
        tip += [f"issued by the host in {number(issue)} ms"] if issue is not None else []
        rows.append(
            Bar(
                name,
                median,
                f"{number(median)} ms · {median / total:.0%}",
                "\n".join(tip),
                get(step, f"{name}_low_ms"),
                get(step, f"{name}_high_ms"),
                second=issue,
            )
        )
    columns = ["Phase", "Median, ms [95 %]", "Of the phases", "Mean ± std, ms", "Min–max, ms", "Outliers"]
    table_rows = []
    for name in [*names, "step"]:
        median = get(step, f"{name}_ms") or 0
        mean, std = step.values.get(f"{name}_mean_ms"), step.values.get(f"{name}_std_ms")
        low, high = step.values.get(f"{name}_min_ms"), step.values.get(f"{name}_max_ms")
        cells = [
            Cell("whole step" if name == "step" else name, is_text=True),
            median_of(step, name),
            Cell(f"{median / total:.0%}" if name != "step" else ""),
            Cell(f"{number(mean)} ± {number(std, 2)}", mean, f"{name}_mean_ms"),
            Cell(f"{number(low)}–{number(high)}"),
            cell_of(step, f"{name}_outliers"),
        ]
        cells += [cell_of(step, f"{name}_issue_ms")] if has_issue else []
        table_rows.append(TableRow(cells, name, is_strong=name == "step"))
    lead = (
        f"Median of {number(step.values.get('n'))} steps after {number(step.case.get('warmup'))} warm-up steps, "
        f"{_settings(step)}; whiskers are 95 % intervals of the median."
    )
    wait = get(step, "wait_ms")
    if wait is not None:
        lead += (
            " Phases are stamped by the GPU; issuing is what the host needs to launch their work. "
            f"Of the whole step, the host waited {number(wait)} ms for the GPU."
        )
    legend = [("accent", "time on the device"), ("neutral", "time to issue it")] if has_issue else []
    names_of_facts = ("tokens_per_s", "achieved_tflops", "utilisation", "wait_ms", "first_step_ms", "model_tflop")
    facts = [fact(name, step.values[name]) for name in names_of_facts if step.values.get(name) is not None]
    return Section(
        "phases",
        "Phases",
        "Where the step’s time goes",
        lead,
        [
            Charts([Chart("phases", "Phases of one step", "", plots.bars(rows, "ms per step"), legend)]),
            Table(
                "The step and its phases",
                columns + (["To issue, ms"] if has_issue else []),
                table_rows,
                name="phases",
            ),
            Facts(facts, name="step"),
        ],
    )


def _settings(row: Row) -> str:
    """The settings of a row, in words."""
    case = row.case
    parts = [f"batch {case['batch']}"] if case.get("batch") is not None else []
    parts += [f"context {case['context']}"] if case.get("context") is not None else []
    parts += [str(case["precision"])] if case.get("precision") else []
    compiled = case.get("compile")
    parts += ["not compiled" if compiled == "off" else f"compiled {compiled}"] if compiled else []
    parts += [f"{case['attention']} attention"] if case.get("attention") else []
    return ", ".join(parts)


def _same_case(row: Row, other: Row) -> bool:
    return {**row.case, "warmup": 0} == {**other.case, "warmup": 0}


def warmup(records: Sequence[Row]) -> Section | None:
    """What leaving out the first steps changes."""
    step = analysed_step(records)
    if step is None:
        return None
    rows = {
        number(row.case["warmup"]): row
        for row in of_kind(records, StepRow)
        if row.status == "ok" and _same_case(row, step)
    }
    if len(rows) < 2:
        return None
    counts = [as_float(row.case["warmup"]) or 0 for row in rows.values()]
    order: dict[float, float] = {}
    for left_out, row in zip(counts, rows.values(), strict=True):
        order |= {left_out + index + 1: value for index, value in enumerate(row.samples.get("step", ()))}
    charts = []
    if order:
        is_steep = max(order.values()) > 4 * min(order.values())
        line = Series("step", list(order), list(order.values()), "accent", markers=True)
        charts.append(
            Chart(
                "steps-in-order",
                "Every step, in the order it ran",
                "The first step also pays for allocation, tuning and loading of kernels."
                + (" The scale is logarithmic." if is_steep else ""),
                plots.lines([line], "step", "ms", log=is_steep),
            )
        )
    found = list(rows.values())
    at = list(range(len(found)))
    means = [get(row, "step_mean_ms") or 0 for row in found]
    medians = [get(row, "step_ms") or 0 for row in found]
    charts.append(
        Chart(
            "warmup",
            "Mean and median by steps left out",
            "A mean keeps what the first step cost; a median of enough steps does not. Lines are 95 % intervals.",
            plots.dots(
                [f"{count:g}" for count in counts],
                [
                    Series("mean", at, means, "warn"),
                    Series(
                        "median",
                        at,
                        medians,
                        "accent",
                        low=[get(row, "step_low_ms") for row in found],
                        high=[get(row, "step_high_ms") for row in found],
                    ),
                ],
                "warm-up steps left out",
                "ms",
            ),
            [("accent", "median"), ("warn", "mean")],
        )
    )
    table = Table(
        "The same run, as it would be reported after so many warm-up steps",
        ["Left out", "Median, ms [95 %]", "Mean, ms", "Std, ms", "Max, ms", "Outliers", "n"],
        [
            TableRow(
                [
                    Cell(count, row.case["warmup"], "warmup"),
                    median_of(row, "step"),
                    *(cell_of(row, f"step_{name}") for name in ("mean_ms", "std_ms", "max_ms", "outliers")),
                    cell_of(row, "n"),
                ],
                count,
            )
            for count, row in rows.items()
        ],
        name="warmup",
    )
    return Section("warm-up", "Warm-up", "What warm-up changes", "", [Charts(charts), table])


def grid(records: Sequence[Row]) -> Section | None:
    """All measured steps, where they are more than the analysed one."""
    rows, step = of_kind(records, StepRow), analysed_step(records)
    if not rows or all(step is not None and _same_case(row, step) for row in rows):
        return None
    settings = [name for name in rows[0].case if len({row.case.get(name) for row in rows}) > 1] or ["workload"]
    measured = ("tokens_per_s", "achieved_tflops", "peak_gib")
    table_rows = []
    for row in rows:
        cells = [Cell(number(row.case.get(name)), row.case.get(name), name, is_text=True) for name in settings]
        if row.status == "ok":
            cells += [median_of(row, "step"), *(cell_of(row, name) for name in measured), Cell("")]
        else:
            cells += [Cell(NONE)] * 4 + [Cell(row.status, note=row.reason, tone="bad", is_text=True)]
        table_rows.append(TableRow(cells))
    columns = [*settings, "Step, ms [95 %]", "Tokens/s", "TFLOP/s", "Peak, GiB", "Outcome"]
    return Section("grid", "Grid", "All measured steps", "", [Table("One row per case", columns, table_rows, "grid")])
