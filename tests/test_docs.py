"""The documents say what is true: tables come from docs/results/, commands exist, examples run."""

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


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_pictures_exist(page):
    for target in re.findall(r"\]\((?!https?://|#)([^)#\s]+)", page.read_text(encoding="utf-8")):
        assert (page.parent / target).exists(), f"{page.name} points to {target}, which is not there"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_in_the_documents_parse(page):
    """Every `trainstep …` line of a code block names flags and commands that exist."""
    blocks = re.findall(r"```(?:sh|bash|console)\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    lines = [line.removeprefix("$ ").strip() for block in blocks for line in block.splitlines()]
    for line in (line.split("#")[0] for line in lines if re.match(r"(\$ )?trainstep ", line)):
        words = line.split()[1:]
        flags = [word for word in words if word.startswith("--")]
        command = words[: next((i for i, word in enumerate(words) if word.startswith("-") or "." in word), len(words))]
        found = subprocess.run(
            [sys.executable, "-m", "trainstep.cli", *command, "--help"], capture_output=True, text=True, cwd=REPOSITORY
        )
        assert found.returncode == 0, f"{page.name}: {line}"
        missing = [flag for flag in flags if flag not in found.stdout]
        assert not missing, f"{page.name}: {line}: no flag {missing}"
