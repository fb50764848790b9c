"""The documents say what is true: tables and figures come from docs/results/, commands exist, examples run."""

import functools
import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
PAGES = [REPOSITORY / "README.md", REPOSITORY / "CONTRIBUTING.md", *sorted((REPOSITORY / "docs").glob("*.md"))]


def test_tables_are_made_from_the_results():
    found = subprocess.run(
        [sys.executable, "docs/render.py", "--check"], cwd=REPOSITORY, capture_output=True, text=True
    )
    assert found.returncode == 0, f"{found.stdout}{found.stderr}: run `make docs` and commit"


@pytest.fixture(scope="module")
def render():
    """docs/render.py, imported."""
    sys.path.insert(0, str(REPOSITORY / "docs"))
    try:
        spec = importlib.util.spec_from_file_location("render", REPOSITORY / "docs" / "render.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    finally:
        sys.path.pop(0)
    return module.render


@pytest.mark.parametrize("block", ["text: benchmark", "table: warmup"])
def test_what_is_typed_into_a_block_by_hand_does_not_stay(render, block):
    made = render(f"Before.\n\n<!-- {block} -->\nIt takes 1 ms.\n<!-- end -->\n\nIt takes 2 ms.\n")
    assert made.startswith(f"Before.\n\n<!-- {block} -->\n")
    assert made.endswith("\n<!-- end -->\n\nIt takes 2 ms.\n")
    assert "takes 1 ms" not in made
    assert re.search(r"\d\d\.\d", made), "the figures"
    assert block.startswith("table") or all(len(line) <= 120 for line in made.splitlines())
    assert render(made) == made


def test_an_unknown_text_is_an_error(render):
    with pytest.raises(SystemExit, match="no text is called 'nothing'"):
        render("<!-- text: nothing -->\n<!-- end -->")


def test_every_text_is_on_a_page(render):
    """A text that no page shows is dead."""
    shown = set(re.findall(r"<!-- text: ([\w.-]+) -->", "".join(page.read_text("utf-8") for page in PAGES)))
    assert shown == set(render.__globals__["TEXTS"])


HISTORY = {"decisions.md", "lab-log.md", "lab-log-attention.md"}
FIGURE = re.compile(r"\d ?(?:ms|µs|GiB|MiB|TFLOP/s|GB/s|TB/s|%|times)(?!\w)")
"""What a measurement looks like. MB and s are left out: here they are settings, such as a bucket's size."""
DEFINITIONS = {
    "README.md": ("95 % interval by order statistics", "the 2 % that runs differ by"),
    "attention.md": ("takes 5.364 ms on an H100",),  # published by others, with its source
    "profile.md": ("more than 2% of kernel time", "2.5 times that backward"),
    "theory.md": ("1 µs within a node, 5 µs between nodes: assumptions", "20 % too fast, FSDP 14 % ([lab log]"),
}
"""Page → what may stay typed by hand: definitions, assumptions, and figures that name the source they come from."""


def typed_by_hand(text):
    """`text` in one line, without what is made and without code."""
    text = re.sub(r"<!-- (?:table|text): .*?<!-- end -->", " ", text, flags=re.DOTALL)
    text = re.sub(r"```.*?```|`[^`]*`", " ", text, flags=re.DOTALL)
    return " ".join(text.split())


def figures_of(text, allowed):
    """The measurements in `text` outside of the phrases `allowed`, each with the words before it."""
    for phrase in allowed:
        text = text.replace(phrase, "")
    return [text[max(0, found.start() - 50) : found.end()] for found in FIGURE.finditer(text)]


@pytest.mark.parametrize("page", [page for page in PAGES if page.name not in HISTORY], ids=lambda page: page.name)
def test_no_measured_figure_is_typed_by_hand(page):
    """It would be free to contradict docs/results/ after the next measurement."""
    text, allowed = typed_by_hand(page.read_text("utf-8")), DEFINITIONS.get(page.name, ())
    assert [phrase for phrase in allowed if phrase not in text] == [], "not on the page: take it out of DEFINITIONS"
    assert figures_of(text, allowed) == [], (
        f"{page.name} has figures outside of made blocks: make the paragraph in docs/texts/, or add the phrase to "
        "DEFINITIONS if it is no measurement of ours"
    )


def test_a_measured_figure_is_recognised():
    made = "<!-- text: a -->\n1 ms\n<!-- end -->"
    typed = f"Forward takes\n12.3 ms, 1.6 times as long, and 5 GiB.\n{made}\n`2 ms`, 25 MB in 4 msgs"
    found = figures_of(typed_by_hand(typed), ["5 GiB"])
    assert [each.split()[-2:] for each in found] == [["12.3", "ms"], ["1.6", "times"]]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_pictures_exist(page):
    for target in re.findall(r"\]\((?!https?://|#)([^)#\s]+)", page.read_text(encoding="utf-8")):
        assert (page.parent / target).exists(), f"{page.name} points to {target}, which is not there"


@functools.cache
def help_of(*command):
    return subprocess.run(
        [sys.executable, "-m", "trainstep", *command, "--help"], capture_output=True, text=True, cwd=REPOSITORY
    )


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_in_the_documents_parse(page):
    """Every `trainstep …` line of a code block names flags and commands that exist."""
    blocks = re.findall(r"```(?:sh|bash|console)\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    lines = [line.removeprefix("$ ").strip() for block in blocks for line in block.splitlines()]
    for line in (line.split("#")[0] for line in lines if re.match(r"(\$ )?trainstep ", line)):
        words = line.split()[1:]
        flags = [word for word in words if word.startswith("--")]
        command = words[: next((i for i, word in enumerate(words) if word.startswith("-") or "." in word), len(words))]
        found = help_of(*command)
        assert found.returncode == 0, f"{page.name}: {line}"
        missing = [flag for flag in flags if flag not in found.stdout]
        assert not missing, f"{page.name}: {line}: no flag {missing}"
