"""Fill README.md, docs/ and notebook/ from docs/results/, so that no figure in them is typed by hand.

A block between `<!-- table: NAME -->` and `<!-- end -->` is replaced by the table called NAME here, and one that begins
with `<!-- output: NAME -->` by a command's output, as `measure_outputs.py` kept it. People write the prose around them;
tests/test_docs.py holds its figures against the tables. Run as `make docs`. The reports in docs/examples/ are made here
too, and the picture of one of them.
"""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

from measuring import keep
from tables import RESULTS, NotMeasuredError, as_checked_today, declared, kept, origin, refuse_dirty
from trainstep.report.formats import to_markdown
from trainstep.report.headlines import headlines
from trainstep.report.page import write_html
from trainstep.report.subjects import findings
from trainstep.report.tables import Table, with_shapes
from trainstep.rows.records import Row, read_records

DOCS = Path(__file__).parent
NOTEBOOK = DOCS.with_name("notebook")
PAGES = (DOCS.parent / "README.md", *sorted([*DOCS.rglob("*.md"), *NOTEBOOK.glob("*.md")]))
BLOCK = re.compile(r"(<!-- (?P<kind>table|output): (?P<name>[\w.-]+) -->\n).*?(?P<end><!-- end -->)", re.DOTALL)
sys.path.insert(0, str(DOCS.parent))  # for the examples that tables are made by
SUBJECTS = [import_module(f"tables.{path.stem}") for path in sorted(DOCS.glob("tables/[a-z]*.py"))]
TABLES = {name: table for each in SUBJECTS for name, table in getattr(each, "TABLES", {}).items()}
"""Name in a page → what makes the table."""
PICTURED = "h200-2.7B.html"
CHROMIUM = ("chromium", "--headless", "--no-sandbox", "--hide-scrollbars", "--window-size=1280,1500")


def render(text: str) -> str:
    """`text` with every table and output made anew."""

    def fill(match: re.Match[str]) -> str:
        if match["kind"] == "table" and match["name"] not in TABLES:
            raise SystemExit(f"no table is called {match['name']!r}; there are {', '.join(TABLES)}")
        try:
            table = TABLES[match["name"]]() if match["kind"] == "table" else _output(match["name"])
            made = to_markdown(_sized(table)) if isinstance(table, Table) else table or ""
        except NotMeasuredError as error:
            made = f"Not measured yet: there is no docs/results/{error}.\n"
        return f"{match[1]}{made}{match['end']}"

    return BLOCK.sub(fill, text)


def _output(name: str) -> str:
    """A command's lines with their origin, in short its verdict and changes; or the picture of a page."""
    name, _, short = name.partition("-")
    if (cell := kept("outputs.json").get(name)) is None:
        raise NotMeasuredError("outputs.json")
    if name == "picture":
        return f"![{cell['text']}](docs/report.png)\n"
    parts = cell["text"].strip().split("\n\n")
    if short:
        parts = [part for part in parts if part.startswith("$ t") or "×" in part]
    return "\n\n".join([f"```console\n# {cell['device']}, {origin([cell])}\n{parts[0]}", *parts[1:]]) + "\n```\n"


def headline(rows: list[Row]) -> str:
    """A page's first words, which its picture shows."""
    first = headlines(rows, findings(rows))[0]
    where = f"{rows[0].case['workload']} on one {rows[0].environment['device']}"
    return f"{where}: {first.figure.plain} {first.says}; {first.detail}"


def _picture(rows: list[Row]) -> None:
    """Take docs/report.png anew if the page has another headline by now."""
    told = headline(rows)
    if kept("outputs.json").get("picture", {}).get("text") != told:
        page = (DOCS / "examples" / PICTURED).as_uri()
        subprocess.run([*CHROMIUM, f"--screenshot={DOCS / 'report.png'}", page], check=True, capture_output=True)
        cell = {"text": told} | {name: rows[0].environment[name] for name in ("torch", "date", "commit")}
        keep(RESULTS / "outputs.json", "picture", cell, ("run", "ladder", "picture"))


def _sized(table: Table) -> Table:
    """The table with a model's shape, where its caption begins with the model's name: `2.7B, batch 8`."""
    return dataclasses.replace(table, caption=with_shapes(table.caption, re.split(r"[,; ]", table.caption)[:1]))


def main() -> None:
    """Rewrite the pages in place, or with --check only say which differ."""
    if "--check" not in sys.argv:
        _write_reports()
    made = {page: render(page.read_text(encoding="utf-8")) for page in PAGES}
    stale = [page for page, text in made.items() if text != page.read_text(encoding="utf-8")]
    print(f"changed: {', '.join(page.name for page in stale)}" if stale else "all tables are up to date")
    if "--check" in sys.argv:
        sys.exit(1 if stale else 0)
    for page in stale:
        page.write_text(made[page], encoding="utf-8")


def _write_reports() -> None:
    """Make docs/examples/ anew, and the picture."""
    for report, names in declared.DECLARED["reports"].items():
        rows = []
        for file in (RESULTS / f"{name}.jsonl" for name in names):
            own = read_records(file)
            refuse_dirty(file.name, own)
            rows += map(as_checked_today, own)
        write_html([declared.planned_anew(row) for row in rows], DOCS / "examples" / report)
        if report == PICTURED:
            _picture(rows)


if __name__ == "__main__":
    main()
