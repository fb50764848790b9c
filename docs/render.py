"""Fill README.md and docs/*.md from docs/results/, so that no figure in what is filled is typed by hand.

A block between `<!-- table: NAME -->` or `<!-- text: NAME -->` and `<!-- end -->` is replaced by the table or the
paragraphs called NAME here. Run as `make docs`; a test fails when a committed page differs from what this makes. The
reports in docs/examples/ that show several results at once are made here too.
"""

from __future__ import annotations

import re
import sys
import textwrap
from pathlib import Path

import tables.attention
import tables.headlines
import tables.memory
import tables.parallel
import tables.plan
import tables.profile
import tables.steps
import tables.tour
import tables.train
import texts.attention
import texts.attention_findings
import texts.kernels
import texts.memory
import texts.memory_findings
import texts.parallel
import texts.parallel_findings
import texts.profile_findings
import texts.steps
import texts.theory
import texts.tour
from tables.source import RESULTS, NotMeasuredError
from trainstep.records import read_records
from trainstep.report.formats import to_markdown
from trainstep.report.html import write_html

DOCS = Path(__file__).parent
PAGES = (DOCS.parent / "README.md", *sorted(DOCS.glob("*.md")))
REPORTS = {
    "h200-parallel.html": ("h200-parallel", "h200-parallel-trace", "h200-collectives"),
    "h200-attention.html": ("h200-attention-naive", "h200-attention-flash"),
    "h200-memory.html": ("h200-memory", "h200-residuals", "h200-checkpointing", "h200-allocations"),
    "h200-profile-2.7B.html": ("h200-profile-2.7B",),
}
BLOCK = re.compile(r"(<!-- (?P<what>table|text): (?P<name>[\w.-]+) -->\n).*?(?P<end><!-- end -->)", re.DOTALL)
WIDTH = 120

TABLES = {
    name: table
    for subject in (
        tables.headlines,
        tables.steps,
        tables.attention,
        tables.parallel,
        tables.memory,
        tables.profile,
        tables.plan,
        tables.tour,
        tables.train,
    )
    for name, table in subject.TABLES.items()
}
"""Name in a page → what makes the table."""
TEXTS = {
    name: text
    for subject in (
        texts.steps,
        texts.kernels,
        texts.profile_findings,
        texts.memory,
        texts.memory_findings,
        texts.attention,
        texts.attention_findings,
        texts.parallel,
        texts.parallel_findings,
        texts.theory,
        texts.tour,
    )
    for name, text in subject.TEXTS.items()
}
"""Name in a page → what makes its paragraphs, with an empty line between two."""


def render(text: str) -> str:
    """`text` with every block filled anew."""

    def fill(match: re.Match[str]) -> str:
        what, name = match["what"], match["name"]
        known = TABLES if what == "table" else TEXTS
        if name not in known:
            raise SystemExit(f"no {what} is called {name!r}; there are {', '.join(known)}")
        try:
            made = to_markdown(TABLES[name]()) if what == "table" else paragraphs(TEXTS[name]())
        except NotMeasuredError as error:
            made = f"Not measured yet: there is no docs/results/{error}.\n"
        return f"{match[1]}{made}{match['end']}"

    return BLOCK.sub(fill, text)


def paragraphs(text: str) -> str:
    """`text` in lines that fit the page's source; blocks of code stay as they are."""
    filled = (
        each if each.startswith("```") else textwrap.fill(each, WIDTH, break_long_words=False, break_on_hyphens=False)
        for each in text.split("\n\n")
    )
    return "\n\n".join(filled) + "\n"


def main() -> None:
    """Rewrite the pages in place, or with --check only say which differ."""
    stale = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        if (made := render(text)) != text:
            stale.append(page.name)
            if "--check" not in sys.argv:
                page.write_text(made, encoding="utf-8")
    if "--check" not in sys.argv:
        for report, names in REPORTS.items():
            files = [RESULTS / f"{name}.jsonl" for name in names]
            for file in files:
                if not file.exists():
                    print(f"{report} goes without {file.name}: not measured yet")
            rows = [row for file in files if file.exists() for row in read_records(file)]
            write_html([tables.parallel.planned_anew(row) for row in rows], DOCS / "examples" / report)
    print(f"changed: {', '.join(stale)}" if stale else "all tables and texts are up to date")
    if stale and "--check" in sys.argv:
        sys.exit(1)


if __name__ == "__main__":
    main()
