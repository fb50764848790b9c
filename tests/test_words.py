"""Texts that a user reads are plain field English: short sentences, an actor for each verb, the field's terms.

`words.toml` has the forms, the terms, the pages that are checked, and texts that stay as they are. A sentence ends at a
full stop, a colon, a question mark, a dot between items, or the end of a paragraph or a list's item. Tables, code and
outputs are not read.
"""

import contextlib
import io
import re
import tomllib
from pathlib import Path

import pytest

from tests.commands.test_flags import classes
from tests.report.test_answer import ROWS
from trainstep.commands.cli import main
from trainstep.report.subjects import findings
from trainstep.report.verdict import judge

WORDS = tomllib.loads(Path(__file__).with_name("words.toml").read_text("utf-8"))
FAULTS = dict.fromkeys(WORDS["forms"], "another form") | WORDS["terms"]
REPOSITORY = Path(__file__).parents[1]


def faults(text):
    """The sentences of Markdown or plain text that break a rule, each with the rule; code counts as one word."""
    for kept in WORDS["kept"]:
        text = text.replace(kept, "")
    blocks = r"<!-- (?:table|output): .*?<!-- end -->|```.*?```|^\|.*?$"
    text = re.sub(blocks, "\n\n", text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"\]\([^)\n]*\)", "", re.sub(r"`[^`]*`", "code", text))
    parts = re.split(r"\n\s*\n|\n *(?:[-*•#]+|\d+\.) | · |(?<=[.!?:])\s", text)
    found = []
    for said in (" ".join(part.split()) for part in parts):
        found += [f"{len(said.split())} words: {said}"] if len(said.split()) > WORDS["most_words"] else []
        hits = ((re.search(ours, said, re.IGNORECASE), theirs) for ours, theirs in FAULTS.items())
        found += [f"{hit[0]!r}, expected {theirs}: {said}" for hit, theirs in hits if hit]
    return found


@pytest.mark.parametrize("text", WORDS["samples"])
def test_faults_are_found(text):
    assert len(faults(text)) == WORDS["samples"][text]


@pytest.mark.parametrize("page", WORDS["pages"])
def test_pages(page):
    assert faults((REPOSITORY / page).read_text("utf-8")) == []


@pytest.mark.parametrize("command", classes())
def test_help(command, monkeypatch):
    monkeypatch.setenv("COLUMNS", "5000")
    with contextlib.redirect_stdout(io.StringIO()) as told, pytest.raises(SystemExit):
        main([*command.split(), "--help"])
    assert faults("\n\n".join(re.split(r"[│╭╰─╮╯\n]|  +", told.getvalue()))) == []


@pytest.mark.parametrize("name", ROWS)
def test_findings_and_verdicts(name):
    found = findings(ROWS[name])
    said = [each.sentence for each in found] + [each.says for each in judge(ROWS[name], found)[0]]
    assert faults("\n\n".join(said)) == []


def test_few_texts_are_kept_and_each_is_there():
    assert len(WORDS["kept"]) <= 20
    texts = "".join((REPOSITORY / page).read_text("utf-8") for page in WORDS["pages"])
    texts += "".join(each.sentence for rows in ROWS.values() for each in findings(rows))
    assert [kept for kept in WORDS["kept"] if kept not in texts] == []
