"""Settings of the site, which `make site` builds into build/site: Sphinx reads docs/ with MyST and furo.

A block between `<!-- site: NAME -->` and `<!-- end -->` is filled from the code: flags, findings, docstrings.
Lists of links on the first page become the navigation. Tables of more than twenty rows go on in a CSV.
"""

from __future__ import annotations

import ast
import contextlib
import csv
import importlib.metadata
import io
import itertools
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

from trainstep.commands.cli import COMMANDS
from trainstep.commands.options import parse_as
from trainstep.report import subjects

project, author = "trainstep", "The trainstep developers"
version = release = importlib.metadata.version("trainstep")
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
default_role, smartquotes = "literal", False
myst_heading_anchors = 4
html_theme, html_title, html_copy_source = "furo", f"trainstep {version}", False
nitpick_ignore_regex = [("py:.*", ".*")]  # types of torch, whose inventory is on the network
autodoc_member_order, autodoc_typehints, autodoc_inherit_docstrings = "bysource", "none", False

LIBRARY = ("trainstep", "trainstep.attention", "trainstep.fused", "trainstep.checkpointing", "trainstep.parallel")
OF_ALL = ("-h,", "-v,", "--json", "--quiet", "--debug")
BLOCK = re.compile(r"<!-- site: (\w+) -->\n.*?<!-- end -->", re.DOTALL)
TABLE = re.compile(r"<!-- table: ([\w.-]+) -->\n(.*?)<!-- end -->", re.DOTALL)
SECTION = re.compile(r"^## (.*?)\n(.*?)(?=^## |\Z)", re.MULTILINE | re.DOTALL)
MOST_ROWS = 20
LINK = re.compile(r"\[([^\]]*)\]\((?!https?:|#)([^)#\s]+)[^)]*\)")
ROOT = Path(__file__).resolve().parents[1]
CSV = ROOT / "build" / "csv"


def commands(*words: str) -> Iterator[str]:
    """A section for each command below these words: its docstring and its own flags, as `--help` has them."""
    wide = mock.patch.dict(os.environ, COLUMNS="5000")  # a flag and its values on one line
    with wide, contextlib.redirect_stdout(io.StringIO()) as shown, contextlib.suppress(SystemExit):
        parse_as(COMMANDS, [*words, "--help"])
    usage, *said = shown.getvalue().split("\n\n")
    if below := re.search(r"{([\w,]+)}$", usage):
        yield from (text for each in below[1].split(",") for text in commands(*words, each))
        return
    made = [f"\n## {' '.join(words)}\n", *(f"{_plain(each)}\n" for each in said if not each.startswith((" ", "╭")))]
    lines = shown.getvalue().splitlines()
    # Long help stands in columns, which begin where the rules below their titles do.
    starts = max(([rule.start() - 1 for rule in re.finditer("[-─]{30,}", line)] for line in lines), key=len)
    is_own = False
    for line in (line[start:end] for start, end in zip(starts, [*starts[1:], None], strict=True) for line in lines):
        inside = line.strip(" │")
        if flag := re.match(r"[ │] {1,2}(--?\w\S*(?:, -\S+)?(?: \S+)*|[A-Z]+)(?:  +|$)(.*)", line.rstrip(" │")):
            if is_own := not flag[1].startswith(OF_ALL):
                made.append(f"- `{flag[1]}` {_plain(flag[2])}")
        elif inside and is_own and re.match(r"[ │] {6}", line):
            made.append(f"  {_plain(inside)}")
        elif inside and made[-1].endswith("` "):  # values that are wider than the column
            made[-1] = f"{made[-1][:-2]}{inside}` "
    yield from made


