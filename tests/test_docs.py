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


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_pictures_exist(page):
    for target in re.findall(r"\]\((?!https?://|#)([^)#\s]+)", page.read_text(encoding="utf-8")):
        assert (page.parent / target).exists(), f"{page.name} points to {target}, which is not there"


@functools.cache
def help_of(*command):
    return subprocess.run(
        [sys.executable, "-m", "trainstep.cli", *command, "--help"], capture_output=True, text=True, cwd=REPOSITORY
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
