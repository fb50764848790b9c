"""The documents say what is true: tables and figures come from docs/results/, commands exist, examples run."""

import dataclasses
import re
import shlex
from fnmatch import fnmatch
from pathlib import Path

import pytest

import conf
from render import NOTEBOOK, TABLES, headline, render
from render import PAGES as RENDERED
from tables import KEPT_THOUGH_DIRTY, RESULTS, DirtyError, kept, load, refuse_dirty, results, where
from tables.alone import alone_ms
from tests.commands.test_flags import classes, flags_of
from tests.report.test_answer import ROWS
from trainstep.base.stats import WITHIN_RUN, verdict
from trainstep.commands.cli import parse
from trainstep.report.subjects import findings
from trainstep.rows import AttentionRow, ChangeRow, ParallelRow, StepRow
from trainstep.rows.records import Row, Times, of_kind

REPOSITORY = Path(__file__).parents[1]
PAGES = [*RENDERED, REPOSITORY / "CONTRIBUTING.md"]
HISTORY = {page for page in NOTEBOOK.glob("*.md") if "<!-- table: " not in page.read_text("utf-8")}
"""Notes of their day, whose figures no table has."""


def test_tables_are_made_from_the_results():
    assert [page for page in RENDERED if render(text := page.read_text("utf-8")) != text] == [], "run `make docs`"


def test_what_is_typed_into_a_table_by_hand_does_not_stay():
    made = render("Before.\n\n<!-- table: warmup -->\nIt takes 1 ms.\n<!-- end -->\n\nIt takes 2 ms.\n")
    assert made.startswith("Before.\n\n<!-- table: warmup -->\n")
    assert made.endswith("\n<!-- end -->\n\nIt takes 2 ms.\n")
    assert "takes 1 ms" not in made
    assert re.search(r"\d\d\.\d", made), "the figures"
    assert render(made) == made


def test_an_unknown_table_is_an_error():
    with pytest.raises(SystemExit, match="no table is called 'nothing'"):
        render("<!-- table: nothing -->\n<!-- end -->")


def row(**environment):
    return StepRow(environment={"device": "G", "torch": "2", "triton": "3", "date": "d", **environment})


def test_a_caption_names_every_commit_and_host_of_its_rows():
    """The flash grid mixes five commits and hosts of 2, 16 and 32 threads."""
    one = where([row(commit="a", threads=16), row(commit="a", threads=16)])
    assert one == "G, torch 2, triton 3, d, 16 host threads, commit a"
    mixed = where([row(commit="a", threads=16), row(commit="b", threads=2, cpu="C", gpu_uuid="GPU-1"),
                   row(commit="a", threads=16)])  # fmt: skip
    assert mixed.startswith("G, torch 2, triton 3, d; 2 runs: ")
    runs = mixed.partition(": ")[2].split("; ")
    assert runs == ["16 host threads, commit a", "C, 2 host threads, GPU-1, commit b"]
    grid = results("h200-attention-flash", AttentionRow)
    assert {each.environment["commit"] for each in grid} == set(re.findall(r"commit ([0-9a-f]{10}\+?)", where(grid)))


def test_results_of_a_commit_with_changes_are_refused():
    refuse_dirty("x.jsonl", [row(commit="0123456789"), row(commit="unknown"), StepRow()])
    with pytest.raises(DirtyError, match=r"x.jsonl has rows of 0123456789\+"):
        refuse_dirty("x.jsonl", [row(commit="0123456788"), row(commit="0123456789+")])


def test_what_is_kept_though_dirty_is_in_the_results():
    """A commit whose rows were measured again goes from the list."""
    text = "".join(path.read_text("utf-8") for path in RESULTS.glob("*.jsonl"))
    assert set(re.findall(r'"commit": "([0-9a-f]{10}\+)"', text)) == KEPT_THOUGH_DIRTY


def test_a_sharded_scheme_is_held_against_a_step_that_updates_its_part_alone():
    """FSDP took 8.42 ms less than a step without communication, which updates twice the parameters."""
    rows = {each.scheme: each for each in results("h200-parallel", ParallelRow)}
    single, every = rows["single"].times, list(rows.values())
    half = single["step"].median - single["optimizer"].median / 2
    for scheme in ("fsdp", "sharded-optimizer", "torch-zero", "torch-fsdp2"):
        assert alone_ms(rows[scheme], every) == half, scheme
    for scheme in ("single", "torch-ddp", "bucketed-25"):
        assert alone_ms(rows[scheme], every) == single["step"].median, scheme
    assert 0 < rows["fsdp"].times["step"].median - half < 10
    assert alone_ms(rows["fsdp"], [rows["fsdp"]]) is None
    assert alone_ms(dataclasses.replace(rows["fsdp"], batch=1), every) is None, "another training"
    times = {"step": Times(100.0), "optimizer": Times(40.0)}
    single, hybrid = (
        ParallelRow(workload="large", world_size=8, scheme=name, replicas=replicas, times=times)
        for name, replicas in (("single", None), ("hsdp", 4))
    )
    assert alone_ms(hybrid, [single, hybrid]) == 100 - 40 / 2, "a rank of a replica updates its part of it"


