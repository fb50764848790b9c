"""Tables of models that others wrote under every command: what came out, and what was said where it is not right."""

from __future__ import annotations

from typing import Any

from tables import DECLARED, beginning, kept, origin
from trainstep.report.tables import Table, text_table

COMMANDS = DECLARED["models"]["commands"]


def _kept() -> tuple[str, dict[str, dict[str, Any]]]:
    """Where and when they were measured, and the models with their cells."""
    models = kept("cpu-models.json")
    return f"CPU, {origin(cell for model in models.values() for cell in model['cells'].values())}", models


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
            cell = model["cells"].get(command, {"what": "right"})
            for text in cell["said"] if cell["what"] != "right" else ():
                said.setdefault((command, cell["what"], beginning(text, 200)), []).append(name)
    lines = [(command, what, ", ".join(names), text) for (command, what, text), names in said.items()]
    return text_table("models reasons", where, ("command", "outcome", "models", "what was said"), lines)


def counts() -> Table:
    """How many models came to what under each command."""
    where, models = _kept()
    found = {name: [model["cells"].get(name, {}).get("what") for model in models.values()] for name in COMMANDS}
    kinds = dict.fromkeys(["right", "limit", *sorted({what for each in found.values() for what in each if what})])
    lines = [(name, *(str(each.count(kind)) for kind in kinds)) for name, each in found.items()]
    return text_table("models counts", where, ("command", *kinds), lines)


TABLES = {"models": outcomes, "models-reasons": reasons, "models-counts": counts}
