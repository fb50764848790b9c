"""Tables of models that others wrote under every command: what came out, and what was said where it is not right."""

from __future__ import annotations

import json
from typing import Any

from tables import RESULTS, DirtyError, NotMeasuredError
from trainstep.report.tables import Table, text_table

COMMANDS = (
    *("analyze", "profile", "dtypes", "timeline", "residuals", "checkpointing", "peaks", "bench step"),
    *("bench parallel", "plan"),
)


def _kept() -> tuple[str, dict[str, dict[str, Any]]]:
    """Where and when they were measured, and the models with their cells."""
    path = RESULTS / "cpu-models.json"
    if not path.exists():
        raise NotMeasuredError(path.name)
    models = json.loads(path.read_text(encoding="utf-8"))
    said = set()
    for cell in (cell for model in models.values() for cell in model["cells"].values()):
        if str(cell["commit"]).endswith("+"):
            raise DirtyError(f"docs/results/{path.name} is of a commit with changes; commit, and measure again")
        said.add(f"torch {cell['torch']}, {cell['date']}, commit {cell['commit']}")
    return f"CPU, {'; '.join(sorted(said))}", models


def outcomes() -> Table:
    """Every model under every command."""
    where, models = _kept()
    lines = []
    for name, model in models.items():
        cells = (model["cells"].get(command, {}).get("what", "–") for command in COMMANDS)
        lines.append((name, model["package"], *cells))
    return text_table("models", where, ("model", "library", *COMMANDS), lines)


def reasons() -> Table:
    """What was said where a cell is not right: each text once, with the models."""
    where, models = _kept()
    said: dict[tuple[str, str, str], list[str]] = {}
    for name, model in models.items():
        for command in COMMANDS:
            cell = model["cells"].get(command)
            for text in cell["said"] if cell is not None and cell["what"] != "right" else ():
                said.setdefault((command, cell["what"], _beginning(text)), []).append(name)
    lines = [(command, what, ", ".join(names), text) for (command, what, text), names in said.items()]
    return text_table("models reasons", where, ("command", "outcome", "models", "what was said"), lines)


def counts() -> Table:
    """How many models came to what under each command."""
    where, models = _kept()
    kinds = list(dict.fromkeys(["right", "limit", *sorted(_outcomes(models))]))
    lines = []
    for command in COMMANDS:
        found = [model["cells"][command]["what"] for model in models.values() if command in model["cells"]]
        lines.append((command, *(str(found.count(kind)) for kind in kinds)))
    return text_table("models counts", where, ("command", *kinds), lines)


def _outcomes(models: dict[str, dict[str, Any]]) -> set[str]:
    return {cell["what"] for model in models.values() for cell in model["cells"].values()}


def _beginning(text: str) -> str:
    return text if len(text) <= 200 else f"{text[:197].rsplit(' ', 1)[0]} …"


TABLES = {"models": outcomes, "models-reasons": reasons, "models-counts": counts}
