"""A report: rows, what they say, and the files made of them: tables, and `report.html`, which begins with a summary.

The page is one file that opens from disk and asks the network for nothing. Text and tables are plain HTML and come
first; charts are drawn after the first paint. They and the library that draws them travel compressed (0.5 MB instead of
1.5 MB), and the reader's browser unpacks them. Every name goes through Jinja's autoescape.
"""

from __future__ import annotations

import base64
import gzip
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from trainstep.errors import UsageError
from trainstep.kinds import RungRow, StepRow, WorkloadRow
from trainstep.records import Row, Scalar, of_kind
from trainstep.report.blocks import TOPICS, Block, Charts, Finding, Flags, Headline, Section, Sentences, span
from trainstep.report.charts import COLOURS, embedded
from trainstep.report.columns import INTERVAL, Cell, ratio_cell
from trainstep.report.formats import write_tables
from trainstep.report.numbers import NONE, as_float, gib, number, typeset
from trainstep.report.subjects import SECTIONS, findings
from trainstep.report.subjects.ladder_findings import (
    BASELINE,
    after_precision,
    climbs,
    disputing,
    kept_rungs,
    recommended_flags,
    with_controls,
)
from trainstep.report.subjects.run import headline
from trainstep.report.subjects.steps import analysed_step


@dataclass(frozen=True)
class Report:
    """The records of one analysis and everything derived from them."""

    records: Sequence[Row]

    @property
    def findings(self) -> list[Finding]:
        """What the figures say, the most important first."""
        return findings(self.records)

    @property
    def recommended_flags(self) -> str:
        """The settings that the (first) ladder ended with, as flags to paste; empty where the baseline was best."""
        return recommended_flags(self.records)

    def write(self, folder: Path) -> list[Path]:
        """Write `report.html` and `tables/*.{md,tex,typ,csv}` into `folder`; returns the files.

        Raises:
            UsageError: the folder cannot be written.
        """
        page = folder / "report.html"
        try:
            tables = write_tables(self.records, folder / "tables")
        except OSError as error:
            raise UsageError(f"cannot write to {folder}: {error.strerror}; choose another folder with --out") from error
        write_html(self.records, page)
        return [page, *tables]


def render(records: Sequence[Row]) -> str:
    """The page of these records; kinds that are absent have no section."""
    sections = [section for make in (summary, *SECTIONS) if (section := make(records)) is not None]
    blocks = (block for section in sections for block in section.blocks)
    drawn = [chart for block in blocks if isinstance(block, Charts) for chart in block.charts]
    plots = {chart.name: chart.plot() for chart in drawn}
    items = {name: embedded(plot) for name, plot in plots.items()}
    allocations = {chart.name: chart.allocations for chart in drawn if chart.allocations is not None}
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("trainstep.report", "."),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    environment.filters |= {"typeset": typeset, "kind": lambda block: type(block).__name__}
    source = environment.loader.get_source  # type: ignore[union-attr]
    return environment.get_template("page.html.jinja").render(
        title=_title(records),
        subtitle=_subtitle(records),
        sections=sections,
        heights={name: plot.height for name, plot in plots.items()},
        has_intervals=any(name.endswith(("_low_ms", "_low")) for row in records for name in row.values),
        charts=_packed(json.dumps({"colours": COLOURS, "items": items, "allocations": allocations})),
        library=_packed(_library()) if plots else "",
        style=source(environment, "page.css")[0],
        script=source(environment, "allocations.js")[0] + source(environment, "page.js")[0],
    )


def write_html(records: Sequence[Row], path: Path) -> None:
    """Write the page of these records.

    Raises:
        UsageError: the file cannot be written.
    """
    page = render(records)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_name(f".{path.name}")
        draft.write_text(page, encoding="utf-8", errors="backslashreplace")  # names may hold half a surrogate
        draft.replace(path)  # the page is there in full, or as it was before
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}; choose another folder with --out") from error


def _title(records: Sequence[Row]) -> str:
    names = dict.fromkeys(str(row.case["workload"]) for row in records if "workload" in row.case)
    return ", ".join(names or dict.fromkeys(record.kind for record in records)) or "no results"


def _subtitle(records: Sequence[Row]) -> list[str]:
    parts = []
    for facts in of_kind(records, WorkloadRow)[:1]:
        if facts.batch is not None:
            parts.append(f"batch {facts.batch} × context {facts.context}")
        if count := facts.parameters:
            parts.append(f"{count / 1e6:,.3g} M parameters" if count < 1e9 else f"{count / 1e9:.3g} B parameters")
    ends = [
        list(dict.fromkeys(str(row.environment[name]) for row in records if row.environment.get(name)))
        for name in ("device", "date")
    ]
    return [*ends[0], *parts, *ends[1]]


def _library() -> str:
    from bokeh.resources import Resources

    return "\n".join(Resources(mode="inline", minified=True, log_level="warn", components=["bokeh"]).js_raw)


