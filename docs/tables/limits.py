"""Tables of odd models under data parallel wrappers: what came out, and what the errors say."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tables import beginning, kept, origin
from trainstep.report.tables import Table, text_table

OURS = ("ddp", "sharded optimizer", "fsdp")
PEERS = ("torch ddp", "torch fsdp2")
Cell = Mapping[str, Any]


def _kept() -> tuple[str, dict[str, dict[str, Cell]]]:
    """Where and when it was measured, and the cells: what is odd → wrapper → outcome."""
    found = kept("cpu-limits.json")
    cells = {row["odd"]: row["outcomes"] for row in found["scenarios"].values()}
    assert len(cells) == len(found["scenarios"]), "two scenarios have one description"
    return f"two processes over Gloo, {origin([found['environment']])}", cells


def outcomes() -> Table:
    """Every scenario under every wrapper."""
    where, cells = _kept()
    lines = [(name, *(_in_words(row[scheme]) for scheme in (*OURS, *PEERS))) for name, row in cells.items()]
    return text_table("limits", where, ("what is odd", *OURS, *PEERS), lines)


def errors() -> Table:
    """What our wrappers say where they do not train."""
    where, cells = _kept()
    lines = []
    for name, row in cells.items():
        said: dict[str, list[str]] = {}
        for scheme in OURS:
            if row[scheme]["what"] == "raises":
                said.setdefault(beginning(row[scheme]["detail"].partition(": ")[2], 160), []).append(scheme)
        lines += [(name, ", ".join(schemes), text) for text, schemes in said.items()]
    return text_table("limits errors", where, ("what is odd", "wrapper", "error"), lines)


def counts() -> Table:
    """How many scenarios came to what."""
    where, cells = _kept()
    kinds = ("trains", "says what to do", "error of torch's", "wrong", "hangs", "crashes")
    lines = []
    for scheme in (*OURS, *PEERS):
        words = [_in_words(row[scheme]) for row in cells.values()]
        lines.append((scheme, *(str(sum(word == kind for word in words)) for kind in kinds)))
    return text_table("limits counts", where, ("wrapper", *kinds), lines)


def _in_words(cell: Cell) -> str:
    if cell["what"] == "raises":
        return "says what to do" if cell["is_named"] else "error of torch's"
    return str(cell["what"])


TABLES = {"limits": outcomes, "limits-errors": errors, "limits-counts": counts}
