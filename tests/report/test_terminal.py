"""Tables in a terminal, of any width: whole cells, whole lines, and every row told apart in every part."""

import io
import re

import pytest
import rich.cells
import rich.console

from trainstep.report.tables import text_table
from trainstep.report.terminal import LONGEST_CELL, to_terminal

TITLES = ("scheme", "blocks a group", "step (ms) [95 %]", "tokens/s", "sent by plan (GiB)", "peak (GiB)", "outcome")
LONG = "failed: one of the ranks ended, and the others waited for it until their time was up, which is " + "long " * 9
ROWS = (
    ("hsdp", "1", "123 [121–129]", "66,432", "14.2", "27.1", "ok"),
    ("hsdp", "2", "111 [109–116]", "74,090", "14.1", "28.3", "ok"),
    ("sharded-optimizer-1000-overlapped", "–", "115 [113–116]", "71,273", "19.0", "33.6", LONG),
)


def drawn(table, width):
    console = rich.console.Console(file=io.StringIO(), width=width, force_terminal=False)
    console.print(to_terminal(table, width))
    return console.file.getvalue()


def parts(text):
    """Of each part, the lines under its rule."""
    text = "\n".join(line.rstrip() for line in text.splitlines())
    after_rules = re.split(r"^[ ─]*─[ ─]*$", text, flags=re.MULTILINE)[1:]
    return [part.strip().split("\n\n")[0].splitlines() for part in after_rules]


@pytest.mark.parametrize("width", range(80, 241, 10))
def test_no_number_and_no_name_is_broken_at_any_width(width):
    text = drawn(text_table("t", "A caption", TITLES, ROWS), width)
    assert all(len(line) <= width for line in text.splitlines())
    for row in ROWS:
        for cell in row[:-1]:
            assert cell in text, f"{cell} at {width}"
    assert "…" in text
    for word in LONG[: LONGEST_CELL - 1].split()[:-1]:
        assert word in text


def test_parts_repeat_the_columns_that_tell_rows_apart():
    text = drawn(text_table("t", "A caption", TITLES[:-1], [row[:-1] for row in ROWS]), 80)
    found = parts(text)
    assert len(found) == 2
    for lines in found:
        assert [line.split()[:2] for line in lines] == [[row[0], row[1]] for row in ROWS]
        assert all(line.split()[2:] for line in lines), "and have others beside them"
    assert text.count("A caption") == 1


def test_columns_that_tell_rows_apart_need_not_stand_together():
    rows = [("ddp", "4", kept, f"{number}.5", "weights", "30.2") for number, kept in enumerate(("none", "every-1"))]
    text = drawn(text_table("t", "c", ("strategy", "GPUs", "checkpointing", "peak", "where", "room"), rows), 50)
    first, second = parts(text)
    assert [line.split()[:3] for line in first] == [["ddp", "4", "none"], ["ddp", "4", "every-1"]]
    assert [line.split()[:2] for line in second] == [["ddp", "none"], ["ddp", "every-1"]]


def test_what_fits_is_one_part_under_titles_of_one_line():
    text = drawn(text_table("t", "A caption", TITLES[:-1], [row[:-1] for row in ROWS]), 120)
    assert len(parts(text)) == 1
    assert any(all(title in line for title in TITLES[:-1]) for line in text.splitlines())


@pytest.mark.parametrize("rows", [[("x" * 60, "1.5", "")], [("模型" * 5, "1.25", "一二三四五"), ("ddp", "1.5", "x")]])
def test_wide_columns_are_folded_and_wide_characters_take_two_places(rows):
    text = drawn(text_table("t", "c", ("scheme", "step (ms)", "note"), rows), 44)
    assert all(cell in re.sub(r"(?<=x)\s+(?=x)", "", text) for row in rows for cell in row)
    assert all(rich.cells.cell_len(line) <= 44 for line in text.splitlines())