def test_the_headlines_say_what_is_not_ours():
    """The speed-up from bf16 alone beside that from fp32; all shapes of attention, with what `auto` takes of them."""
    ladder, attention = (TABLES[name]() for name in ("headline-ladder", "attention-peers"))
    beside = [dict(zip(ladder.columns, texts, strict=True))["from bf16 autocast [95 %]"] for texts in ladder.texts()]
    assert beside[-1].startswith("1.97× [1.79–2.1"), beside
    shapes = {tuple(each.case.items()) for each in results("h200-attention-peers", AttentionRow) if each.impl == "flex"}
    assert len(attention.rows) == len(shapes) == 10
    assert attention.columns[-1] == "auto takes"
    assert {texts[-1] for texts in attention.texts()} == {"flash-triton"}


def test_every_table_and_output_is_on_a_page_and_the_picture_is_of_these_rows():
    """A table or output that no page shows is dead."""
    text, cells = "".join(page.read_text("utf-8") for page in PAGES), kept("outputs.json")
    assert set(re.findall(r"<!-- table: ([\w.-]+) -->", text)) == set(TABLES)
    assert set(re.findall(r"<!-- output: (\w+)", text)) == set(cells)
    assert cells["picture"]["text"] == headline(results("h200-analyze-2.7B", Row))
    assert len(PAGES[0].read_text("utf-8").splitlines()) <= 150
    own = "".join(page.read_text("utf-8") for page in PAGES if page.parent != NOTEBOOK)
    assert len(re.sub(MADE, "", own, flags=re.DOTALL).encode()) <= 250_000, "what no user needs goes to notebook/"


@pytest.mark.parametrize(
    "name",
    ["attention-peers", "attention-deterministic", "attention-naive", "parallel-ratios", "fused", "fused-dropped"],
)
def test_every_ratio_to_a_peer_has_its_interval(name):
    table = TABLES[name]()
    ratios = [text for texts in table.texts() for text in texts if "×" in text]
    assert len(ratios) >= len(table.rows) - 2, "all but two rows that were out of memory"
    for text in ratios:
        value, low, high = (float(each) for each in re.search(r"([\d.]+)× \[([\d.]+)–([\d.]+)\]", text).groups())
        assert low <= value <= high, text
    assert WITHIN_RUN in table.caption + "".join(table.columns)


MADE = r"<!-- (?:table|output): .*?<!-- end -->"
NUMBER = r"\d[\d,]*(?:\.\d+)?"
JOINED = rf"(?:{NUMBER}(?: to | and |–|/| → ))*"
FIGURE = re.compile(rf"({JOINED}{NUMBER}) ?(?:ms|µs|GiB|MiB|TFLOP/s|GB/s|TB/s|%(?! interval)|×(?! ?\d)|times)(?!\w)")
"""What a measurement looks like. MB and s are left out: here they are settings, such as a bucket's size."""
DEFINITIONS = {
    "CONTRIBUTING.md": ("at least 95 % of the mutants must be noticed",),
    "howto/ci.md": ("whose true loss is 5 % or less", "a side that differ by 1 %", "A loss of 10 % failed"),
    "fused.md": ("logits of at most 1.25 GiB at a time",),
    "ladder.md": ("Below 1 % such", "files below 64 MiB are copied for each run, 4 GiB"),
    "profile.md": ("more than 2% of kernel time", "2.5 times that backward"),
    "trust.md": ("calls at 5 % or less", "fewer than 95 % are killed"),
    "verdicts.md": ("grows by 16 MiB",),
    "notebook/memory.md": ("(20 MiB, made for the test)",),
    "notebook/theory.md": ("1 µs within a node, 5 µs between nodes", "20 % too fast, FSDP 14 % ([lab log]"),
    "notebook/trust.md": ("wider than 95 %", "calls at 5 % or less", "fewer than 95 %"),
}
"""Page → what is no measurement of ours: definitions, assumptions, and figures that name their source."""