def findings() -> Iterator[str]:
    """A row for each call of `found` in the rules: its id and its sentence, with … for parts that differ."""
    yield "| id | sentence |\n|---|---|"
    told: dict[str, str] = {}
    for path in sorted(Path(subjects.__file__).parent.glob("*.py")):
        for rule in (
            each for each in ast.walk(ast.parse(path.read_text("utf-8"))) if isinstance(each, ast.FunctionDef)
        ):
            texts: dict[str, str] = {}
            for node in sorted(
                (each for each in ast.walk(rule) if hasattr(each, "lineno")), key=lambda each: each.lineno
            ):
                if isinstance(node, ast.Assign | ast.AugAssign):
                    name = getattr(node.target if isinstance(node, ast.AugAssign) else node.targets[0], "id", "")
                    before = texts.get(name, "…") if isinstance(node, ast.AugAssign) else ""
                    texts[name] = before + _pattern(node.value, texts)
                elif isinstance(node, ast.Call) and getattr(node.func, "id", "") == "found" and len(node.args) > 1:
                    whole = isinstance(node.args[0], ast.Name)  # of an id in parts, all endings are one row
                    id, said = _pattern(node.args[0], texts if whole else {}), _pattern(node.args[1], texts)
                    told[id] = max(told.get(id, ""), said, key=len)
    yield from (f"| `{id}` | {_plain(re.sub('…+', '…', said))} |" for id, said in sorted(told.items()))


def _pattern(text: ast.AST, known: Mapping[str, str]) -> str:
    """A string in code: its constant parts and those of known names, a figure's name for the figure, … for the rest."""
    if isinstance(text, ast.JoinedStr | ast.BinOp):
        parts = text.values if isinstance(text, ast.JoinedStr) else [text.left, text.right]
        return "".join(_pattern(each, known) for each in parts)
    if isinstance(text, ast.FormattedValue | ast.Name):
        return known.get(getattr(text.value if isinstance(text, ast.FormattedValue) else text, "id", ""), "…")
    if isinstance(text, ast.IfExp):
        either = [_pattern(each, known) for each in (text.body, text.orelse)]
        alike = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(*either, strict=False))
        return f"{shared}…" if (shared := "".join(each for each, _ in alike)) else either[0]
    return re.sub(r"{(\w+)[^}]*}", r"{\1}", text.value) if isinstance(getattr(text, "value", 0), str) else "…"


def _plain(text: str) -> str:
    return re.sub(r"([*_<>|\[\]])", r"\\\1", " ".join(text.split()))


def library() -> Iterator[str]:
    """The docstrings of the documented import paths."""
    for name in LIBRARY:
        yield f"\n## {name}\n\n```{{eval-rst}}\n.. automodule:: {name}\n   :members:\n```"


FILLED = {"commands": commands, "findings": findings, "library": library}


def fill(app: Any, name: str, source: list[str]) -> None:
    """Fill a page's blocks, shorten its tables, and make the navigation of the first page's links."""
    here = (ROOT / "docs" / name).parent

    def inside(link: re.Match[str]) -> str:
        """The link; a text and a path where it leads to a folder, or to a page outside of the site."""
        to = (here / link[2]).resolve()
        is_outside = to.is_dir() or (to.suffix == ".md" and not to.is_relative_to(ROOT / "docs"))
        return f"{link[1]} (`{to.relative_to(ROOT)}`)" if is_outside else link[0]

    text = BLOCK.sub(lambda block: "\n".join(FILLED[block[1]]()), source[0])
    text = LINK.sub(inside, text)
    text = TABLE.sub(lambda table: _shortened(table[1], table[2], "../" * (name.count("/") + 1)), text)
    if name == "index":
        for caption, links in SECTION.findall(text):
            pages = "\n".join(f"{title} <{page}>" for title, page in re.findall(r"\[(.+?)\]\(([\w/-]+)\.md\)", links))
            text += f"\n```{{toctree}}\n:hidden:\n:caption: {caption}\n\n{pages}\n```\n"
    source[0] = text


def _shortened(name: str, made: str, up: str) -> str:
    """The first rows of a table, and a link to all of them as CSV."""
    rows = [line for line in made.splitlines() if line.startswith("|")]
    if len(rows) <= 2 + MOST_ROWS:
        return made
    CSV.mkdir(parents=True, exist_ok=True)
    with (CSV / f"{name}.csv").open("w", encoding="utf-8", newline="") as file:
        cells = (re.split(r" *(?<!\\)\| *", row)[1:-1] for row in (rows[0], *rows[2:]))
        csv.writer(file).writerows([cell.replace("\\", "") for cell in row] for row in cells)
    kept = made.replace("\n".join(rows[2 + MOST_ROWS :]), "").rstrip()
    return f"{kept}\n\n[All {len(rows) - 2} rows as CSV]({up}build/csv/{name}.csv)\n"


def setup(app: Any) -> None:
    """Called by Sphinx."""
    app.connect("source-read", fill)
