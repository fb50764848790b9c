"""Fill the tables of README.md and docs/*.md from docs/results/, so that no figure in them is typed by hand.

A block between `<!-- table: NAME -->` and `<!-- end -->` is replaced by the table called NAME here; prose around it is
written by people, and tests/test_docs.py holds its figures against the tables. Run as `make docs`. The reports in
docs/examples/ that show several results at once are made here too.
"""

from __future__ import annotations

import dataclasses
import re
import sys
from importlib import import_module
from pathlib import Path

from tables import RESULTS, NotMeasuredError, declared, refuse_dirty
from trainstep.report.formats import to_markdown
from trainstep.report.page import write_html
from trainstep.report.tables import Table, with_shapes
from trainstep.rows.records import read_records

DOCS = Path(__file__).parent
PAGES = (DOCS.parent / "README.md", *sorted(DOCS.glob("*.md")))
BLOCK = re.compile(r"(<!-- table: (?P<name>[\w.-]+) -->\n).*?(?P<end><!-- end -->)", re.DOTALL)
sys.path.insert(0, str(DOCS.parent))  # for the examples that tables are made by
SUBJECTS = [import_module(f"tables.{path.stem}") for path in sorted(DOCS.glob("tables/[a-z]*.py"))]
TABLES = {name: table for each in SUBJECTS for name, table in getattr(each, "TABLES", {}).items()}
"""Name in a page → what makes the table."""


def render(text: str) -> str:
    """`text` with every table made anew."""

    def fill(match: re.Match[str]) -> str:
        if match["name"] not in TABLES:
            raise SystemExit(f"no table is called {match['name']!r}; there are {', '.join(TABLES)}")
        try:
            table = TABLES[match["name"]]()
            made = "" if table is None else to_markdown(_sized(table))
        except NotMeasuredError as error:
            made = f"Not measured yet: there is no docs/results/{error}.\n"
        return f"{match[1]}{made}{match['end']}"

    return BLOCK.sub(fill, text)


def _sized(table: Table) -> Table:
    """The table with a model's shape, where its caption begins with the model's name: `2.7B, batch 8`."""
    return dataclasses.replace(table, caption=with_shapes(table.caption, re.split(r"[,; ]", table.caption)[:1]))


def main() -> None:
    """Rewrite the pages in place, or with --check only say which differ."""
    made = {page: render(page.read_text(encoding="utf-8")) for page in PAGES}
    stale = [page for page, text in made.items() if text != page.read_text(encoding="utf-8")]
    print(f"changed: {', '.join(page.name for page in stale)}" if stale else "all tables are up to date")
    if "--check" in sys.argv:
        sys.exit(1 if stale else 0)
    for page in stale:
        page.write_text(made[page], encoding="utf-8")
    for report, names in declared.DECLARED["reports"].items():
        rows = []
        for file in (RESULTS / f"{name}.jsonl" for name in names):
            if file.exists():
                own = read_records(file)
                refuse_dirty(file.name, own)
                rows += own
            else:
                print(f"{report} goes without {file.name}: not measured yet")
        write_html([declared.planned_anew(row) for row in rows], DOCS / "examples" / report)


if __name__ == "__main__":
    main()