def unmeasured(text, allowed=()):
    """The figures of a page's prose that none of its tables has, each with the words before it."""
    made = "".join(re.findall(MADE, text, re.DOTALL))
    cells = {number.replace(",", "") for number in re.findall(NUMBER, made)}
    prose = re.sub(rf"{MADE}|```.*?```|`[^`]*`", " ", text, flags=re.DOTALL)
    prose = " ".join(prose.split())
    for phrase in allowed:
        assert phrase in prose, f"{phrase!r} is not on the page: take it out of DEFINITIONS"
        prose = prose.replace(phrase, "")
    return [
        prose[max(0, found.start() - 50) : found.end()]
        for found in FIGURE.finditer(prose)
        if any(number.replace(",", "") not in cells for number in re.findall(NUMBER, found[1]))
    ]


@pytest.mark.parametrize("page", sorted(set(PAGES) - HISTORY), ids=lambda page: page.name)
def test_every_figure_in_prose_is_a_cell_of_a_table_on_its_page(page):
    """It would be free to contradict docs/results/ after the next measurement. The notebook has the course's."""
    name = str(page.relative_to(REPOSITORY)).removeprefix("docs/")
    figures = (NOTEBOOK / name).read_text("utf-8") if name == "course.md" else ""
    assert unmeasured(page.read_text("utf-8") + figures, DEFINITIONS.get(name, ())) == []


def test_a_figure_that_no_table_has_is_found():
    table = "<!-- table: a -->\n| 12.3 | 1,039 |\n<!-- end -->"
    typed = (
        f"Forward takes\n12.3 ms, 1.6 times as long, 5 GiB, 12.3 to 13 ms.\n{table}\n`2 ms`, 1,039 ms, 4 msgs, 3 × 5"
    )
    assert [each.split()[-2:] for each in unmeasured(typed)] == [["1.6", "times"], ["5", "GiB"], ["13", "ms"]]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_pictures_exist(page):
    for target in re.findall(r"\]\((?!https?://|#)([^)#\s]+)", page.read_text(encoding="utf-8")):
        assert (page.parent / target).exists(), f"{page.name} points to {target}, which is not there"


LINE = re.compile(r"^(?:\$ )?(?:.* -m )?trainstep (\w[^>|$\n]*)", re.MULTILINE)


def lines_of(page):
    """The words after `trainstep` in the code blocks of a page."""
    blocks = re.findall(r"^```(?:sh|bash|console)\n(.*?)^```", page.read_text("utf-8"), re.DOTALL | re.MULTILINE)
    return LINE.findall("".join(blocks).replace("\\\n", " "))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_in_the_documents_parse(page):
    """Those of sizes that no test runs as well."""
    for line in lines_of(page):
        parse(shlex.split(line, comments=True))


def test_enough_commands_are_found():
    """The expression would be free to find none."""
    assert sum(len(lines_of(page)) for page in PAGES) > 120


def test_the_site_has_every_flag_and_every_finding():
    sections = re.findall(r"^## (.*?)$(.*?)(?=^## |\Z)", "\n".join(conf.commands()), re.DOTALL | re.MULTILINE)
    assert [command for command, _ in sections] == list(classes())
    for command, text in sections:
        flags = {flag.replace("_", "-").removeprefix("no-") for flag in flags_of(command)}
        assert flags ^ set(re.findall(r"^- `--(?:no-)?([\w-]+)", text, re.MULTILINE)) == set(), command
    ids = re.findall(r"^\| `(.+?)` \|", "\n".join(conf.findings()), re.MULTILINE)
    seen = {each.id for rows in ROWS.values() for each in findings(rows)}
    assert [each for each in seen if not any(fnmatch(each, id.replace("…", "*")) for id in ids)] == []


def test_a_ladder_beside_other_work_says_what_the_same_ladder_says_alone():
    """Times one after the other said 86× of BERT's."""
    pairs = load.all_pairs()
    assert len(pairs) >= 10
    assert all(len(of_kind(rows, ChangeRow)) >= 3 for pair in pairs for rows in (pair.alone, pair.beside))
    rungs = list(load.changes_of(pairs))
    assert len(rungs) >= 25
    apart = [each for each in rungs if load.are_apart(each.alone, each.beside)]
    assert len(apart) <= 0.05 * len(rungs), apart
    opposite = [each for each in rungs if {verdict(each.alone), verdict(each.beside)} == {"faster", "slower"}]
    assert opposite == []
