"""The commit of the code that measured."""

from __future__ import annotations

import subprocess
from pathlib import Path


def commit_of(here: Path = Path(__file__).parents[1]) -> str:
    """The checkout's commit, "+" appended where files in `here` differ from it; "unknown" outside a checkout."""

    def git(*arguments: str) -> str:
        command = ["git", *arguments]
        done = subprocess.run(command, cwd=here, capture_output=True, text=True, timeout=10, check=True)
        return done.stdout.strip()

    try:
        return git("rev-parse", "--short=10", "HEAD") + ("+" if git("status", "--porcelain", "--", ".") else "")
    except (OSError, subprocess.SubprocessError):
        return "unknown"
