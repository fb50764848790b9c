"""Tables → Markdown, LaTeX, Typst and CSV; `terminal` draws them.

Every writer escapes what its format treats as special, so names from a user's model can hold anything.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from trainstep.base.errors import printable
from trainstep.base.files import aside, remove
from trainstep.report.subjects import make_tables
from trainstep.report.tables import Table
from trainstep.rows.records import Row

if TYPE_CHECKING:
    import pandas


def to_markdown(table: Table) -> str:
    """A GitHub-flavoured Markdown table, its caption above."""
    escaped = _escaped(table, _MARKDOWN)
    return (
        f"{_escape(printable(table.caption), _MARKDOWN)}\n\n{escaped.to_markdown(index=False, disable_numparse=True)}\n"
    )


def to_latex(table: Table) -> str:
    """A LaTeX `table` with a `tabular`; needs no package."""
    escaped = _escaped(table, _LATEX)
    header, *body = (" & ".join(row) + " \\\\\n" for row in [escaped.columns, *escaped.to_numpy()])
    return (
        f"\\begin{{table}}\n\\caption{{{_escape(printable(table.caption), _LATEX)}}}\n"
        f"\\begin{{tabular}}{{{'l' * len(table.columns)}}}\n\\hline\n{header}\\hline\n{''.join(body)}\\hline\n"
        "\\end{tabular}\n\\end{table}\n"
    )


def to_typst(table: Table) -> str:
    """A Typst `figure` with a `table`."""
    escaped = _escaped(table, _TYPST)
    header = ", ".join(f"[{title}]" for title in escaped.columns)
    body = "\n".join("    " + ", ".join(f"[{cell}]" for cell in row) + "," for row in escaped.itertuples(index=False))
    return (
        f"#figure(\n  table(\n    columns: {len(table.columns)},\n    table.header({header}),\n{body}\n  ),\n"
        f"  caption: [{_escape(printable(table.caption), _TYPST)}],\n)\n"
    )


def to_csv(table: Table) -> str:
    """Comma-separated values, quoted where needed (RFC 4180); an apostrophe before what a spreadsheet would run."""
    lines = io.StringIO()
    rows = ((printable(title) for title in table.columns), *table.texts())
    csv.writer(lines, lineterminator="\n").writerows(map(_no_formula, row) for row in rows)
    return lines.getvalue()


_FORMULA = re.compile(r"[=+\-@\t\r]")
_QUANTITY = re.compile(r"[-+]?[\d,.]+(e[-+]?\d+)?[%×]?( ± .*| \[.*\])?")


def _no_formula(text: str) -> str:
    return f"'{text}" if _FORMULA.match(text) and not _QUANTITY.fullmatch(text) else text


WRITERS: Mapping[str, Callable[[Table], str]] = {"md": to_markdown, "tex": to_latex, "typ": to_typst, "csv": to_csv}
"""File ending → writer."""


def write_tables(records: Sequence[Row], folder: Path) -> None:
    """Write every table in every format into `folder`, from which those of earlier results go.

    Raises:
        UsageError: one cannot be written. Each that is there is whole.
    """
    if folder.is_symlink():
        remove(folder)
    tables = {
        f"{table.name}.{ending}": (writer, table)
        for table in make_tables(records)
        for ending, writer in WRITERS.items()
    }
    for name, (writer, table) in tables.items():
        with aside(folder / name) as draft:
            draft.write_text(writer(table), encoding="utf-8")
    for each in folder.glob("*.csv"):
        same = {each.with_suffix(f".{ending}") for ending in WRITERS}
        if each.name not in tables and all(path.exists() for path in same):  # else it is not ours
            for path in same:
                remove(path)


def _escaped(table: Table, escapes: Mapping[str, str]) -> pandas.DataFrame:
    frame = table.frame()
    frame.columns = [_escape(title, escapes) for title in frame.columns]
    return frame.map(lambda cell: _escape(cell, escapes))


def _escape(text: str, escapes: Mapping[str, str]) -> str:
    return "".join(escapes.get(character, character) for character in text)


_BREAKS = {"\n": " ", "\r": " "}
_MARKDOWN = _BREAKS | {character: f"\\{character}" for character in "\\|`*_[]<>#~$"}
_LATEX = _BREAKS | {
    **{character: f"\\{character}" for character in "&%$#_{}"},
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "[": "{[}",  # a row that starts with [ would be read as an argument of the \\ before it
    "]": "{]}",
    "±": r"$\pm$",
    "×": r"$\times$",
    "–": "--",
    "…": r"\ldots{}",
}
_TYPST = _BREAKS | {character: f"\\{character}" for character in "\\*_`$#<>@[]~/=-+"}
