"""A report: rows, what they say, and the files made of them: tables, and `report.html`, which begins with a summary.

The page is one file that opens from disk and asks the network for nothing. Text, tables and charts are plain HTML and
SVG, so that they are the same on paper, in a screenshot and where no script runs. What a script shows travels
compressed: the words beside the pointer, half of a page of thousands of bars, and the allocations of a step. Every name
is escaped, in charts by `charts` and elsewhere by Jinja's autoescape.
"""

from __future__ import annotations

import base64
import gzip
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from html import unescape
from pathlib import Path

from trainstep.base.errors import UsageError
from trainstep.base.files import aside
from trainstep.report.blocks import Charts, Section
from trainstep.report.findings import Finding
from trainstep.report.formats import write_tables
from trainstep.report.numbers import in_ms, typeset
from trainstep.report.subjects import SECTIONS, findings
from trainstep.report.summary import summary
from trainstep.rows import AllocationRow, FamilyRow, KernelRow, OwnerRow, PieceRow, TimelineRow, WorkloadRow
from trainstep.rows.records import Row, of_kind

MOST_ROWS = 3000
"""Rows that a page is made of."""
PARTS = (FamilyRow, KernelRow, PieceRow, TimelineRow, OwnerRow, AllocationRow)
"""Rows of which a row before them is the whole."""
_TIP, _PACKED = re.compile(r' data-tip="([^"]*)"'), '<script type="text/plain" id="packed">'


@dataclass(frozen=True)
class Report:
    """The records of one analysis and everything derived from them."""

    records: Sequence[Row]
    command: str = ""  # that made them, in words

    @property
    def findings(self) -> list[Finding]:
        """Findings of the figures, the most important first."""
        return findings(self.records)

    def write(self, folder: Path) -> list[Path]:
        """Write `report.html` and `tables/*.{md,tex,typ,csv}` into `folder`; returns the files.

        Raises:
            UsageError: the folder cannot be written.
        """
        page, tables = folder / "report.html", folder / "tables"
        missing = dict[str, UsageError]()
        for path, write in ((page, partial(write_html, command=self.command)), (tables, write_tables)):
            try:
                write(self.records, path)
            except UsageError as error:
                missing[path.name] = error
        if missing:
            first = next(iter(missing.values()))
            raise UsageError(f"{first} (missing: {', '.join(missing)})") from first
        return [page, *sorted(tables.iterdir())]


def render(records: Sequence[Row], command: str = "", sections: Sequence[Section] = ()) -> str:
    """The page of these records; kinds that are absent have no section. Of very many it shows the first.

    Args:
        command: made them, in words, such as `trainstep run · train.py`.
        sections: of the page, in the place of the records' own.
    """
    every, records = len(records), _first(records)
    if not sections:
        sections = [section for make in SECTIONS if (section := make(records)) is not None]
        sections = [*filter(None, [summary(records, findings(records), sections)]), *sections]
    blocks = (block for section in sections for block in section.blocks)
    drawn = [chart for block in blocks if isinstance(block, Charts) for chart in block.charts]
    allocations = {chart.name: chart.allocations for chart in drawn if chart.allocations is not None}
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("trainstep.report", "."),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    environment.filters |= {"typeset": typeset, "kind": lambda block: type(block).__name__, "ms": in_ms}
    source = environment.loader.get_source  # type: ignore[union-attr]
    page = environment.get_template("page.html.jinja").render(
        title=_title(records, command),
        subtitle=_subtitle(records, every),
        sections=sections,
        has_intervals=any(name.endswith(("_low_ms", "_low")) for row in records for name in row.values),
        style=source(environment, "page.css")[0],
        script=source(environment, "allocations.js")[0] + source(environment, "page.js")[0],
    )
    told = {"allocations": allocations, "tips": [unescape(tip) for tip in _TIP.findall(page)]}
    packed = base64.b64encode(gzip.compress(json.dumps(told).encode(), 9, mtime=0)).decode()  # needs no escaping
    return _TIP.sub(" data-tip", page).replace(_PACKED, _PACKED + packed)


def write_html(records: Sequence[Row], path: Path, command: str = "", sections: Sequence[Section] = ()) -> None:
    """Write the page of these records, as `render` makes it.

    Raises:
        UsageError: the file cannot be written.
    """
    page = render(records, command, sections)
    with aside(path) as draft, draft.open("x", encoding="utf-8", errors="backslashreplace") as file:
        file.write(page)  # names may hold half a surrogate


def _title(records: Sequence[Row], command: str) -> str:
    """Command, model and device."""
    names = dict.fromkeys(str(row.case["workload"]) for row in records if "workload" in row.case)
    model = ", ".join(names or dict.fromkeys(record.kind for record in records)) or "no results"
    return " · ".join(filter(None, (command, "" if model in command else model, *_measured_on(records, "device"))))


def _measured_on(records: Sequence[Row], name: str) -> list[str]:
    """The values that the environment of these rows has of a name."""
    return list(dict.fromkeys(str(row.environment[name]) for row in records if row.environment.get(name)))


def _first(records: Sequence[Row]) -> Sequence[Row]:
    """The first `MOST_ROWS`, with all parts of the last."""
    later = range(MOST_ROWS, len(records))
    return records[: next((at for at in later if not isinstance(records[at], PARTS)), len(records))]


def _subtitle(records: Sequence[Row], every: int) -> list[str]:
    parts = [f"the first {len(records):,} of {every:,} rows; results.jsonl has all"] if len(records) < every else []
    for facts in of_kind(records, WorkloadRow)[:1]:
        if facts.batch is not None:
            parts.append(f"batch {facts.batch} × context {facts.context}")
        if count := facts.parameters:
            parts.append(f"{count / 1e6:,.3g} M parameters" if count < 1e9 else f"{count / 1e9:.3g} B parameters")
    return [*parts, *_measured_on(records, "date")]