def _packed(text: str) -> str:
    """Gzipped, in base64, which needs no escaping anywhere."""
    return base64.b64encode(gzip.compress(text.encode(), 9, mtime=0)).decode()


def summary(records: Sequence[Row]) -> Section | None:
    """What dominates, what to change, what was gained."""
    step, found = analysed_step(records), findings(records)
    blocks: list[Block] = []
    for name, climb in climbs(records).items():
        own = with_controls(climb, records)
        if kept := kept_rungs(climb):
            blocks.append(_gain_headline(kept, name) if disputing(kept, own) is None else _disputed_headline(name))
        if flags := recommended_flags(own):
            whose = f" ({name})" if name else ""
            blocks.append(Flags(re.split(r" (?=--)", flags), f"What to change: add these flags to your run{whose}"))
    if not kept_rungs(records) and step is not None:
        blocks.append(_step_headline(step))
    if (of_script := headline(records)) is not None:
        blocks.append(of_script)
    if found:
        topics: dict[str, list[str]] = {}
        for finding in found:
            topic = TOPICS[finding.topic]
            topics.setdefault(topic, []).append(finding.sentence.removeprefix(f"{topic}: "))
        blocks.append(Sentences(topics))
    return Section("summary", "Summary", "Summary", "", blocks) if blocks else None


def _disputed_headline(name: str) -> Headline:
    detail = "The ladder’s top, in turns with its first rung, was not what its rungs’ gains say."
    says = "no speed-up is claimed: the machine changed meanwhile"
    return Headline(Cell(NONE), says, f"{name}: {detail}" if name else detail, [])


def _gain_headline(kept: Sequence[RungRow], name: str) -> Headline:
    first, last = kept[0], kept[-1]
    speedup = ratio_cell(last, "speedup")
    interval = f", {INTERVAL} {speedup.low.text}–{speedup.high.text}×" if speedup.low and speedup.high else ""
    unmeasured = ", – not measured" if (first.peak_gib is None) != (last.peak_gib is None) else ""
    stats = [
        ("Step", _change(first, last, "step_ms", number, "ms"), f"median, from {first.precision}"),
        ("Throughput", _change(first, last, "tokens_per_s", number, ""), "tokens/s"),
        ("Achieved", _change(first, last, "achieved_tflops", number, ""), "TFLOP/s" + _of_peak(last)),
        ("Peak memory", _change(first, last, "peak_gib", gib, ""), f"of one step{unmeasured}"),
    ]
    error, budget = last.gradient_error, last.error_budget
    if len(kept) > 1 and error is not None and budget:
        stats.append(("Gradients", number(error, 2), f"relative error, {number(budget, 2)} allowed"))
    stats = [stat for stat in stats if stat[1]]
    if len(kept) == 1:
        which = "the baseline" if first.rung == BASELINE else f"{first.rung}, the first that fits,"
        says, detail = f"per step: {which} is the fastest found", "No change on the ladder made the step faster."
        detail = f"{name}: {detail}" if name else detail
        return Headline(Cell(f"{number(first.step_ms)} ms"), says, detail, stats)
    is_faster = speedup.low is not None and (as_float(speedup.low.value) or 0) > 1
    checked = "loss and gradients" if last.update_error is None else "loss, gradients and updates"
    says = f"faster, {checked} within their budgets" if is_faster else "the baseline’s speed, in less memory"
    detail = f"{_change(first, last, 'step_ms', number, 'ms')} per step{interval}"
    if (later := after_precision(kept)) is not None:
        detail += f"; {later['after_precision']:.2f}× of it after {later['precision_rung']}"
    return Headline(speedup, says, f"{name}: {detail}" if name else detail, stats)


def _of_peak(row: RungRow | StepRow) -> str:
    return "" if row.utilisation is None else f", {row.utilisation:.0%} of the device’s peak"


def _change(first: Row, last: Row, name: str, text: Callable[[Scalar], str], unit: str) -> str:
    """`196 → 146 ms`, the one value where nothing changed, or `196 ms → –` where only one is known."""
    values = [row.values.get(name) for row in (first, last)]
    if values == [None, None]:
        return ""
    if None in values:
        return " → ".join(NONE if value is None else f"{text(value)} {unit}".strip() for value in values)
    shown = [text(value) for value in values]
    units = {part.rpartition(" ")[2] for part in shown}
    if text is gib and len(units) == 1:
        shown, unit = [part.rpartition(" ")[0] for part in shown], units.pop()
    return f"{' → '.join(dict.fromkeys(shown))} {unit}".strip()


def _step_headline(step: StepRow) -> Headline:
    stats = [
        ("Throughput", number(step.tokens_per_s), "tokens/s"),
        ("Achieved", number(step.achieved_tflops), "TFLOP/s" + _of_peak(step)),
        ("Peak memory", gib(step.peak_gib), "of one step"),
    ]
    return Headline(
        Cell(f"{number(step.step_ms)} ms", step.step_ms, "step_ms"),
        "per training step",
        f"median of {number(step.n)} steps: {span(step, 'step')}",
        [stat for stat in stats if stat[1] != NONE],
    )
