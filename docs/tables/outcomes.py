"""Tables of outcomes: odd models under data parallel wrappers, and models that others wrote under every command."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tables import DECLARED, beginning, kept, origin
from trainstep.report.tables import Table, text_table

OURS = ("ddp", "sharded optimizer", "fsdp")
WRAPPERS = (*OURS, "torch ddp", "torch fsdp2")
COMMANDS = DECLARED["models"]["commands"]
Cells = Mapping[str, Mapping[str, Mapping[str, Any]]]
"""Model → wrapper or command → outcome."""


def _odd() -> tuple[str, Cells]:
    """Where and when odd models were trained, and the cells: what is odd → wrapper → outcome."""
    found = kept("cpu-limits.json")
    cells = {row["odd"]: row["outcomes"] for row in found["scenarios"].values()}
    assert len(cells) == len(found["scenarios"]), "two scenarios have one description"
    return f"two processes over Gloo, {origin([found['environment']])}", cells


def _of_others() -> tuple[str, Mapping[str, str], Cells]:
    """Where and when models that others wrote were measured, their packages, and the cells by command."""
    models = kept("cpu-models.json")
    cells = {name: model["cells"] for name, model in models.items()}
    where = f"CPU, {origin(cell for row in cells.values() for cell in row.values())}"
    return where, {name: model["package"] for name, model in models.items()}, cells


def _word(row: Mapping[str, Mapping[str, Any]], name: str) -> str:
    cell = row.get(name, {"what": "–"})
    if cell["what"] == "raises":
        return "says what to do" if cell["is_named"] else "error of torch's"
    return str(cell["what"])


def odd_outcomes() -> Table:
    """Every scenario under every wrapper."""
    where, cells = _odd()
    lines = [(name, *(_word(row, scheme) for scheme in WRAPPERS)) for name, row in cells.items()]
    return text_table("limits", where, ("what is odd", *WRAPPERS), lines)


def outcomes() -> Table:
    """Every model under every command."""
    where, packages, cells = _of_others()
    lines = [(name, packages[name], *(_word(row, command) for command in COMMANDS)) for name, row in cells.items()]
    return text_table("models", where, ("model", "library", *COMMANDS), lines)


def errors() -> Table:
    """What our wrappers say where they do not train."""
    where, cells = _odd()
    lines = []
    for name, row in cells.items():
        said: dict[str, list[str]] = {}
        for scheme in OURS:
            if row[scheme]["what"] == "raises":
                said.setdefault(beginning(row[scheme]["detail"].partition(": ")[2], 160), []).append(scheme)
        lines += [(name, ", ".join(schemes), text) for text, schemes in said.items()]
    return text_table("limits errors", where, ("what is odd", "wrapper", "error"), lines)


def reasons() -> Table:
    """What was said where a cell is not right: each text once, with the models."""
    where, _, cells = _of_others()
    said: dict[tuple[str, str, str], list[str]] = {}
    for name, row in cells.items():
        for command in COMMANDS:
            cell = row.get(command, {"what": "right"})
            for text in cell["said"] if cell["what"] != "right" else ():
                said.setdefault((command, cell["what"], beginning(text, 200)), []).append(name)
    lines = [(command, what, ", ".join(names), text) for (command, what, text), names in said.items()]
    return text_table("models reasons", where, ("command", "outcome", "models", "what was said"), lines)


def odd_counts() -> Table:
    """How many scenarios came to what."""
    kinds = ("trains", "says what to do", "error of torch's", "wrong", "hangs", "crashes")
    return _counts("wrapper", *_odd(), WRAPPERS, kinds)


def counts() -> Table:
    """How many models came to what under each command."""
    where, _, cells = _of_others()
    kinds = sorted({_word(row, name) for row in cells.values() for name in COMMANDS} - {"–", "right", "limit"})
    return _counts("command", where, cells, COMMANDS, ("right", "limit", *kinds))


def _counts(what: str, where: str, cells: Cells, columns: Sequence[str], kinds: Sequence[str]) -> Table:
    found = {name: [_word(row, name) for row in cells.values()] for name in columns}
    lines = [(name, *(str(each.count(kind)) for kind in kinds)) for name, each in found.items()]
    return text_table("counts", where, (what, *kinds), lines)


TABLES = {
    "limits": odd_outcomes,
    "limits-errors": errors,
    "limits-counts": odd_counts,
    "models": outcomes,
    "models-reasons": reasons,
    "models-counts": counts,
}
