"""Records → `report.html`: one file that opens from disk and asks the network for nothing.

Text and tables are plain HTML and come first; charts are drawn after the first paint. They and the library that draws
them travel compressed (0.5 MB instead of 1.5 MB), and the reader's browser unpacks them. Every name goes through
Jinja's autoescape.
"""

from __future__ import annotations

import base64
import gzip
import json
from collections.abc import Sequence
from pathlib import Path

from bokeh.resources import Resources
from jinja2 import Environment, PackageLoader, StrictUndefined

from trainstep.errors import UsageError
from trainstep.kinds import WorkloadRow
from trainstep.records import Row, of_kind
from trainstep.report import plots
from trainstep.report.blocks import Charts
from trainstep.report.sections import SECTIONS


def render(records: Sequence[Row]) -> str:
    """The page of these records; kinds that are absent have no section."""
    sections = [section for make in SECTIONS if (section := make(records)) is not None]
    drawn = [
        chart for section in sections for block in section.blocks if isinstance(block, Charts) for chart in block.charts
    ]
    figures = {chart.name: chart.plot() if callable(chart.plot) else chart.plot for chart in drawn}
    charts = {name: plots.embedded(figure) for name, figure in figures.items()}
    allocations = {chart.name: chart.allocations for chart in drawn if chart.allocations is not None}
    environment = Environment(
        loader=PackageLoader("trainstep.report", "."),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    source = environment.loader.get_source  # type: ignore[union-attr]
    return environment.get_template("page.html.jinja").render(
        title=_title(records),
        subtitle=_subtitle(records),
        sections=sections,
        heights={name: figure.height for name, figure in figures.items()},
        has_intervals=any(name.endswith(("_low_ms", "_low")) for row in records for name in row.values),
        charts=_packed(json.dumps({"colours": plots.COLOURS, "items": charts, "allocations": allocations})),
        library=_packed(_library()) if charts else "",
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
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}; choose another folder with --out") from error


def _title(records: Sequence[Row]) -> str:
    names = dict.fromkeys(str(row.case["workload"]) for row in records if row.case.get("workload") is not None)
    return ", ".join(names) or ", ".join(dict.fromkeys(record.kind for record in records)) or "no results"


def _subtitle(records: Sequence[Row]) -> list[str]:
    """Device, batch and date, as far as they are known."""
    parts = []
    environment = next((row.environment for row in records if row.environment), {})
    if environment.get("device"):
        parts.append(str(environment["device"]))
    facts = of_kind(records, WorkloadRow)
    if facts and facts[0].case.get("batch") is not None:
        parts.append(f"batch {facts[0].case['batch']} × context {facts[0].case['context']}")
    if facts and isinstance(count := facts[0].values.get("parameters"), int):
        parts.append(f"{count / 1e6:,.3g} M parameters" if count < 1e9 else f"{count / 1e9:.3g} B parameters")
    if environment.get("date"):
        parts.append(str(environment["date"]))
    return parts


def _library() -> str:
    """BokehJS without its add-ons."""
    return "\n".join(Resources(mode="inline", minified=True, log_level="warn", components=["bokeh"]).js_raw)


def _packed(text: str) -> str:
    """Gzipped, in base64, which needs no escaping anywhere."""
    return base64.b64encode(gzip.compress(text.encode(), 9, mtime=0)).decode()
